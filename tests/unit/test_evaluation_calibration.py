"""Calibration: never measured on what it was fitted on, not biased by ends, state left as found."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

import tiny
from block_drafters import block_drafter
from dspark_hf import DSparkForCausalLM
from dspark_hf.data import Prompt
from dspark_hf.drafting.choice import choose_between
from dspark_hf.drafting.lookup import LookupDrafter
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation import Calibration, calibrate_drafter
from dspark_hf.evaluation.calibrate import fit, outcomes_at, survivals
from dspark_hf.evaluation.figures import position_figures
from dspark_hf.evaluation.rounds import BlockRounds, Observed, PromptRounds, collect_rounds
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.tracing import RoundTrace
from dspark_hf.verification.scaling import Scaling, Scalings
from harness import toy_tokenizer, wrapped

TEXTS = ["abacadaeaf", "bbbcbdbebf", "cacbcccdce", "ddefabcdab", "kakbkckdke", "hahbhchdhe"]
END = 3
SAVED = Scalings(Scaling((9.0,) * 5, (0.0,) * 5), Scaling.plain(5))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return toy_tokenizer()


def taught(model: Any, tokenizer: Any, **changes: Any) -> Any:
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    texts = [tiny.plain_generate(model, [ids], max_new_tokens=24)[0].tolist() for ids in prompts]
    return block_drafter(model, texts=texts[::2], **changes)


def simulated(seed: int, heat: float, num_rounds: int = 6000, size: int = 4) -> BlockRounds:
    """Rounds whose stated logits are `heat` times the true ones."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(1.0, 1.0, (num_rounds, size))
    kept = generator.random((num_rounds, size)) < 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(kept, axis=1).sum(axis=1)
    return BlockRounds(heat * logits, np.full(num_rounds, size), accepted)


def test_scaling_undoes_overconfidence_on_rounds_it_never_saw() -> None:
    found = fit(simulated(0, 3.0), simulated(1, 3.0))
    assert all(2.0 < t < 4.5 for t in found.scaling.temperatures[:3])
    assert all(a < b for a, b in zip(found.ece_after, found.ece_before, strict=True))
    assert max(found.ece_after) < 0.03
    assert all(auc is not None and auc > 0.6 for auc in found.auc)
    assert found.num_rounds == 12000


def test_errors_come_from_the_half_that_was_not_fitted_on() -> None:
    """Halves of opposite bias: what one teaches is wrong for the other, as the errors must say."""
    generator = np.random.default_rng(6)
    halves = []
    for rate in (0.2, 0.8):
        accepted = (generator.random(2000) < rate).astype(np.int64)
        halves.append(BlockRounds(np.zeros((2000, 1)), np.ones(2000, dtype=np.int64), accepted))
    found = fit(*halves)
    assert found.ece_after[0] > 0.5
    assert found.ece_before[0] < 0.05
    assert found.scaling.shifts[0] == pytest.approx(0.0, abs=0.2)


def test_greedy_and_sampled_texts_are_fitted_apart(model: Any, tokenizer: Any) -> None:
    drafter = taught(model, tokenizer)
    with wrapped(model, drafter):
        both = calibrate_drafter(model, tokenizer, TEXTS, max_new_tokens=24)
        alone = [
            calibrate_drafter(
                model, tokenizer, TEXTS, max_new_tokens=24, temperatures=(temperature,)
            )
            for temperature in (0.0, 1.0)
        ]
    assert both.greedy == alone[0].greedy == alone[0].sampled
    assert both.sampled == alone[1].sampled == alone[1].greedy
    assert both.greedy != both.sampled
    assert (both.num_prompts, both.sampling) == (6, (0.0, 1.0))


def test_calibrating_fits_raw_confidences_and_uses_the_result(model: Any, tokenizer: Any) -> None:
    drafter = taught(model, tokenizer, scalings=SAVED)
    with wrapped(model, drafter):
        plain = calibrate_drafter(model, tokenizer, TEXTS, max_new_tokens=16, temperatures=(0.0,))
        assert drafter.scalings == SAVED
        again = model.dspark.calibrate(TEXTS, tokenizer, max_new_tokens=16, temperatures=(0.0,))
        assert again == plain
        assert drafter.scalings == again.scalings
        assert again.scalings.num_positions == 5


def test_a_failure_leaves_drafter_and_scalings_as_found(model: Any, tokenizer: Any) -> None:
    block = taught(model, tokenizer, scalings=SAVED)
    choice = choose_between([LookupDrafter(), block])
    with wrapped(model, choice):
        with pytest.raises(ConfigError, match="both halves"):
            model.dspark.calibrate(TEXTS[:1], tokenizer, max_new_tokens=16)
        assert model.dspark.drafter is choice
        assert block.scalings == SAVED
        model.dspark.calibrate(TEXTS, tokenizer, max_new_tokens=16, temperatures=(1.0,))
        assert model.dspark.drafter is choice
        assert block.scalings != SAVED


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_only_block_drafters_can_be_calibrated(model: Any, tokenizer: Any, drafter: Any) -> None:
    with (
        wrapped(model, drafter),
        pytest.raises(ConfigError, match=r"wrapped with a block drafter; got drafter"),
    ):
        model.dspark.calibrate(TEXTS, tokenizer)
    with pytest.raises(ConfigError, match="wrapped with a block drafter"):
        calibrate_drafter(DSparkForCausalLM.unwrap(model), tokenizer, TEXTS)


def test_a_drafter_without_a_confidence_head_is_refused(model: Any, tokenizer: Any) -> None:
    drafter = block_drafter(model, has_confidence=False, confidence_sees_token=False)
    with wrapped(model, drafter), pytest.raises(ConfigError, match="confidence head"):
        model.dspark.calibrate(TEXTS, tokenizer, max_new_tokens=16)


def test_wrong_temperatures_and_an_unwrapped_model_are_refused(model: Any, tokenizer: Any) -> None:
    prompts = [Prompt("a", "all", TEXTS[0])]
    with wrapped(model, taught(model, tokenizer)), pytest.raises(ConfigError, match="at least 0"):
        calibrate_drafter(model, tokenizer, TEXTS, temperatures=(-1.0,))
    with pytest.raises(ConfigError, match="wrapped with a drafter"):
        collect_rounds(
            model, tokenizer, prompts, num_drafts=3, max_new_tokens=8, temperature=0.0
        )  # fmt: skip


def test_texts_that_end_do_not_bias_what_survives() -> None:
    """Each token survives with probability 0.7; end tokens are drafted often and end the text."""
    generator, rate, size = np.random.default_rng(4), 0.7, 4
    rounds, naive = [], []
    for _ in range(20_000):
        drafted = tuple(END if x < 0.25 else 9 for x in generator.random(size))
        kept = int(np.cumprod(generator.random(size) < rate).sum())
        end = next((k for k in range(kept) if drafted[k] == END), None)
        accepted = kept if end is None else end + 1
        emitted = (*drafted[:accepted], *(() if end is not None else (5,)))
        trace = RoundTrace(
            0, 0, 0, 4, "d", 0, drafted, (0.5,) * size, size, accepted, emitted, end is not None
        )
        rounds.append(Observed((0.0,) * size, size, trace.num_known({END}), accepted))
        naive.append(accepted)
    stacked = BlockRounds.of(
        [PromptRounds("p", "all", 0.0, SpeculationRecord(), tuple(rounds))], size
    )
    stated = survivals(stacked, Scaling.plain(size))
    for k in range(size):
        _, survived = outcomes_at(stacked, stated, k)
        assert math.isclose(survived.mean(), rate ** (k + 1), abs_tol=0.02)
        assert math.isclose(position_figures(stacked)[k]["rate"], rate, abs_tol=0.03)
    assert np.mean(np.array(naive) > 3) < rate**4 - 0.05


def test_a_result_is_json_with_what_a_drafter_loads() -> None:
    mode = fit(simulated(2, 1.0, 400), simulated(3, 1.0, 400))
    found = Calibration(mode, mode, num_prompts=4, sampling=(0.0, 1.0))
    stored = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    for a, b in zip(
        Scalings.from_dict(stored).greedy.shifts, found.scalings.greedy.shifts, strict=True
    ):
        assert a == pytest.approx(b, abs=1e-6)
    assert (stored["sampled"]["num_rounds"], stored["num_prompts"]) == (800, 4)
    none = BlockRounds(np.ones((5, 2)), np.full(5, 2), np.zeros(5, dtype=np.int64))
    assert fit(none, none).to_dict()["auc"] == [None, None]
