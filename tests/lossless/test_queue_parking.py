"""A request that is parked, however often and wherever it stands, comes to what it comes to alone.

Steps are made by hand, so that every request stands where a test wants it to. Parked caches that
are lost are computed again from tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from block_drafters import block_drafter, features_of
from drafters import NoisyDrafter
from dspark_hf.attention.policy import BoostedBudget, SparsePolicy
from dspark_hf.serving.keeper import Keeper
from dspark_hf.targets.flat import FlatTarget
from harness import noisy_copy, oracle_of, wrapped
from queues import FIXED, ROUNDING, Asked, assert_same, greedy, stepped
from tiny import VOCAB, plain_generate, prompt

LONG, NEW = prompt(11, seed=3), 110
OTHERS = [prompt(n, seed=n) for n in (2, 5, 17, 30)]
PARKINGS = 20
CAREFUL = SparsePolicy(
    tokens=48, recent_pages=2, min_context=0, budget=BoostedBudget(entropy=2.0, first_steps=3)
)
"""Reads more pages where the model is unsure, after a rejection, and at first."""


def noisy(model: Any) -> Any:
    """Return a drafter that is wrong at every third token, so that drafts are rejected."""
    full = plain_generate(model, [LONG], max_new_tokens=NEW + 8)
    return NoisyDrafter(oracle_of(full, [LONG]), VOCAB)


def block(model: Any) -> Any:
    """Return a block drafter that was taught some of the text."""
    return block_drafter(model, texts=plain_generate(model, [LONG], max_new_tokens=40).tolist())


SUBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "flat": (tiny.llama, noisy),
    "flat_block": (tiny.llama, block),
    "flat_windows_block": (tiny.gemma3, block),
    "flat_model": (tiny.qwen2, noisy_copy),
    "rowwise": (tiny.bloom, noisy),
    "rowwise_block": (tiny.bloom, block),
    "recurrent_and_attention": (tiny.qwen3_next, noisy),
    "recurrent_only": (tiny.mamba2, noisy),
}


def sampled(seed: int, max_new_tokens: int = NEW) -> Asked:
    """Return a sampled request whose text follows from its seed."""
    config = replace(FIXED, acceptance="coupled", seed=seed)
    return greedy(LONG, max_new_tokens, do_sample=True, temperature=0.8, dspark=config)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_twenty_parkings_of_one_request_change_nothing(kind: str) -> None:
    make, draft = SUBJECTS[kind]
    model = make()
    with wrapped(model, draft(model), FIXED):
        long, short = greedy(LONG, NEW), [greedy(ids, 1) for ids in OTHERS]
        alone, others = long.alone(model), [one.alone(model) for one in short]
        with stepped(model, max_rows=1) as queue:
            handle = queue.submit(long)
            queue.until(lambda: bool(handle.pieces))
            for count in range(PARKINGS):
                # One step for the short one, and one in which the long one comes back.
                queue.submit(short[count % len(short)], priority=1)
                queue.step(2)
            results = queue.finish()
        assert results[0].stats.preemptions == PARKINGS
        assert_same(results[0], alone)
        assert alone.records[0].verified > alone.records[0].accepted
        for count, result in enumerate(results[1:]):
            assert_same(result, others[count % len(others)])


@pytest.mark.parametrize("kind", ["flat", "flat_windows_block", "recurrent_and_attention"])
def test_sampled_text_by_seed_survives_parking(kind: str) -> None:
    make, draft = SUBJECTS[kind]
    model = make()
    with wrapped(model, draft(model), FIXED):
        long, short = sampled(7, 40), greedy(OTHERS[1], 2)
        alone = long.alone(model)
        with stepped(model, max_rows=1) as queue:
            handle = queue.submit(long)
            queue.until(lambda: bool(handle.pieces))
            for _ in range(5):
                queue.submit(short, priority=1)
                queue.step(3)
            results = queue.finish()
        assert results[0].stats.preemptions == 5
        assert_same(results[0], alone)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_a_request_parked_in_the_middle_of_its_prompt_goes_on_there(kind: str) -> None:
    make, draft = SUBJECTS[kind]
    model = make()
    with wrapped(model, draft(model), FIXED):
        busy, reading, urgent = greedy(LONG, 40), greedy(prompt(40, seed=1)), greedy(OTHERS[0], 3)
        alone = [one.alone(model) for one in (busy, reading, urgent)]
        with stepped(model, max_rows=2, prefill_tokens=4, order="fifo") as queue:
            first = queue.submit(busy)
            queue.until(lambda: bool(first.pieces))
            second = queue.submit(reading)
            queue.step(3)
            (row,) = queue.places.running[1].rows
            assert queue.places.decoder.target.length(row.row_id) == 12
            queue.submit(urgent, priority=1)
            queue.step()
            assert second.status == "parked"
            results = queue.finish()
        for result, one in zip(results, alone, strict=True):
            assert_same(result, one)


def test_several_rows_and_their_caches_come_back_together() -> None:
    model = tiny.llama()
    options = {"eos_token_id": [4, 44, 99], "pad_token_id": 0, "return_dict_in_generate": True}
    batch, _ = tiny.left_padded([LONG, LONG[:4], OTHERS[2]])
    with wrapped(model, noisy(model), FIXED):
        rows = Asked(batch, lambda: {"max_new_tokens": 30, "do_sample": False, **options}, batch)
        alone = rows.alone(model)
        with stepped(model, max_rows=3) as queue:
            handle = queue.submit(rows)
            queue.until(lambda: bool(handle.pieces))
            for _ in range(4):
                queue.submit(greedy(OTHERS[1], 2), priority=1)
                queue.step(3)
            results = queue.finish()
        assert results[0].stats.preemptions == 4
        assert_same(results[0], alone)


@pytest.mark.parametrize("kind", ["flat_block", "recurrent_and_attention"])
def test_rows_that_outgrow_the_memory_are_parked_and_come_back(kind: str) -> None:
    make, draft = SUBJECTS[kind]
    model = make()
    with wrapped(model, draft(model), FIXED):
        asked = [greedy(ids[:4], 90) for ids in OTHERS]
        alone = [one.alone(model) for one in asked]
        with stepped(model, kv_budget=10**6) as queue:
            queue.places.budget.num_tokens = 150
            for one in asked:
                queue.submit(one)
            results = queue.finish()
        # Two of 68 tokens are let in, and must not both get 94.
        assert sum(result.stats.preemptions for result in results) > 0
        for result, one in zip(results, alone, strict=True):
            assert_same(result, one)


@pytest.mark.parametrize("kind", ["flat", "flat_block", "rowwise", "recurrent_only"])
def test_a_cache_that_cannot_be_kept_or_put_back_is_computed_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, draft = SUBJECTS[kind]
    model = make()

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory for a copy")

    with wrapped(model, draft(model), FIXED):
        long, short = greedy(LONG, 40), greedy(OTHERS[1], 1)
        alone = long.alone(model)
        with stepped(model, max_rows=1) as queue:
            handle = queue.submit(long)
            queue.until(lambda: bool(handle.pieces))
            for name in ("park", "resume", "park"):
                queue.step(2)
                queue.submit(short, priority=1)
                with monkeypatch.context() as patch:
                    patch.setattr(Keeper, name, fails)
                    queue.step(2)
            results = queue.finish()
        assert results[0].stats.preemptions == 3
        assert_same(results[0], alone)


def test_a_prompt_that_is_read_again_keeps_its_features_in_their_places(tmp_path: Path) -> None:
    """It was parked half read and its file was damaged; others get its beginning from it."""
    model, ids = tiny.llama(), prompt(40, seed=6)
    drafter = block(model)
    plain = features_of(model, ids[:32], drafter.model.spec)
    with wrapped(model, drafter, FIXED):
        busy, one = greedy(LONG, 60), greedy(ids, 20)
        alone = one.alone(model)
        disk = {"host_cache": 2, "disk_cache": 10**8, "disk_folder": str(tmp_path)}
        settings = {"max_rows": 2, "prefill_tokens": 7, "order": "fifo", "prefix_cache": True}
        with stepped(model, **settings, **disk) as queue:
            first = queue.submit(busy)
            queue.until(lambda: bool(first.pieces))
            second = queue.submit(one)
            queue.step(3)
            queue.submit(greedy(OTHERS[0], 2), priority=1)
            queue.step()
            assert second.status == "parked"
            for path in tmp_path.iterdir():
                path.write_bytes(b"")
            queue.finish()
            _, features = queue.places.keeper.prefix.find(ids)
            torch.testing.assert_close(features, plain, atol=ROUNDING, rtol=ROUNDING)
            third = queue.submit(one)
            queue.finish()
        assert_same(second.result(0), alone)
        assert_same(third.result(0), alone)
        assert third.stats.cached_tokens == 32


def test_a_beginning_that_cannot_be_kept_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Keeper, "share", fails)
    model = tiny.llama()
    with wrapped(model, noisy(model), FIXED):
        one = greedy(OTHERS[3], 8)
        alone = one.alone(model)
        with stepped(model, prefix_cache=True) as queue:
            queue.submit(one)
            queue.submit(one)
            for result in queue.finish():
                assert_same(result, alone)


def test_a_rows_way_of_reading_sparsely_survives_parking() -> None:
    """Its budget follows what it has seen, which must not start anew."""
    model = tiny.llama(max_position_embeddings=512)
    ids = prompt(150, seed=5)
    full = plain_generate(model, [ids], max_new_tokens=60)
    with wrapped(model, NoisyDrafter(oracle_of(full, [ids]), VOCAB), FIXED):
        long = greedy(ids, 40, dspark=replace(FIXED, sparse=CAREFUL))
        dense = greedy(ids, 40)
        alone, plain = long.alone(model), dense.alone(model)
        assert alone.ids != plain.ids
        with stepped(model, max_rows=1) as queue:
            handle = queue.submit(long)
            queue.until(lambda: bool(handle.pieces))
            for _ in range(6):
                queue.submit(greedy(OTHERS[1], 1), priority=1)
                queue.step(2)
            results = queue.finish()
        assert results[0].stats.preemptions == 6
        assert_same(results[0], alone)


def test_a_parked_rows_slot_is_free_for_others() -> None:
    model = tiny.llama()
    with wrapped(model, None, FIXED), stepped(model, max_rows=1) as queue:
        first = queue.submit(greedy(LONG, 30))
        queue.until(lambda: bool(first.pieces))
        queue.submit(greedy(OTHERS[0], 5), priority=1)
        queue.step()
        target = queue.places.decoder.target
        assert isinstance(target, FlatTarget)
        assert len(target.cache.slots) == 1
        first.cancel()
        queue.step()
        assert not queue.places.waiting
        assert queue.places.keeper.store.host.entries == 0
        assert torch.is_tensor(queue.finish()[1].output)
