"""Short prompts of many kinds, made from a seed: nothing in them was chosen to suit a drafter."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

SHORTEST, LONGEST = 8, 64
"""Tokens of a prompt."""
Kind = tuple[str, "Callable[[np.random.Generator, Any], list[int]]"]


def unlike_prompts(tokenizer: Any, count: int, seed: int = 0) -> list[tuple[str, str, list[int]]]:
    """Make prompts, one of each kind in turn.

    Args:
        tokenizer: The target's; no chat template is applied.
        count: Number of prompts.
        seed: Of everything in them.

    Returns:
        list[tuple[str, str, list[int]]]: Name, kind, and from 1 to `LONGEST` ids of each.
    """
    prompts = []
    for place in range(count):
        kind, make = KINDS[place % len(KINDS)]
        generator = np.random.default_rng([seed, place])
        ids = make(generator, tokenizer)
        length = int(generator.integers(SHORTEST, LONGEST + 1))
        prompts.append((f"{kind}-{place // len(KINDS) + 1:02}", kind, ids[:length]))
    return prompts


def _random(generator: np.random.Generator, tokenizer: Any) -> list[int]:
    """Draw tokens evenly from all but the special ones."""
    special = set(tokenizer.all_special_ids)
    ids = np.array([i for i in range(len(tokenizer)) if i not in special])
    return [int(token) for token in generator.choice(ids, LONGEST)]


def _repeated(generator: np.random.Generator, tokenizer: Any) -> list[int]:
    words = _words(generator, int(generator.integers(2, 7)))
    return _ids(tokenizer, " ".join(words * LONGEST))


def _code(generator: np.random.Generator, tokenizer: Any) -> list[int]:
    a, b, c = _words(generator, 3)
    template = _one(generator, "code")
    text = template.format(
        a=a, b=b, c=c, A=a.title(), B=b.title(), n=int(generator.integers(2, 5000)),
        verb=_one(generator, "verbs"),
    )  # fmt: skip
    return _ids(tokenizer, text)


def _lists(generator: np.random.Generator, tokenizer: Any) -> list[int]:
    words = _words(generator, int(generator.integers(4, 12)))
    sign = ("- ", "* ", "{n}. ", "{n}) ")[int(generator.integers(4))]
    lines = (sign.format(n=n) + word for n, word in enumerate(words, start=1))
    return _ids(tokenizer, "Things to buy:\n" + "\n".join(lines) + "\n")


def _languages(generator: np.random.Generator, tokenizer: Any) -> list[int]:
    text = _one(generator, "sentences")
    start = int(generator.integers(0, len(text) // 2))
    return _ids(tokenizer, text[start:])


def _numbers(generator: np.random.Generator, tokenizer: Any) -> list[int]:
    start, step = int(generator.integers(1, 1000)), int(generator.integers(1, 50))
    kind = int(generator.integers(3))
    if kind == 0:
        parts = [str(start + step * i) for i in range(30)]
    elif kind == 1:
        parts = [str(int(x)) for x in generator.integers(0, 10_000, 30)]
    else:
        parts = [f"{x:.3f}" for x in generator.normal(0, 100, 30)]
    return _ids(tokenizer, ", ".join(parts) + ", ")


def _words(generator: np.random.Generator, count: int) -> list[str]:
    return [str(word) for word in generator.choice(_parts()["words"], count, replace=False)]


def _one(generator: np.random.Generator, name: str) -> str:
    parts = _parts()[name]
    return parts[int(generator.integers(len(parts)))]


@functools.cache
def _parts() -> dict[str, list[str]]:
    """Return what texts are made of: words, verbs, sentences of many languages, code templates."""
    text = resources.files("dspark_hf.data").joinpath("unlike.json").read_text(encoding="utf-8")
    parts: dict[str, list[str]] = json.loads(text)
    return parts


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text)["input_ids"]]


KINDS: tuple[Kind, ...] = (
    ("random", _random),
    ("repeated", _repeated),
    ("code", _code),
    ("list", _lists),
    ("language", _languages),
    ("numbers", _numbers),
)
