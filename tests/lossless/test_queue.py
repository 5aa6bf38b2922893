"""Whatever arrives, ends or is cancelled beside it, a request comes to what it comes to alone.

Forty unlike requests arrive in random order from several threads, some more are cancelled; outputs
and acceptance equal those of generate() on each alone. fp32, drafts of fixed length.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tiny
from block_drafters import block_drafter
from dspark_hf import GenerationQueue, QueueConfig
from dspark_hf.errors import RequestCancelledError
from harness import noisy_copy, toy_tokenizer, wrapped
from queues import FIXED, WAIT_S, Alone, Asked, assert_nothing_is_left, assert_same, greedy
from tiny import plain_generate, prompt
from unlike_requests import of_kind

NUM_REQUESTS, NUM_CANCELLED, NUM_THREADS = 40, 6, 3
ENDLESS = 100_000
"""New tokens that no machine gets through before it is told to stop."""


def unlike(seed: int, tokenizer: Any) -> list[Asked]:
    """Draw forty requests of every kind, of unlike lengths."""
    stream = random.Random(seed)  # noqa: S311
    lengths = [1, 60, *(stream.randint(1, 60) for _ in range(NUM_REQUESTS - 2))]
    limits = [40, 1, 2, *(1 + int(39 * stream.random() ** 2) for _ in range(NUM_REQUESTS - 3))]
    stream.shuffle(limits)
    return [
        of_kind(place, (prompt(-(-length // 2), seed=place) * 2)[:length], limit, tokenizer)
        for place, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


@dataclass(frozen=True)
class Mix:
    """One round's model, drafter and limits."""

    architecture: str
    drafter: str | None
    max_rows: int
    prefill_tokens: int | None
    prefix_cache: bool


MIXES = [
    Mix("llama", "lookup", 8, 4, prefix_cache=True),
    Mix("gemma3", "block", 16, None, prefix_cache=False),
    Mix("qwen3_next", "lookup", 2, 4, prefix_cache=True),
    Mix("llama", "model", 4, 4, prefix_cache=False),
    Mix("mistral", None, 16, None, prefix_cache=True),
]


def drafter_of(mix: Mix, model: Any) -> Any:
    """Make a drafter that is partly right."""
    if mix.drafter == "block":
        texts = [plain_generate(model, [prompt(9, seed=n)], max_new_tokens=30) for n in range(6)]
        return block_drafter(model, texts=[ids[0].tolist() for ids in texts])
    return noisy_copy(model, 0.05) if mix.drafter == "model" else mix.drafter


@dataclass
class Crowd:
    """Submits requests from several threads, in an order and with waits drawn by a seed."""

    queue: GenerationQueue
    asked: list[Asked]
    seed: int

    def __post_init__(self) -> None:
        self.handles: dict[int, Any] = {}
        self.errors: list[BaseException] = []

    def start(self) -> None:
        """Begin to submit."""
        places = list(range(len(self.asked)))
        random.Random(self.seed).shuffle(places)  # noqa: S311
        self.threads = [
            threading.Thread(target=self._submit, args=(places[i::NUM_THREADS], i), daemon=True)
            for i in range(NUM_THREADS)
        ]
        for thread in self.threads:
            thread.start()

    def join(self) -> None:
        """Wait until everything is submitted."""
        for thread in self.threads:
            thread.join(WAIT_S)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in self.threads)

    def _submit(self, places: list[int], thread: int) -> None:
        stream = random.Random(self.seed * 10 + thread)  # noqa: S311
        try:
            for place in places:
                handle = self.asked[place].submit(self.queue)
                self.handles[place] = handle
                chance = stream.random()
                if chance < 0.2:
                    next(iter(handle), None)
                elif chance < 0.3:
                    handle.result(WAIT_S)
        except BaseException as error:  # noqa: BLE001 - the test tells of it
            self.errors.append(error)


def cancel_some(queue: GenerationQueue, seed: int) -> list[tuple[Any, list[int]]]:
    """Submit long requests and cancel them while they wait, start or run."""
    stream = random.Random(seed)  # noqa: S311
    cancelled = []
    for place in range(NUM_CANCELLED):
        ids = prompt(stream.randint(1, 50), seed=100 + place)
        handle = greedy(ids, ENDLESS).submit(queue)
        if place % 2:
            next(iter(handle))
        handle.cancel()
        cancelled.append((handle, ids))
    return cancelled


@pytest.mark.parametrize("seed", range(len(MIXES)))
def test_every_request_comes_to_what_it_comes_to_alone(seed: int) -> None:
    mix, tokenizer = MIXES[seed], toy_tokenizer()
    model = tiny.ARCHITECTURES[mix.architecture]()
    drafter = drafter_of(mix, model)
    asked = unlike(seed, tokenizer)
    settings = QueueConfig(
        max_rows=mix.max_rows, prefill_tokens=mix.prefill_tokens, prefix_cache=mix.prefix_cache
    )
    with wrapped(model, drafter, FIXED):
        alone: list[Alone] = [one.alone(model, tokenizer) for one in asked]
        with GenerationQueue(model, tokenizer, settings) as queue:
            crowd = Crowd(queue, asked, seed)
            crowd.start()
            cancelled = cancel_some(queue, seed)
            crowd.join()
            results = [crowd.handles[place].result(WAIT_S) for place in range(NUM_REQUESTS)]
        for result, one in zip(results, alone, strict=True):
            assert_same(result, one)
        for handle, ids in cancelled:
            with pytest.raises(RequestCancelledError):
                handle.result(0)
            said = handle.pieces
            if said:
                full = model.generate(
                    torch.tensor([ids]), max_new_tokens=len(said), do_sample=False
                )
                assert full[0, len(ids) :].tolist() == said
        assert_nothing_is_left(queue)
        if mix.drafter is not None:
            assert sum(record.accepted for one in alone for record in one.records) > 0
