"""What the tests of the queue share: requests and their runs alone, and a queue moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from dspark_hf import DSparkConfig, GenerationQueue, QueueConfig
from dspark_hf.compat import OUTPUT_CACHE_NAME
from dspark_hf.serving.engine import Engine
from dspark_hf.serving.handle import RequestHandle, RequestResult

WAIT_S = 300
"""Longest wait for anything: a test that needs it has failed, however slow the machine."""
FIXED = DSparkConfig(schedule="fixed", max_draft_tokens=4, never_slower=False)
ROUNDING = 1e-3
"""Between logits of around 10 from float32 forwards over other rows; seen: 4e-5."""
COUNTS = (
    "path", "new_tokens", "rounds", "drafted", "verified", "accepted", "cut_rounds",
    "accepted_per_round", "tested_by_position", "accepted_by_position", "accepted_mask",
)  # fmt: skip
"""Everything a record counts; its seconds are shared between rows and do vary."""


@dataclass
class Asked:
    """A request: what is submitted, and what generate() is called with for the same.

    Attributes:
        inputs: Of submit().
        options: Makes generate()'s keywords anew, as processors may keep state.
        ids: Prompts, int64 of shape (B, T); those of `inputs` where they are a list.
    """

    inputs: Any
    options: Callable[[], dict[str, Any]]
    ids: torch.Tensor | None = None

    def alone(self, model: Any, tokenizer: Any = None) -> Alone:
        """Run it by generate()."""
        ids = torch.tensor([self.inputs]) if self.ids is None else self.ids
        options = self.options()
        if "stop_strings" in options:
            options["tokenizer"] = tokenizer
        output = model.generate(ids, **options)
        return Alone(output, list(model.dspark.metrics.last), ids.shape[1])

    def submit(self, queue: GenerationQueue, **order: Any) -> RequestHandle:
        """Give it to a queue."""
        return queue.submit(self.inputs, **order, **self.options())


@dataclass
class Alone:
    """What generate() came to."""

    output: Any
    records: list[Any]
    num_prompt_tokens: int

    @property
    def ids(self) -> list[int]:
        """New tokens of the first row, without padding."""
        rows = self.output if isinstance(self.output, torch.Tensor) else self.output.sequences
        begin = self.num_prompt_tokens
        return rows[0, begin : begin + self.records[0].new_tokens].tolist()


def greedy(ids: Sequence[int], max_new_tokens: int = 12, **options: Any) -> Asked:
    """Return a greedy request."""
    fixed = {"max_new_tokens": max_new_tokens, "do_sample": False, **options}
    return Asked(list(ids), lambda: dict(fixed))


def counts(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what records count."""
    return [{name: getattr(record, name) for name in COUNTS} for record in records]


def assert_same(result: RequestResult, alone: Alone) -> None:
    """Compare a request's result with its run alone, acceptance included."""
    mine, theirs = result.output, alone.output
    if isinstance(theirs, torch.Tensor):
        assert mine.tolist() == theirs.tolist()
    else:
        assert mine.sequences.tolist() == theirs.sequences.tolist()
        for name in ("scores", "logits"):
            found, wanted = getattr(mine, name), getattr(theirs, name)
            assert (found is None) == (wanted is None)
            for one, other in zip(found or (), wanted or (), strict=True):
                torch.testing.assert_close(one, other, atol=ROUNDING, rtol=ROUNDING)
        _assert_same_caches(getattr(mine, OUTPUT_CACHE_NAME), getattr(theirs, OUTPUT_CACHE_NAME))
    assert result.ids == alone.ids
    assert counts(result.stats.records) == counts(alone.records)


def _assert_same_caches(mine: Any, theirs: Any) -> None:
    assert (mine is None) == (theirs is None)
    if mine is None:
        return
    for one, other in zip(mine.layers, theirs.layers, strict=True):
        if getattr(other, "keys", None) is not None:
            assert one.get_seq_length() == other.get_seq_length()
            torch.testing.assert_close(one.keys, other.keys, atol=ROUNDING, rtol=ROUNDING)
            torch.testing.assert_close(one.values, other.values, atol=ROUNDING, rtol=ROUNDING)


def assert_nothing_is_left(queue: GenerationQueue) -> None:
    """Check that no row is held by the target, the drafters or the store any more."""
    places = queue._engine.places
    assert not places.running
    assert not places.waiting
    assert not places._begun
    assert not places.guard._rows
    if places._decoder is not None:
        target = places._decoder.target
        assert not (target.cache.slots if target.path == "flat" else target._rows)
    assert not places.keeper._parked
    assert not places.keeper._features
    assert not places.keeper.store._pinned
    for drafter in places.guard._drafters:
        for name in ("_rows", "_fed", "_context"):
            assert not getattr(drafter, name, None), (drafter.name, name)


@dataclass
class Stepped:
    """A queue whose steps a test makes itself, so that it knows what happens between which."""

    queue: GenerationQueue
    handles: list[RequestHandle] = field(default_factory=list)

    @property
    def places(self) -> Any:
        """What runs and waits."""
        return self.queue._engine.places

    def submit(self, asked: Asked, **order: Any) -> RequestHandle:
        """Submit a request; it waits for the next step."""
        self.handles.append(asked.submit(self.queue, **order))
        return self.handles[-1]

    @torch.no_grad()
    def step(self, times: int = 1) -> None:
        """Make steps."""
        for _ in range(times):
            self.queue._engine._step()

    def until(self, is_met: Callable[[], bool], most: int = 2000) -> None:
        """Make steps until something is so."""
        for _ in range(most):
            if is_met():
                return
            self.step()
        raise TimeoutError(f"not within {most} steps")

    def finish(self) -> list[Any]:
        """Make steps until everything has ended; return results, or errors in their places."""
        self.until(lambda: not self.places.running and not self.places.waiting)
        found: list[Any] = []
        for handle in self.handles:
            try:
                found.append(handle.result(0))
            except Exception as error:  # noqa: BLE001 - what a test wants to see
                found.append(error)
        return found


@contextmanager
def stepped(model: Any, tokenizer: Any = None, **settings: Any) -> Iterator[Stepped]:
    """Make a queue without a thread; nothing may be left in it at the end."""
    options = {"prefix_cache": False, **settings}
    with patch.object(Engine, "start"):
        queue = GenerationQueue(model, tokenizer, QueueConfig(**options))
    yield Stepped(queue)
    assert queue.close(drain=False)
    with torch.no_grad():
        queue._engine._step()
    assert_nothing_is_left(queue)
