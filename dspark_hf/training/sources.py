"""Where training texts come from: records of a JSONL file or a dataset, given or to be answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dspark_hf.errors import ConfigError
from dspark_hf.training.data import Text, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedTokenizerBase

COLUMNS = ("ids", "messages", "chat", "prompt", "text")
"""What a record may hold; the first that it has counts."""
JSON_SUFFIXES = (".jsonl", ".json")
DEFAULT_SPLIT = "train"

Prompt = tuple[int, ...]
"""Ids up to where the target's answer begins."""


def read_records(data: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a source record by record.

    Args:
        data: JSONL file; folder of a dataset, saved by `datasets` or of data files; or the id of a
            dataset on the hub. The latter two may name a split behind a colon.

    Yields:
        tuple[str, dict[str, Any]]: Where the record is, for errors, and the record.

    Raises:
        ConfigError: If there is no such source, or a line is no JSON object.
    """
    path = Path(data)
    if path.is_file() or path.suffix in JSON_SUFFIXES:
        yield from _lines(path)
        return
    for number, record in enumerate(_dataset(data), start=1):
        yield f"row {number} of {data}", dict(record)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise ConfigError(f"--data must be a file that exists; {str(path)!r} does not.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"line {number} of {path}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{place} must be a JSON object; got: {error}.") from error
            if not isinstance(record, dict):
                raise ConfigError(
                    f"{place} must be a JSON object; got a {type(record).__name__}. Put one of "
                    f"{list(COLUMNS)} into an object."
                )
            yield place, record


def _dataset(data: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"--data {data!r} is no file and needs the package datasets; it is not installed. "
            "Run: pip install 'dspark-hf[train]'"
        ) from error
    name, _, split = data.partition(":")
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            if not isinstance(loaded, datasets.DatasetDict):
                return loaded
            return loaded[split or DEFAULT_SPLIT]
        return datasets.load_dataset(name, split=split or DEFAULT_SPLIT)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
    ) as error:
        raise ConfigError(
            "--data must be a JSONL file, the folder of a dataset or the id of one on the hub, "
            f"with :SPLIT unless it is {DEFAULT_SPLIT!r}; loading {data!r} failed: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from error


def is_given(record: Mapping[str, Any], *, regenerate: bool) -> bool:
    """Tell whether a record is a whole text, rather than a prompt to be answered.

    Args:
        record: As read.
        regenerate: Whether answers of chats are dropped and written anew by the target.
    """
    if "ids" in record:
        return True
    turns = messages_of(record)
    if turns is not None:
        return not regenerate and bool(turns) and turns[-1].get("role") == "assistant"
    return "prompt" not in record


def messages_of(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return a record's chat, whatever its column; None if it holds none."""
    for column in ("messages", "chat", "prompt"):
        if isinstance(record.get(column), list):
            return cast("list[dict[str, Any]]", record[column])
    return None


def parse(
    place: str,
    record: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    regenerate: bool = False,
) -> Text | Prompt:
    """Turn a record into ids.

    Args:
        place: Where it is, for errors.
        record: As read.
        tokenizer: The target's.
        regenerate: As for `is_given`.

    Returns:
        Text | Prompt: A text to learn from, or what the target is to answer.

    Raises:
        ConfigError: If the record holds nothing that can be used, naming its place.
    """
    try:
        if not any(record.get(column) is not None for column in COLUMNS):
            raise KeyError(f"its columns are {list(record)}")
        turns = messages_of(record)
        if is_given(record, regenerate=regenerate):
            if turns is not None and "ids" not in record:
                return text_of({"messages": turns}, tokenizer)
            return text_of(dict(record), tokenizer)
        if turns is None:
            turns = [{"role": "user", "content": str(record["prompt"])}]
        return prompt_ids(turns, tokenizer)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{place} must hold one of {list(COLUMNS)}; reading it failed: {error}"
        ) from error


def prompt_ids(turns: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Encode a chat up to where the assistant answers; plain text without a chat template.

    Args:
        turns: Messages; a last one by the assistant is left out.
        tokenizer: The target's.

    Raises:
        ValueError: If there are no messages, or several and no chat template.
    """
    if turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    if not turns:
        raise ValueError("there must be a message to answer")
    if getattr(tokenizer, "chat_template", None):
        ids = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    elif len(turns) == 1:
        ids = tokenizer(turns[0]["content"])["input_ids"]
    else:
        raise ValueError("a chat of several messages needs a tokenizer with a chat template")
    if not ids:
        raise ValueError("the prompt is empty")
    return tuple(ids)
