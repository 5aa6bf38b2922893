"""A model that fails: memory that runs out parks, anything else ends everything at once.

Nothing hangs, no text is lost, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tiny
from dspark_hf import GenerationQueue
from dspark_hf.errors import CapacityError, QueueClosedError
from dspark_hf.serving.memory import is_out_of_memory, kv_token_bytes
from harness import noisy_copy, wrapped
from queues import FIXED, WAIT_S, assert_nothing_is_left, assert_same, greedy, stepped
from tiny import prompt

PROMPTS = [prompt(n, seed=n) for n in (4, 9, 13)]


@pytest.fixture(params=["llama", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    with wrapped(tiny.ARCHITECTURES[request.param](), "lookup", FIXED) as model:
        yield model


@pytest.fixture
def flat() -> Iterator[Any]:
    with wrapped(tiny.llama(), "lookup", FIXED) as model:
        yield model


@contextlib.contextmanager
def failing_forwards(model: Any, which: Callable[[int], Exception | None]) -> Iterator[list[int]]:
    """Let some forwards of a model fail in their middle, as `which` says by their number."""
    count = [0]
    block = list(model.model.layers)[1]

    def fail(*_: Any) -> None:
        count[0] += 1
        error = which(count[0])
        if error is not None:
            raise error

    hook = block.register_forward_pre_hook(fail)
    try:
        yield count
    finally:
        hook.remove()


NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"
    ),
    RuntimeError("MPS backend out of memory"),
    MemoryError(),
)


def test_what_counts_as_running_out_of_memory() -> None:
    assert all(is_out_of_memory(error) for error in NO_MEMORY)
    assert not is_out_of_memory(RuntimeError("shapes do not agree"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_next", "bloom", "mamba2"])
@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_memory_that_runs_out_once_parks_and_costs_no_text(architecture: str, drafter: str) -> None:
    """Any forward may be the one: of a prompt, of a round, in one row or several."""
    plain = tiny.ARCHITECTURES[architecture]()
    if architecture == "bloom":
        plain.model = plain.transformer
        plain.transformer.layers = plain.transformer.h
    if architecture == "mamba2":
        plain.model = plain.backbone
    with wrapped(plain, noisy_copy(plain) if drafter == "model" else drafter, FIXED) as model:
        asked = [greedy(ids, 9) for ids in PROMPTS]
        alone = [one.alone(model) for one in asked]
        num_rows = 3 if architecture in ("qwen3_next", "bloom", "mamba2") else 1
        for fault in range(1, 3 * num_rows + 2):
            fails = {fault}
            with (
                stepped(model, prefill_tokens=6) as queue,
                failing_forwards(model, lambda n, f=fails: NO_MEMORY[1] if n in f else None),
            ):
                for one in asked:
                    queue.submit(one)
                results = queue.finish()
                assert sum(result.stats.preemptions for result in results) == 1
                for result, one in zip(results, alone, strict=True):
                    assert result.output.tolist() == one.output.tolist()
                    if drafter == "lookup":
                        assert_same(result, one)


def test_a_lone_request_gets_a_second_try_and_then_fails(model: Any) -> None:
    one = greedy(PROMPTS[0], 12)
    alone = one.alone(model)
    with (
        stepped(model) as queue,
        failing_forwards(model, lambda n: NO_MEMORY[0] if n in (1, 4) else None),
    ):
        queue.submit(one)
        (result,) = queue.finish()
    assert_same(result, alone)
    assert result.stats.preemptions == 2
    with stepped(model) as queue, failing_forwards(model, lambda n: NO_MEMORY[0]):
        for ids in PROMPTS:
            queue.submit(greedy(ids, 12))
        results = queue.finish()
    for result in results:
        assert isinstance(result, CapacityError)
        assert "one request alone runs out of memory: CUDA out of memory" in str(result)
        assert isinstance(result.__cause__, torch.OutOfMemoryError)
    with stepped(model) as queue:
        queue.submit(one)
        assert_same(queue.finish()[0], alone)


def test_another_error_of_the_model_fails_everybody_at_once_naming_it(model: Any) -> None:
    # Its own check of the model must not be what fails.
    model.dspark.target_choice()
    with failing_forwards(model, lambda n: OSError("the disk is gone") if n == 4 else None):
        queue = GenerationQueue(model)
        handles = []
        with contextlib.suppress(QueueClosedError):
            # It may have ended before all are submitted.
            for ids in PROMPTS * 3:
                handles.append(greedy(ids, 40).submit(queue))
        for handle in handles:
            with pytest.raises(QueueClosedError, match="the queue ended: OSError: the disk is"):
                handle.result(WAIT_S)
        queue._engine._thread.join(WAIT_S)
        with pytest.raises(QueueClosedError, match="OSError: the disk is gone") as no:
            queue.submit(PROMPTS[0])
        assert isinstance(no.value.__cause__, OSError)
        assert queue.close(timeout=WAIT_S)
    assert_nothing_is_left(queue)
    alone = greedy(PROMPTS[0], 5).alone(model)
    with GenerationQueue(model) as queue:
        assert_same(greedy(PROMPTS[0], 5).submit(queue).result(WAIT_S), alone)


def test_growing_without_memory_keeps_what_is_held(
    flat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache cannot grow by half, nor for all slots, when a row outgrows it."""
    asked = [greedy(PROMPTS[0], 330), greedy(PROMPTS[1], 20)]
    alone = [one.alone(flat) for one in asked]
    zeros, refused = torch.Tensor.new_zeros, []

    def scarce(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        if len(size) == 4 and size[0] * size[2] > 320:
            refused.append(size)
            raise torch.OutOfMemoryError("no more than 320 positions")
        return zeros(self, *size, **options)

    with stepped(flat) as queue:
        for one in asked:
            queue.submit(one)
        queue.until(lambda: len(queue.places.running) == 2)
        target = queue.places.decoder.target
        assert (target.cache.num_slots, target.cache.num_positions) == (2, 320)
        queue.until(lambda: queue.handles[1].is_ended)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_zeros", scarce)
            queue.until(lambda: len(queue.handles[0].pieces) > 290)
            assert not refused
            queue.until(lambda: bool(refused) or queue.handles[0].is_ended)
        results = queue.finish()
    assert refused
    for result, one in zip(results, alone, strict=True):
        assert_same(result, one)


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_every_architecture_has_a_size_of_its_keys(name: str) -> None:
    model = tiny.ARCHITECTURES[name]()
    assert kv_token_bytes(model) > 0
