from __future__ import annotations

import math

import pytest
import torch

import tiny
from drafters import RandomDrafter, SampledDrafter
from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.errors import ConfigError, InputError
from dspark_hf.losslessness import (
    Fork,
    chi_square,
    greedy_check,
    margin_limit,
    sampling_check,
    unwrapped,
)
from dspark_hf.verification.acceptance import Decision, Greedy, Rejection

PROMPTS = [tiny.prompt(9, 1), [5, 6, 7, 5, 6, 7, 5, 6], tiny.prompt(3, 2)]
FIXED = DSparkConfig(schedule="fixed", max_draft_tokens=3)
FLAT = {"temperature": 8.0, "top_k": 12}
"""A spread-out distribution, so that several tokens are expected often."""


def accept_anything(rule, scores, draft, draft_probs, position):
    """Stand-in for a broken acceptance rule."""
    token = int(scores.argmax()) if draft is None else draft
    return Decision(token, draft is not None)


@pytest.fixture
def model():
    return DSparkForCausalLM.wrap(tiny.llama(), drafter=RandomDrafter(tiny.VOCAB), config=FIXED)


def test_an_unwrapped_model_is_plain_inside_and_as_before_afterwards(model):
    wrapped_class, handle = type(model), model.dspark
    with unwrapped(model) as plain:
        assert plain is model
        assert not isinstance(model, DSparkForCausalLM)
    assert type(model) is wrapped_class
    assert model.dspark is handle


def test_a_model_is_wrapped_again_after_an_error(model):
    with pytest.raises(RuntimeError), unwrapped(model):
        raise RuntimeError
    assert isinstance(model, DSparkForCausalLM)


def test_a_plain_model_is_refused():
    for check in (
        lambda: greedy_check(tiny.llama(), PROMPTS, 4),
        lambda: sampling_check(tiny.llama(), PROMPTS[0], 4),
        lambda: unwrapped(tiny.llama()).__enter__(),
    ):
        with pytest.raises(ConfigError, match="must be wrapped; got a plain LlamaForCausalLM"):
            check()


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(InputError, match="at least one token"):
        greedy_check(model, [[]], 4)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_greedy_texts_are_equal_in_any_batch(model, batch_size):
    inputs = [PROMPTS[0], torch.tensor(PROMPTS[1]), torch.tensor([PROMPTS[2]])]
    results = greedy_check(model, inputs, 12, batch_size=batch_size)
    assert [result.verdict for result in results] == ["equal"] * 3
    assert all(result.ids == result.plain_ids and len(result.ids) == 12 for result in results)
    assert all(result.record.verified > 0 for result in results)


def test_settings_of_generate_reach_both_sides(model):
    results = greedy_check(model, PROMPTS, 12, repetition_penalty=1.5)
    penalised = [result.ids for result in results]
    assert penalised != [result.ids for result in greedy_check(model, PROMPTS, 12)]
    assert all(result.verdict == "equal" for result in results)


def test_a_call_that_speculation_leaves_alone_says_so(model):
    result = greedy_check(model, PROMPTS[:1], 6, num_beams=2)[0]
    assert (result.verdict, result.record.path, result.record.verified) == (
        "equal",
        "transformers",
        0,
    )


def test_a_wrongly_accepted_token_is_a_difference(model, monkeypatch):
    monkeypatch.setattr(Greedy, "decide", accept_anything)
    results = greedy_check(model, PROMPTS, 12, batch_size=3, repetition_penalty=1.2)
    assert [result.verdict for result in results] == ["different"] * 3
    for result in results:
        fork = result.fork
        assert result.ids[: fork.index] == result.plain_ids[: fork.index]
        assert result.ids[fork.index] == fork.token != fork.plain_token
        assert fork.margin > fork.margin_limit


def test_the_margin_is_that_of_the_plain_models_own_step(model, monkeypatch):
    monkeypatch.setattr(Greedy, "decide", accept_anything)
    prompt = PROMPTS[0]
    result = greedy_check(model, [prompt], 8, repetition_penalty=1.2)[0]
    fork = result.fork
    with unwrapped(model):
        scores = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=8,
            do_sample=False,
            repetition_penalty=1.2,
            output_scores=True,
            return_dict_in_generate=True,
        ).scores[fork.index][0]
    expected = float(scores[fork.plain_token]) - float(scores[fork.token])
    assert fork.margin == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("dtype", "score", "limit"),
    [
        (torch.float32, 30.0, 1e-3),
        (torch.bfloat16, 0.5, 0.1),
        # Neighbouring bfloat16 values are 0.125 apart from 16 to 32, float16 ones 0.0156.
        (torch.bfloat16, 17.0, 0.25),
        (torch.bfloat16, -40.0, 0.5),
        (torch.float16, 17.0, 0.1),
        (torch.bfloat16, math.inf, 0.1),
    ],
)
def test_rounding_explains_margins_up_to_a_limit_by_dtype_and_size(dtype, score, limit):
    assert margin_limit(dtype, score) == limit


@pytest.mark.parametrize(
    ("margin", "is_near_tie"),
    [(0.0, True), (0.1, True), (0.11, False), (math.inf, False), (math.nan, False)],
)
def test_a_fork_is_a_near_tie_up_to_its_limit(margin, is_near_tie):
    assert Fork(3, 1, 2, margin, margin_limit=0.1).is_near_tie is is_near_tie


def test_chi_square_of_known_counts():
    statistic, df = chi_square(torch.tensor([60, 40]), torch.tensor([0.5, 0.5]))
    assert (statistic, df) == (pytest.approx(4.0), 1)


def test_rare_outcomes_are_pooled_and_none_is_left_out():
    probs = torch.tensor([0.5, 0.3, 0.1, 0.04, 0.03, 0.03])
    # Expected of 100: 50, 30, 10 and a rest of 10.
    statistic, df = chi_square(torch.tensor([50, 30, 10, 10, 0, 0]), probs)
    assert (statistic, df) == (pytest.approx(0.0, abs=1e-9), 3)
    # Impossible tokens land in the smallest bin: 10 more than the 10 expected there.
    probs = torch.tensor([0.6, 0.3, 0.1, 0.0])
    statistic, df = chi_square(torch.tensor([50, 30, 10, 10]), probs)
    assert (statistic, df) == (pytest.approx(100 / 60 + 100 / 10), 2)


def test_a_single_bin_has_no_degrees_of_freedom():
    assert chi_square(torch.tensor([20, 0]), torch.tensor([0.99, 0.01])) == (0.0, 0)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_sampled_tokens_fit_the_exact_distribution(acceptance):
    config = DSparkConfig(acceptance=acceptance)
    model = DSparkForCausalLM.wrap(tiny.llama(), SampledDrafter(tiny.VOCAB), config)
    result = sampling_check(model, PROMPTS[1], 600, seed=1, batch_size=200, **FLAT)
    assert result.verdict == "consistent"
    assert result.num_tested >= 50
    assert result.verified == result.num_tested
    assert result.accepted < result.verified
    assert result.accepted > 0 or acceptance == "coupled"
    assert result.df >= 3
    assert 1e-3 < result.p_value <= 1


def test_wrongly_accepted_samples_are_a_difference(monkeypatch):
    monkeypatch.setattr(Rejection, "decide", sample_anything)
    model = DSparkForCausalLM.wrap(tiny.llama(), SampledDrafter(tiny.VOCAB))
    result = sampling_check(model, PROMPTS[1], 600, batch_size=200, **FLAT)
    assert result.verdict == "different"
    assert result.accepted == result.verified


def sample_anything(rule, scores, draft, draft_probs, position):
    """Accept every draft; draw where there is none."""
    if draft is not None:
        return Decision(draft, accepted=True)
    probs = torch.softmax(scores, -1)
    return Decision(int(torch.multinomial(probs, 1, generator=rule.generator)), accepted=False)


def test_without_verified_drafts_a_sampling_test_is_inconclusive():
    model = DSparkForCausalLM.wrap(tiny.llama(), drafter=None)
    result = sampling_check(model, PROMPTS[1], 200, batch_size=200, **FLAT)
    assert (result.verdict, result.verified) == ("inconclusive", 0)


def test_without_a_choice_a_sampling_test_is_inconclusive():
    model = DSparkForCausalLM.wrap(tiny.llama(), SampledDrafter(tiny.VOCAB))
    result = sampling_check(model, PROMPTS[1], 50, top_k=1)
    assert (result.verdict, result.df, result.num_tested) == ("inconclusive", 0, 50)


def test_a_sampling_test_is_repeatable_and_varies_with_its_seed():
    model = DSparkForCausalLM.wrap(tiny.llama(), SampledDrafter(tiny.VOCAB))
    one, same, other = (sampling_check(model, PROMPTS[1], 60, seed, **FLAT) for seed in (3, 3, 4))
    assert one == same
    assert one != other
