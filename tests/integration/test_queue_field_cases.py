"""What went wrong in others' queues: seeds, order and parking, time limits, offloaded targets.

Seeds: a request's randomness depended on its neighbours, or all unseeded ones shared one stream
(vllm-project/vllm issues 51226, 6038, 9441; NVIDIA/TensorRT-LLM issue 19487). Order: high priority
waited behind what ran, and what was parked lost its turn (vllm-project/vllm pull 45561, issues
41951 and 24365). Offloading: tied weights and collected states (huggingface/accelerate pull 4083,
huggingface/transformers issue 36636).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from transformers.generation import stopping_criteria

import tiny
from block_drafters import Recording, block_drafter
from drafters import RandomDrafter, SampledDrafter
from dspark_hf import GenerationQueue
from dspark_hf.attention import interface
from harness import noisy_copy, wrapped
from queues import FIXED, WAIT_S, Asked, assert_same, greedy, stepped
from tiny import VOCAB, plain_generate, prompt

PROMPTS = [prompt(n, seed=n) for n in (4, 9, 13, 6)]


def drawn(ids: list[int], seed: int | None, acceptance: str = "rejection", new: int = 32) -> Asked:
    """Return a sampled request."""
    config = replace(FIXED, acceptance=acceptance, seed=seed)
    return greedy(ids, new, do_sample=True, temperature=1.5, dspark=config)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("kind", ["none", "dice", "drawn", "model"])
def test_a_seeded_request_says_the_same_alone_and_in_any_mix(kind: str, acceptance: str) -> None:
    model = tiny.llama()
    drafter = {
        "none": None, "dice": RandomDrafter(VOCAB), "drawn": SampledDrafter(VOCAB),
        "model": noisy_copy(model),
    }[kind]  # fmt: skip
    with wrapped(model, drafter, FIXED):
        one = drawn(PROMPTS[0], 11, acceptance)
        alone = one.alone(model)
        assert_same_text(one.alone(model), alone)
        seeded = [drawn(ids, n, acceptance) for n, ids in enumerate(PROMPTS)]
        unseeded = [drawn(ids, None, acceptance, 10) for ids in PROMPTS]
        plain = [greedy(ids) for ids in PROMPTS]
        texts = [ask.alone(model) for ask in plain]
        for others in (seeded, unseeded, [*plain, *seeded[::-1]]):
            for place in (0, len(others)):
                with stepped(model, max_rows=3, order="fifo") as queue:
                    handles = [queue.submit(ask) for ask in [*others[:place], one, *others[place:]]]
                    results = queue.finish()
                    assert_same(results[place], alone)
                for handle in handles:
                    assert handle.status == "done"
                if others[0] is plain[0]:
                    for offset, text in enumerate(texts):
                        assert results[offset + (place == 0)].ids == text.ids


def assert_same_text(one: Any, other: Any) -> None:
    assert one.output.tolist() == other.output.tolist()


def test_unseeded_copies_differ_and_follow_the_global_seed_as_a_call_does() -> None:
    with wrapped(tiny.llama(), SampledDrafter(VOCAB), FIXED) as model:
        one = drawn(PROMPTS[0], None)
        torch.manual_seed(3)
        alone = [one.alone(model) for _ in range(2)]
        with stepped(model) as queue:
            torch.manual_seed(3)
            for _ in range(3):
                queue.submit(one)
            results = queue.finish()
    for result, text in zip(results, alone, strict=False):
        assert_same(result, text)
    assert len({tuple(result.ids) for result in results}) == 3


def test_a_running_one_makes_place_for_higher_priority_and_keeps_its_turn() -> None:
    with wrapped(tiny.llama(), "lookup", FIXED) as model:
        low, high = greedy(PROMPTS[0], 40), greedy(PROMPTS[1], 4)
        alone = [low.alone(model), high.alone(model)]
        with stepped(model, max_rows=1, order="fifo") as queue:
            first = queue.submit(low)
            queue.until(lambda: bool(first.pieces))
            later = queue.submit(low)
            urgent = [queue.submit(high, priority=2), queue.submit(high, priority=1)]
            order = []
            for handle in queue.handles:
                handle.follow(
                    lambda status, h=handle: order.append(h) if status == "done" else None
                )
            results = queue.finish()
        # By priority, then arrival: the parked one came before the one that never ran.
        assert order == [*urgent, first, later]
        assert (first.stats.preemptions, later.stats.preemptions) == (1, 0)
        for result, text in zip(results, [alone[0], alone[0], alone[1], alone[1]], strict=True):
            assert_same(result, text)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["rows", "own loop"])
def test_a_time_limit_counts_from_when_decoding_begins(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: now[0]))
    with wrapped(tiny.llama(), None, FIXED) as model:
        limited = greedy(PROMPTS[1], 8, max_time=5.0, **options)

        def late(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            now[0] += 2.0
            return scores

        slow = greedy(PROMPTS[1], 8, max_time=5.0, logits_processor=[late], **options)
        with stepped(model, max_rows=1, order="fifo") as queue:
            for one in (greedy(PROMPTS[0], 5), limited, slow):
                queue.submit(one)
            queue.step(2)
            now[0] += 100.0
            results = queue.finish()
    assert len(results[1].ids) == 8
    # Six seconds are over five; a token comes every two.
    assert len(results[2].ids) == 3


@pytest.mark.parametrize("kind", ["lookup", "model", "block"])
def test_a_disk_offloaded_tied_target_says_what_it_says_in_memory(
    kind: str, tmp_path: Path
) -> None:
    model = tiny.llama(tie_word_embeddings=True)
    plain = [plain_generate(model, [ids], max_new_tokens=12)[0].tolist() for ids in PROMPTS]
    drafter: Any = kind
    if kind == "model":
        drafter = noisy_copy(model)
    elif kind == "block":
        inner = block_drafter(model, owns_embed=True, owns_head=True, texts=plain[:2])
        drafter = Recording(inner)
    model = disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.device.type == "meta"
    with wrapped(model, drafter, FIXED):
        alone = [greedy(ids).alone(model) for ids in PROMPTS]
        attended = set()
        hook = model.register_forward_pre_hook(
            lambda *_: attended.add(model.config._attn_implementation)
        )
        with GenerationQueue(model) as queue:
            handles = [greedy(ids).submit(queue) for ids in PROMPTS]
            results = [handle.result(WAIT_S) for handle in handles]
        hook.remove()
    for result, one, full in zip(results, alone, plain, strict=True):
        assert result.output[0].tolist() == full
        assert_same(result, one)
    assert attended == {interface.NAME}
    if kind == "block":
        assert drafter.taken
        for _, _, features in drafter.taken:
            assert features.isfinite().all()
            assert features.abs().sum(dim=-1).min() > 0
