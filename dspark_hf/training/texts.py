"""Training texts of the target's own writing: prompts answered, or chats it makes up itself.

Each text is written to OUT/texts.jsonl when it is finished. What a text says follows from the seed
and the number of its job alone, up to the rounding of logits, which depends on the rows that run
beside it; the order in the file is that of completion. A run that was killed is continued: texts in
the file stay, those in flight are begun again with the same samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import random
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

import torch
from tqdm.auto import tqdm

from dspark_hf.errors import ConfigError
from dspark_hf.files import written_whole
from dspark_hf.losslessness import end_ids
from dspark_hf.targets.select import choose_target
from dspark_hf.training.data import Text
from dspark_hf.training.sources import JSON_SUFFIXES, is_given, parse, read_records
from dspark_hf.training.synthesis import Job, Lengths, Template, converse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TEXTS_FILE = "texts.jsonl"
FACTS_FILE = "texts.json"
DOMAINS = {"chat": 2, "code": 2, "maths": 1}
"""Shares of the openers that made-up questions begin with."""
MIN_ANSWER = 2
"""Tokens an answer must have room for."""
FACTS_EVERY = 50
"""Texts between two writings of the facts."""


@dataclass(frozen=True)
class TextRequest:
    """What texts are wanted.

    Attributes:
        data: As for `sources.read_records`; None lets the target make up the questions.
        tokens: Answer tokens after which no further text is begun; None for all prompts of `data`.
        seed: Of everything random.
        rows: Texts written at a time.
        question_tokens: Longest question that is made up.
        answer_tokens: Longest answer.
        temperatures: One is drawn per answer; 0 is greedy.
        regenerate: Whether answers found in chats are replaced by the target's.
        max_tokens: Prompts that leave no room for an answer within it are left out.
    """

    data: str | None = None
    tokens: int | None = None
    seed: int = 0
    rows: int = 64
    question_tokens: int = 64
    answer_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    regenerate: bool = False
    max_tokens: int = 512

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the parameter."""
        for name in ("rows", "question_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"tokens must be at least 1; got {self.tokens}.")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(
                f"temperatures must be one or more numbers from 0 on; got {self.temperatures}."
            )
        if self.data is None and self.tokens is None:
            raise ConfigError("tokens must say how much to write where no data is given; got none.")


def is_ready_made(data: str | None, *, regenerate: bool = False) -> bool:
    """Tell whether a source is a file whose texts are used as they are.

    Args:
        data: The source.
        regenerate: As for `TextRequest`.

    Raises:
        ConfigError: If a line of it cannot be read.
    """
    if data is None or Path(data).suffix not in JSON_SUFFIXES:
        return False
    return all(
        is_given(record, regenerate=regenerate) and "chat" not in record and "prompt" not in record
        for _, record in read_records(data)
    )


def write_texts(
    request: TextRequest, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path
) -> Path:
    """Write the texts of a run, or what is missing of them.

    Args:
        request: What is wanted.
        model: The target, in evaluation mode.
        tokenizer: Its tokenizer.
        out: Folder of the run.

    Returns:
        Path: The file; OUT/texts.json tells what is in it.

    Raises:
        ConfigError: If the folder holds texts of another request, or the source cannot be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    facts = _claim(request, out)
    path = out / TEXTS_FILE
    if facts.get("complete"):
        return path
    done = _repair(path)
    with path.open("a", encoding="utf-8") as file:
        writer = _Writer(file, out / FACTS_FILE, facts, request)
        for record in done.values():
            writer.count(record)
        writer.start()
        _write(request, model, tokenizer, set(done), writer)
        writer.finish()
    return path


class _Writer:
    """Appends texts and keeps account of them."""

    def __init__(
        self, file: TextIO, facts_path: Path, facts: dict[str, Any], request: TextRequest
    ) -> None:
        self.file, self.facts_path, self.facts = file, facts_path, facts
        self.before = float(facts.get("seconds", 0.0))
        self.begin = perf_counter()
        self.texts = self.tokens = self.answer_tokens = self.skipped = 0
        self.wanted = request.tokens
        self.bar: Any = None

    def start(self) -> None:
        self.bar = tqdm(
            total=self.wanted,
            initial=self.answer_tokens,
            desc="texts",
            unit="tok",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )

    def count(self, record: Mapping[str, Any]) -> int:
        answer = len(record["ids"]) - int(record["answer_start"])
        self.texts += 1
        self.tokens += len(record["ids"])
        self.answer_tokens += answer
        return answer

    def add(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        # What is finished survives a kill.
        self.file.flush()
        self.bar.update(self.count(record))
        if self.texts % FACTS_EVERY == 0:
            self.save(complete=False)

    def finish(self) -> None:
        self.save(complete=True)
        self.bar.close()

    def save(self, *, complete: bool) -> None:
        seconds = self.before + perf_counter() - self.begin
        self.facts.update(
            complete=complete,
            texts=self.texts,
            tokens=self.tokens,
            answer_tokens=self.answer_tokens,
            skipped=self.skipped,
            seconds=round(seconds, 1),
            answer_tokens_per_s=round(self.answer_tokens / max(seconds, 1e-9), 1),
        )
        _replace(self.facts_path, json.dumps(self.facts, indent=1) + "\n")


def _write(
    request: TextRequest,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    done: set[int],
    writer: _Writer,
) -> None:
    ends = end_ids(model, {})
    if request.data is None:
        template = Template.of(tokenizer, ends)
        jobs = _questions(request, template, tokenizer)
    else:
        template = Template((), (), frozenset(ends))
        jobs = _prompts(request, tokenizer, writer, done)
    wanted = math.inf if request.tokens is None else request.tokens

    def waiting() -> Iterator[Job]:
        for job in jobs:
            if writer.answer_tokens >= wanted:
                return
            if job.index not in done:
                yield job

    rows = request.rows
    if request.tokens is not None:
        # Rows in flight are finished: more of them than needed would write far more than asked.
        rows = max(1, min(rows, math.ceil(request.tokens / request.answer_tokens)))
    lengths = Lengths(request.question_tokens, request.answer_tokens)
    with torch.inference_mode():
        target = choose_target(model).build(model, request.max_tokens)
        for text in converse(target, template, waiting(), num_rows=rows, lengths=lengths):
            writer.add(
                {
                    "ids": text.ids,
                    "answer_start": text.answer_start,
                    "temperature": text.temperature,
                    "domain": text.domain or None,
                    "job": text.index,
                }
            )


def _questions(
    request: TextRequest, template: Template, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Job]:
    """Yield jobs that begin a question with an opener, without end."""
    source = resources.files("dspark_hf.data").joinpath("openers.json")
    openers = json.loads(source.read_text(encoding="utf-8"))
    ids = {
        text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()
        for domain in DOMAINS
        for text in openers[domain]
    }
    for index in itertools.count():
        draw = random.Random(f"{request.seed}:{index}")  # noqa: S311 - no secret
        domain = draw.choices(list(DOMAINS), weights=list(DOMAINS.values()))[0]
        opener = draw.choice(openers[domain])
        yield Job(
            (*template.before, *ids[opener]),
            asks=True,
            temperature=draw.choice(request.temperatures),
            domain=domain,
            index=index,
            seed=request.seed,
        )


def _prompts(
    request: TextRequest, tokenizer: PreTrainedTokenizerBase, writer: _Writer, done: set[int]
) -> Iterator[Job]:
    """Yield jobs that answer a source's prompts; its whole texts are written as they are."""
    for index, (place, record) in enumerate(read_records(request.data or "")):
        if index in done:
            continue
        parsed = parse(place, record, tokenizer, regenerate=request.regenerate)
        if isinstance(parsed, Text):
            if len(parsed.ids) > parsed.start:
                writer.add({"ids": parsed.ids, "answer_start": parsed.start, "job": index})
            continue
        if len(parsed) + MIN_ANSWER > request.max_tokens:
            writer.skipped += 1
            continue
        draw = random.Random(f"{request.seed}:{index}")  # noqa: S311 - no secret
        yield Job(
            parsed,
            asks=False,
            temperature=draw.choice(request.temperatures),
            index=index,
            seed=request.seed,
        )


def _claim(request: TextRequest, out: Path) -> dict[str, Any]:
    """Return the facts of the folder's texts, or refuse to continue those of another request."""
    wanted = json.loads(json.dumps(dataclasses.asdict(request)))
    path = out / FACTS_FILE
    if not path.is_file():
        facts = {"request": wanted, "complete": False}
        _replace(path, json.dumps(facts, indent=1) + "\n")
        return facts
    facts = dict(json.loads(path.read_text(encoding="utf-8")))
    changed = {k: v for k, v in facts["request"].items() if wanted.get(k, v) != v}
    # How many run at a time decides nothing but the speed.
    changed.pop("rows", None)
    if changed:
        raise ConfigError(
            f"{out} holds texts written with other settings: {changed}; got "
            f"{ {k: wanted[k] for k in changed} }. Continue them with what they were started with, "
            "or choose a new folder."
        )
    return facts


def _repair(path: Path) -> dict[int, dict[str, Any]]:
    """Cut off half a line that a kill left; return the whole records by the number of their job."""
    if not path.is_file():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        logger.info("Cutting an unfinished line off %s.", path)
        with path.open("r+b") as file:
            file.truncate(len(whole))
    records = [json.loads(line) for line in whole.splitlines() if line.strip()]
    return {record["job"]: record for record in records}


def _replace(path: Path, content: str) -> None:
    with written_whole(path) as partial:
        partial.write_text(content, encoding="utf-8")
