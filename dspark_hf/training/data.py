"""Training texts: token ids, where drafting begins in each, and their order by seed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

BUCKET_BATCHES = 16
"""Batches whose texts are sorted by length together, so that padding is small and order random."""


@dataclass(frozen=True)
class Text:
    """One training text.

    Attributes:
        ids: Token ids.
        start: Index of the first token the target wrote; anchors lie from here on.
    """

    ids: tuple[int, ...]
    start: int


def read_texts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    min_answer: int = 2,
    only_answers: bool = True,
) -> list[Text]:
    """Read a JSONL file of texts.

    A line is an object with `ids` (and `answer_start`), with `messages` in chat form whose last
    one is the assistant's, or with `text`.

    Args:
        path: The file.
        tokenizer: The target's.
        max_tokens: Longer texts are cut.
        min_answer: Texts with fewer tokens to learn from are left out.
        only_answers: Whether anchors lie in answers only; otherwise anywhere behind the first
            token.

    Returns:
        list[Text]: In file order.

    Raises:
        ConfigError: If the file cannot be read, naming the line.
    """
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"data must be a JSONL file; {str(source)!r} is none.")
    texts = []
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = text_of(json.loads(line), tokenizer)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"line {number} of {source} must be an object with 'ids', 'messages' or "
                    f"'text'; reading it failed: {error}"
                ) from error
            ids = text.ids[:max_tokens]
            start = text.start if only_answers else 1
            if len(ids) - start >= min_answer:
                texts.append(Text(ids, start))
    if not texts:
        raise ConfigError(f"data must hold at least one usable text; {str(source)!r} holds none.")
    return texts


def text_of(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Read one record of `ids`, `messages` or `text`.

    Args:
        record: As in a line of the file.
        tokenizer: The target's.

    Raises:
        KeyError: If it has none of them; as ValueError or TypeError, if it is malformed.
    """
    if "ids" in record:
        return Text(tuple(record["ids"]), int(record.get("answer_start", 1)))
    if "messages" in record:
        messages = record["messages"]
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError("the last message must be the assistant's")
        question = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        return Text(tuple(whole), len(question))
    return Text(tuple(tokenizer(record["text"])["input_ids"]), 1)


def fingerprint(texts: Iterable[Text]) -> str:
    """Return a short name of the texts' content."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(repr((text.start, text.ids)).encode())
    return digest.hexdigest()


def split(texts: Sequence[Text], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of training and validation texts, by seed."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    held = max(1, round(len(texts) * share)) if len(texts) > 1 else 0
    return order[held:], order[:held]


def batches(
    texts: Sequence[Text], indices: Sequence[int], batch_size: int, seed: int
) -> list[list[int]]:
    """Return one epoch's batches of indices: random, but of similar lengths.

    Args:
        texts: All texts.
        indices: Those to use.
        batch_size: Texts per batch; the last one may be smaller.
        seed: Of this epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
    width = batch_size * BUCKET_BATCHES
    result: list[list[int]] = []
    for begin in range(0, len(shuffled), width):
        bucket = sorted(shuffled[begin : begin + width], key=lambda i: len(texts[i].ids))
        result.extend(bucket[i : i + batch_size] for i in range(0, len(bucket), batch_size))
    return [result[i] for i in torch.randperm(len(result), generator=generator).tolist()]


def draft_vocabulary(texts: Iterable[Text], size: int, vocab_size: int) -> torch.Tensor:
    """Return the ids a pruned drafter may propose: the most frequent ones, in ascending order.

    Args:
        texts: Counted from `start` on.
        size: How many ids.
        vocab_size: Ids of the target; used to fill up when the texts hold fewer.

    Returns:
        torch.Tensor: int64 of shape (size,).
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.ids[text.start :])
    kept = [token for token, _ in counts.most_common(size)]
    known = set(kept)
    kept.extend(i for i in range(vocab_size) if i not in known and len(kept) < size)
    return torch.tensor(sorted(kept[:size]))
