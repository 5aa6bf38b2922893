"""A contest: every contender generates for every item, in turns, under one clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from transformers.generation.streamers import BaseStreamer

from dspark_hf.benchmarks.contenders import Contender
from dspark_hf.benchmarks.timing import Clock, rotated, timed
from dspark_hf.losslessness import end_ids
from dspark_hf.model import DSparkForCausalLM

if TYPE_CHECKING:
    import torch

    from dspark_hf.metrics import SpeculationRecord

SUMMED = ("rounds", "drafted", "verified", "accepted", "rechecks", "flips")
SUMMED_SECONDS = ("draft_s", "verify_s", "other_s")


@dataclass(frozen=True)
class Item:
    """What one timed call decodes.

    Attributes:
        name: Unique in its section.
        group: Items summarised together.
        inputs: `input_ids` and `attention_mask`, both int64 of shape (B, length).
        max_new_tokens: Tokens generated per row at most.
    """

    name: str
    group: str
    inputs: Mapping[str, torch.Tensor]
    max_new_tokens: int


@dataclass(frozen=True)
class Outcome:
    """One timed call.

    Attributes:
        item: Name of the item.
        contender: Name of the contender.
        repeat: From 0.
        place: Place in the order of this turn, from 0.
        wall_s: Elapsed seconds.
        cpu_s: CPU seconds of the process.
        num_tokens: Tokens those seconds generated, each row counted up to its own end.
        texts: New tokens per row, up to its own end.
        speculation: Counts of this package over all rows; None for Transformers' own loops.
        details: More seconds, where a section measures more.
    """

    item: str
    contender: str
    repeat: int
    place: int
    wall_s: float
    cpu_s: float
    num_tokens: int
    texts: list[list[int]]
    speculation: dict[str, Any] | None = None
    details: dict[str, float] = field(default_factory=dict)


class Observer(Protocol):
    """Who watches a contest, such as a progress bar."""

    def start(self, section: str, num_calls: int) -> None:
        """A section begins."""

    def advance(self, what: str) -> None:
        """A timed call is about to run."""


Measure = Callable[[Contender, Item, Clock], dict[str, Any]]
"""Runs a contender on an item; returns fields of Outcome other than its names and places."""


def hold(
    contenders: Sequence[Contender],
    items: Sequence[Item],
    repeats: int,
    measure: Measure,
    *,
    clock: Clock,
    observer: Observer,
    section: str,
) -> list[Outcome]:
    """Let contenders take turns on each item.

    Args:
        contenders: Warmed up.
        items: What to decode, in order.
        repeats: Passes over all items.
        measure: What is timed.
        clock: Where seconds come from.
        observer: Told of every call.
        section: Name shown to the observer.

    Returns:
        list[Outcome]: len(contenders) * len(items) * repeats outcomes, in the order they ran.
    """
    observer.start(section, len(contenders) * len(items) * repeats)
    outcomes = []
    for repeat in range(repeats):
        for index, item in enumerate(items):
            # Neighbouring items differ too, so that few repeats still spread the places.
            for place, contender in enumerate(rotated(contenders, repeat + index)):
                observer.advance(f"{item.name} {contender.name}")
                fields = measure(contender, item, clock)
                outcomes.append(Outcome(item.name, contender.name, repeat, place, **fields))
    return outcomes


def whole_call(contender: Contender, item: Item, clock: Clock) -> dict[str, Any]:
    """Time generate() from call to return, prompt included."""
    calls_before = _fallback_calls(contender)
    limit = item.max_new_tokens
    took = timed(lambda: contender.generate(item.inputs, max_new_tokens=limit), clock)
    texts = new_tokens(took.result, item, contender)
    return {
        "wall_s": took.wall_s,
        "cpu_s": took.cpu_s,
        "num_tokens": sum(len(text) for text in texts),
        "texts": texts,
        "speculation": _speculation(contender, calls_before),
    }


def decoding_only(contender: Contender, item: Item, clock: Clock) -> dict[str, Any]:
    """Time from the first new token to the last, as a streamer sees them arrive.

    The same by subtraction, the whole call less a call for one token, is noted beside it: it
    needs no streamer but carries the noise of two prompts, which at long contexts take longer
    than the tokens do.
    """
    one, all_of_it = Arrivals(clock), Arrivals(clock)
    short = timed(
        lambda: contender.generate(item.inputs, max_new_tokens=1, streamer=one),
        clock,
    )
    long = timed(
        lambda: contender.generate(
            item.inputs, max_new_tokens=item.max_new_tokens, streamer=all_of_it
        ),
        clock,
    )
    # The prompt arrives first, then each token.
    prompt, first, last = all_of_it.times[0], all_of_it.times[1], all_of_it.times[-1]
    texts = new_tokens(long.result, item, contender)
    return {
        "wall_s": last[0] - first[0],
        "cpu_s": last[1] - first[1],
        "num_tokens": len(texts[0]) - 1,
        "texts": texts,
        "details": {
            "first_token_s": first[0] - prompt[0],
            "one_token_s": short.wall_s,
            "subtracted_s": long.wall_s - short.wall_s,
        },
    }


class Arrivals(BaseStreamer):
    """Notes when tokens arrive."""

    def __init__(self, clock: Clock) -> None:
        """Start with none."""
        self.clock = clock
        self.times: list[tuple[float, float]] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002 - the streamer's signature
        """Note the time."""
        self.times.append((self.clock.wall(), self.clock.cpu()))

    def end(self) -> None:
        """Do nothing."""


def new_tokens(sequences: torch.Tensor, item: Item, contender: Contender) -> list[list[int]]:
    """Cut prompts off, and each row behind its own end.

    Args:
        sequences: What generate() returned, int64 of shape (B, length).
        item: What it was asked.
        contender: Whose end tokens count.

    Returns:
        list[list[int]]: New tokens per row, the end token included and no padding.
    """
    stops = set(end_ids(contender.model, {}))
    texts = []
    for row in sequences[:, item.inputs["input_ids"].shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        texts.append(row[:end])
    return texts


def _fallback_calls(contender: Contender) -> int:
    model = contender.model
    return model.dspark.metrics.fallback_calls if isinstance(model, DSparkForCausalLM) else 0


def _speculation(contender: Contender, calls_before: int) -> dict[str, Any] | None:
    model = contender.model
    if not isinstance(model, DSparkForCausalLM):
        return None
    if _fallback_calls(contender) > calls_before:
        return {"path": "transformers"}
    return summed(model.dspark.metrics.last)


def summed(records: Sequence[SpeculationRecord]) -> dict[str, Any]:
    """Add a call's records up: counts, seconds, and which target ran.

    Args:
        records: One per row.

    Returns:
        dict[str, Any]: As JSON.
    """
    counts = {name: sum(getattr(record, name) for record in records) for name in SUMMED}
    seconds = {
        name: round(sum(getattr(record, name) for record in records), 6) for name in SUMMED_SECONDS
    }
    return {"path": records[0].path, **counts, **seconds}
