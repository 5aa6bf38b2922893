"""Everything at once, drawn by a seed: arrivals, cancels, priorities, faults, and no memory.

Whatever a request lives through beside others, it comes to what it comes to alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import tiny
from block_drafters import block_drafter
from drafters import NoisyDrafter
from dspark_hf.errors import RequestCancelledError
from harness import oracle_of, wrapped
from queues import FIXED, Asked, Stepped, assert_same, greedy, stepped
from storms import ScarceMemory, lost_caches
from tiny import PAD, VOCAB, left_padded, plain_generate, prompt

NUM_REQUESTS, MOST_STEPS = 24, 4000
STORMS = [("llama", "block"), ("gemma3", "noisy"), ("qwen3_next", "noisy"), ("mamba2", None)]


def requests(stream: random.Random) -> list[Asked]:
    """Draw requests of one and of several rows."""
    asked = []
    for place in range(NUM_REQUESTS):
        ids, new = prompt(stream.randint(1, 40), seed=place), stream.randint(1, 30)
        if place % 6 == 5:
            batch, _ = left_padded([ids, ids[:3], prompt(7, seed=place)])
            options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": PAD}
            stops = [stream.randint(1, VOCAB - 1) for _ in range(8)]
            asked.append(Asked(batch, lambda o=options, s=stops: {**o, "eos_token_id": s}, batch))
        elif place % 6 == 3:
            asked.append(greedy(ids, new, return_dict_in_generate=True, output_logits=True))
        else:
            asked.append(greedy(ids, new))
    return asked


class Storm:
    """Moves a queue by hand and lets things go wrong in it."""

    def __init__(self, queue: Stepped, model: Any, stream: random.Random) -> None:
        self.queue, self.stream = queue, stream
        self.memory = ScarceMemory(model, queue.queue._engine, stream, 0.03)
        self.cancelled: set[int] = set()

    def run(self, asked: list[Asked]) -> None:
        coming = list(range(len(asked)))
        with lost_caches(self.stream, 0.2):
            for _ in range(MOST_STEPS):
                if coming and self.stream.random() < 0.4:
                    self.queue.submit(asked[coming.pop(0)], priority=self.stream.randint(0, 2))
                if self.stream.random() < 0.02 and self.queue.handles:
                    place = self.stream.randrange(len(self.queue.handles))
                    if self.queue.handles[place].cancel():
                        self.cancelled.add(place)
                places = self.queue.places
                if not coming and not places.running and not places.waiting:
                    break
                self.queue.step()
        self.memory.end()


@pytest.mark.parametrize("seed", range(len(STORMS)))
def test_a_storm_changes_no_text_and_leaves_nothing_behind(seed: int) -> None:
    storm_in(seed, *STORMS[seed % len(STORMS)])


def storm_in(seed: int, name: str, drafter: str | None) -> None:
    """Compare every request of a storm with its run alone."""
    stream, model = random.Random(seed), tiny.ARCHITECTURES[name]()  # noqa: S311
    asked, drafting = requests(stream), None
    texts = [plain_generate(model, [one.inputs], max_new_tokens=30) for one in asked[:3]]
    if drafter == "block":
        drafting = block_drafter(model, texts=[text[0].tolist() for text in texts])
    elif drafter == "noisy":
        drafting = NoisyDrafter(oracle_of(texts[0], [asked[0].inputs]), VOCAB)
    with wrapped(model, drafting, FIXED):
        alone = [one.alone(model) for one in asked]
        settings = {
            "max_rows": stream.randint(2, 6),
            "prefill_tokens": stream.choice([3, 16, None]),
        }
        with stepped(model, prefix_cache=bool(seed % 2), patience_s=1e6, **settings) as queue:
            queue.places.budget.num_tokens = stream.choice([220, 10**6])
            storm = Storm(queue, model, stream)
            storm.run(asked)
            results = queue.finish()
        assert len(results) == len(asked)
        parked = 0
        for place, (result, one) in enumerate(zip(results, alone, strict=True)):
            if place in storm.cancelled:
                assert isinstance(result, RequestCancelledError)
                said = queue.handles[place].pieces
                assert said == one.ids[: len(said)]
            else:
                assert_same(result, one)
                parked += result.stats.preemptions
        assert parked > 0
