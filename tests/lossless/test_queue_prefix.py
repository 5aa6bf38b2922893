"""Shared beginnings and parked rows in memory and on disk: texts and acceptance stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from block_drafters import block_drafter
from dspark_hf import DSparkConfig, GenerationQueue, QueueConfig
from harness import wrapped

FIXED = DSparkConfig(schedule="fixed", max_draft_tokens=4, never_slower=False)
BEGINNING = tiny.prompt(70, seed=1)
PROMPTS = [BEGINNING + tiny.prompt(n, seed=n) for n in (1, 3, 9, 26)]
NEW = 12
WAIT_S = 60


def alone(model: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return [
        model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True,
        )
        for ids in prompts
    ]  # fmt: skip


def submit(queue: GenerationQueue, ids: list[int], **options: Any) -> Any:
    return queue.submit(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)


def check(results: list[Any], expected: list[Any]) -> None:
    for result, plain in zip(results, expected, strict=True):
        assert result.output.tolist() == plain.sequences.tolist()
        (mine,), (theirs,) = result.stats.records, plain.speculation
        assert mine.accepted_per_round == theirs.accepted_per_round


def drafter_of(kind: str, model: Any) -> Any:
    if kind == "block":
        texts = [out.sequences[0].tolist() for out in alone(model, PROMPTS[:2])]
        return block_drafter(model, texts=texts)
    return kind


@pytest.mark.parametrize("kind", ["lookup", "block"])
@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3], ids=["full", "windows"])
def test_a_shared_beginning_is_read_once_and_changes_nothing(make: Any, kind: str) -> None:
    model = make()
    with wrapped(model, "lookup", FIXED):
        drafter = drafter_of(kind, model)
    with wrapped(model, drafter, FIXED):
        expected = alone(model)
        with GenerationQueue(model, config=QueueConfig(host_cache=10**9)) as queue:
            results = [submit(queue, ids).result(WAIT_S) for ids in PROMPTS]
            again = [submit(queue, ids).result(WAIT_S) for ids in PROMPTS]
    check(results, expected)
    check(again, expected)
    assert [r.stats.cached_tokens for r in results] == [0, 64, 64, 64]
    assert [r.stats.cached_tokens for r in again] == [64, 64, 64, 80]


def test_it_can_be_switched_off(model: Any) -> None:
    with wrapped(model, "lookup", FIXED):
        expected = alone(model)
        with GenerationQueue(model, config=QueueConfig(prefix_cache=False)) as queue:
            results = [submit(queue, ids).result(WAIT_S) for ids in PROMPTS]
    check(results, expected)
    assert not any(r.stats.cached_tokens for r in results)


@pytest.fixture
def model() -> Any:
    return tiny.llama()


def test_beginnings_survive_a_restart_on_disk_and_damage_is_computed_again(
    model: Any, tmp_path: Path
) -> None:
    settings = QueueConfig(host_cache=1000, disk_cache=10**8, disk_folder=str(tmp_path))
    with wrapped(model, "lookup", FIXED):
        expected = alone(model)
        with GenerationQueue(model, config=settings) as queue:
            check([submit(queue, PROMPTS[0]).result(WAIT_S)], expected[:1])
        with GenerationQueue(model, config=settings) as queue:
            result = submit(queue, PROMPTS[1]).result(WAIT_S)
        check([result], expected[1:2])
        assert result.stats.cached_tokens == 64
        for path in tmp_path.iterdir():
            path.write_bytes(path.read_bytes()[:-4])
        with GenerationQueue(model, config=settings) as queue:
            result = submit(queue, PROMPTS[2]).result(WAIT_S)
    check([result], expected[2:3])
    assert result.stats.cached_tokens == 0


def test_another_models_beginnings_are_not_found(tmp_path: Path) -> None:
    settings = QueueConfig(host_cache=1000, disk_cache=10**8, disk_folder=str(tmp_path))
    for seed in (0, 1):
        model = tiny.llama(seed=seed)
        with wrapped(model, "lookup", FIXED):
            expected = alone(model)
            with GenerationQueue(model, config=settings) as queue:
                result = submit(queue, PROMPTS[0]).result(WAIT_S)
        check([result], expected[:1])
        assert result.stats.cached_tokens == 0


@pytest.mark.parametrize("kind", ["lookup", "block"])
@pytest.mark.parametrize("place", ["memory", "disk", "lost"])
def test_parked_rows_come_back_from_wherever_they_were(
    model: Any, tmp_path: Path, kind: str, place: str
) -> None:
    """One place: each request of higher priority parks the one that runs."""
    disk: dict[str, Any] = {}
    if place != "memory":
        disk = {"host_cache": 2, "disk_cache": 10**8, "disk_folder": str(tmp_path)}
    settings = QueueConfig(max_rows=1, prefix_cache=False, **disk)
    with wrapped(model, "lookup", FIXED):
        drafter = drafter_of(kind, model)
    with wrapped(model, drafter, FIXED):
        expected = alone(model)
        with GenerationQueue(model, config=settings) as queue:
            handles = []
            for priority, ids in enumerate(PROMPTS):
                handle = submit(queue, ids, priority=priority)
                handles.append(handle)
                # It runs when its first piece is there.
                next(iter(handle))
                if place == "lost":
                    for path in tmp_path.iterdir():
                        path.write_bytes(b"")
            results = [handle.result(WAIT_S) for handle in handles]
    for result, plain in zip(results, expected, strict=True):
        assert result.output.tolist() == plain.sequences.tolist()
    if place != "lost":
        check(results, expected)
    assert sum(r.stats.preemptions for r in results) > 0
