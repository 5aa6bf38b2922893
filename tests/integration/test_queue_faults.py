"""A bad request fails alone, with its own error, where possible in its caller's thread.

What the model's own loop must decode runs alone, and can be broken off. Nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import tiny
from drafters import RandomDrafter
from dspark_hf import DSparkConfig, GenerationQueue
from dspark_hf.errors import (
    CapacityError,
    ConfigError,
    InputError,
)
from harness import toy_tokenizer, wrapped
from own_code import OWN_CODE, Raises
from queues import FIXED, Asked, assert_same, greedy, stepped
from tiny import VOCAB, prompt

PROMPTS = [prompt(n, seed=n) for n in (4, 9, 13)]
TOKENIZER = toy_tokenizer()


@pytest.fixture(params=["llama", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    with wrapped(tiny.ARCHITECTURES[request.param](), "lookup", FIXED) as model:
        yield model


@pytest.fixture
def flat() -> Iterator[Any]:
    with wrapped(tiny.llama(), "lookup", FIXED) as model:
        yield model


AT_SUBMIT: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no tokens": ([], {}, InputError, "at least one token"),
    "foreign ids": ([1, VOCAB], {}, InputError, "input_ids must lie in 0..159"),
    "negative ids": ([-1, 4], {}, InputError, "input_ids must lie in"),
    "empty text": ("", {}, InputError, "at least one token"),
    "numbers that are no ids": ([1.5, 2.5], {}, InputError, "inputs must be text, token ids"),
    "floats": (torch.ones(1, 3), {}, InputError, "inputs must be text, token ids"),
    "booleans": (torch.ones(1, 3, dtype=torch.bool), {}, InputError, "inputs must be text"),
    "three axes": (torch.ones(1, 1, 3, dtype=torch.long), {}, InputError, "inputs must be text"),
    "nothing": (None, {}, InputError, "got NoneType None"),
    "a mapping": ({"input_ids": [1]}, {}, InputError, "inputs must be text"),
    "messages of nobody": ([{"content": "ab"}], {}, InputError, "inputs must be text"),
    "unknown keyword": ([1], {"max_tokens": 4}, ValueError, "max_tokens"),
    "bad setting": ([1], {"do_sample": True, "temperature": 0.0}, ValueError, "temperature"),
    "no new tokens": ([1], {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
    "several of greedy": ([1], {"num_return_sequences": 2}, ValueError, "num_return_sequences"),
    "negative beams": ([1], {"num_beams": -1}, ConfigError, "num_beams must be .* 1; got -1"),
    "no beams": ([1], {"num_beams": 0}, ConfigError, "num_beams must be .* 1; got 0. Leave it out"),
    "half a beam": ([1], {"num_beams": 1.5}, ConfigError, "num_beams must be an integer"),
    "beams by config": (
        [1],
        {"generation_config": GenerationConfig(num_beams=-3)},
        ConfigError,
        "got -3",
    ),
    "no answers": ([1], {"num_return_sequences": 0}, ConfigError, "num_return_sequences must be"),
    "negative answers of beams": (
        [1],
        {"num_beams": 2, "num_return_sequences": -1},
        ConfigError,
        "num_return_sequences must",
    ),
    "ids twice": ([1], {"input_ids": torch.ones(1, 1)}, ConfigError, "input_ids cannot be handed"),
    "own loop": ([1], {"custom_generate": lambda *_: 1}, ConfigError, "custom_generate cannot be"),
    "no settings": ([1], {"dspark": {"seed": 1}}, ConfigError, "dspark must be a DSparkConfig"),
    "other schedule": (
        [1],
        {"dspark": DSparkConfig()},
        ConfigError,
        "schedule is shared|max_draft",
    ),
    "longer drafts": ([1], {"prompt_lookup_num_tokens": 9}, ConfigError, "at most the model's 4"),
    "too long": ([1], {"max_new_tokens": 10**9}, CapacityError, "must fit the kv_budget"),
}


@pytest.mark.parametrize("case", AT_SUBMIT)
def test_what_cannot_be_decoded_fails_in_the_callers_thread(flat: Any, case: str) -> None:
    inputs, options, kind, words = AT_SUBMIT[case]
    with stepped(flat, TOKENIZER) as queue, pytest.raises(kind, match=words):
        queue.queue.submit(inputs, **{"max_new_tokens": 4, "do_sample": False, **options})


def test_text_needs_a_tokenizer_and_a_filled_cache_is_refused(flat: Any) -> None:
    ids = torch.tensor([PROMPTS[0]])
    out = flat.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    cache = out.get("cache", out.get("past_key_values"))
    with stepped(flat) as queue:
        with pytest.raises(InputError, match="Pass tokenizer= to the queue"):
            queue.queue.submit("text")
        with pytest.raises(ConfigError, match="past_key_values cannot be handed to a queue"):
            queue.queue.submit(out.sequences[0], past_key_values=cache, max_new_tokens=2)


def test_autocast_is_refused_and_inference_mode_is_not(flat: Any) -> None:
    one = greedy(PROMPTS[0], 70)
    alone = one.alone(flat)
    with stepped(flat) as queue:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(ConfigError, match="autocast must be off"),
        ):
            queue.submit(one)
        with torch.inference_mode():
            queue.submit(one)
        (result,) = queue.finish()
    assert_same(result, alone)


def test_the_queue_itself_wants_a_wrapped_model_and_its_settings() -> None:
    model = tiny.llama()
    with pytest.raises(ConfigError, match="model must be wrapped; got LlamaForCausalLM"):
        GenerationQueue(model)
    with wrapped(model), pytest.raises(ConfigError, match="config must be a QueueConfig or None"):
        GenerationQueue(model, config={"max_rows": 3})  # type: ignore[arg-type]


def test_how_many_drafts_and_how_they_are_accepted_may_differ_by_request() -> None:
    own = replace(FIXED, max_draft_tokens=2, acceptance="coupled", seed=3)
    with wrapped(tiny.llama(), RandomDrafter(VOCAB), FIXED) as model:
        asked = [greedy(PROMPTS[0], 12, dspark=own), greedy(PROMPTS[0], 12)]
        alone = [one.alone(model) for one in asked]
        assert 0 < alone[0].records[0].drafted < alone[1].records[0].drafted
        with stepped(model) as queue:
            for one in asked:
                queue.submit(one)
            for result, one in zip(queue.finish(), alone, strict=True):
                assert_same(result, one)


@pytest.mark.parametrize("case", OWN_CODE)
def test_a_requests_own_code_fails_it_alone_with_its_own_error(model: Any, case: str) -> None:
    others = [greedy(ids, 12) for ids in PROMPTS[1:]]
    alone = [one.alone(model) for one in others]
    failing = Asked(
        PROMPTS[0], lambda: {"max_new_tokens": 9, "do_sample": False, **OWN_CODE[case]()}
    )
    with stepped(model) as queue:
        for one in (others[0], failing, others[1]):
            queue.submit(one)
        results = queue.finish()
        is_ours = "scores" in case
        assert isinstance(results[1], InputError if is_ours else ArithmeticError)
        assert is_ours or str(results[1]) == "mine"
        for result, one in zip((results[0], results[2]), alone, strict=True):
            assert_same(result, one)
        # And the queue goes on.
        queue.submit(others[0])
        assert_same(queue.finish()[3], alone[0])


def test_one_failing_row_fails_its_request_whole_and_frees_the_others(flat: Any) -> None:
    class SecondRow(Raises):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return self.fail(scores) if int(ids[0, -1]) % 2 else scores

    batch = torch.tensor([PROMPTS[1], [*PROMPTS[1][:-1], 8]])
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [159]}
    failing = Asked(batch, lambda: {**options, "logits_processor": [SecondRow(2)]}, batch)
    with stepped(flat) as queue:
        queue.submit(failing)
        (result,) = queue.finish()
    assert isinstance(result, ArithmeticError)


def test_rows_that_end_early_free_their_places_at_once(flat: Any) -> None:
    batch, _ = tiny.left_padded(PROMPTS)
    ends = greedy(PROMPTS[0], 9).alone(flat).ids[2]
    rows = Asked(batch, lambda: {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [ends]},
                 batch)  # fmt: skip
    alone = rows.alone(flat)
    lengths = [record.new_tokens for record in alone.records]
    assert min(lengths) < max(lengths)
    with stepped(flat) as queue:
        queue.submit(rows)
        held = set()
        while queue.places.waiting or queue.places.running:
            queue.step()
            held.add(len(queue.places.decoder.target.cache.slots))
        assert held >= {1, 2} or held >= {3, 2}
        assert_same(queue.finish()[0], alone)


# Requests that the model's own loop decodes.


def test_beams_run_alone_and_come_to_what_generate_says(model: Any) -> None:
    beams = greedy(PROMPTS[1], 8, num_beams=3, num_return_sequences=2, eos_token_id=[9, 70, 140])
    others = [greedy(ids, 12) for ids in (PROMPTS[0], PROMPTS[2])]
    alone = [one.alone(model) for one in (others[0], beams, others[1])]
    with stepped(model) as queue:
        for one in (others[0], beams, others[1]):
            queue.submit(one)
        results = queue.finish()
    for result, one in zip(results, alone, strict=True):
        assert_same(result, one)
    assert queue.handles[1].pieces == alone[1].ids
    assert results[1].stats.records[0].path == "transformers"


def test_a_request_alone_waits_for_a_place_like_others(flat: Any) -> None:
    with stepped(flat, max_rows=1) as queue:
        first = queue.submit(greedy(PROMPTS[0], 8), priority=1)
        beams = queue.submit(greedy(PROMPTS[1], 3, num_beams=2))
        queue.step(2)
        assert (first.status, beams.status) == ("running", "waiting")
        urgent = queue.submit(greedy(PROMPTS[1], 3, num_beams=2), priority=2)
        queue.step()
        assert (first.status, urgent.status) == ("running", "done")
        assert first.stats.preemptions == 0
        assert all(not isinstance(result, Exception) for result in queue.finish())


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_request_in_the_models_own_loop_can_be_broken_off(
    flat: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread; here by a processor, which is called where such a call would come in."""
    calls = []

    def stops(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            if how == "cancel":
                handle.cancel()
            elif how == "close":
                queue.queue.close(drain=False, timeout=0)
            else:
                late = handle.stats.submitted + 1001
                monkeypatch.setattr("dspark_hf.serving.request.time.monotonic", lambda: late)
        return scores

    asked = greedy(PROMPTS[0], 50, num_beams=2, logits_processor=[stops])
    with stepped(flat) as queue:
        handle = queue.submit(asked, deadline_s=1000)
        queue.step()
        assert handle.status == ("failed" if how == "deadline" else "cancelled")
        assert len(calls) == 3
        monkeypatch.undo()
        assert not flat._forward_pre_hooks


def test_own_loops_that_fail_fail_alone(flat: Any) -> None:
    def no_memory(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("none")

    with stepped(flat) as queue:
        queue.submit(greedy(PROMPTS[0], 5, num_beams=2, logits_processor=[Raises(2)]))
        queue.submit(greedy(PROMPTS[1], 5, num_beams=2, logits_processor=[no_memory]))
        queue.submit(greedy(PROMPTS[2], 5))
        results = queue.finish()
    assert isinstance(results[0], ArithmeticError)
    assert isinstance(results[1], CapacityError)
    assert len(results[2].ids) == 5
