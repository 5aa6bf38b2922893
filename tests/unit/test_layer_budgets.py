"""Budgets by layer: what is measured, that sharing out is best, and where it may go.

Regimes: curves that flatten and curves with a late jump; layers that attend to everything, of a
window, or by rank of a predictor; budgets that do not fill a page.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import BoostedBudget, FlatBudget, SparsePolicy, StepSignals
from dspark_hf.attention.predictors import RecentPredictor
from dspark_hf.attention.sparse import SparseRow, SparseStats
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation import LayerBudgets, calibrate_budgets
from dspark_hf.evaluation.budgets import _Meter, share_out
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.values import Feed
from evaluation_files import save_target

POLICY = SparsePolicy(tokens=80, recent_pages=2)
SIZES: dict[str, Any] = {"context": 200, "queries": 6}
SUMMED = 1e-5
"""Relative difference of shares summed in another order; seen: 5e-7."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    model, tokenizer = save_target(tmp_path_factory.mktemp("target"))
    return model, tokenizer


def random_curves(layers: int, pages: int, seed: int, *, is_even: bool) -> list[Any]:
    """Return shares captured by 1, 2, ... pages; even ones gain less with every page."""
    stream = np.random.default_rng(seed)
    curves = []
    for _ in range(layers):
        gains = stream.dirichlet(np.full(pages, 0.5))
        curves.append(np.cumsum(np.sort(gains)[::-1] if is_even else gains))
    return curves


def missed(curves: list[Any], pages: Any) -> float:
    return sum(1 - curve[count - 1] for curve, count in zip(curves, pages, strict=True))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("total", "floor"), [(9, 1), (12, 3), (20, 2), (24, 1)])
def test_sharing_out_misses_least_of_all_ways_to_do_it(seed: int, total: int, floor: int) -> None:
    curves = random_curves(3, 8, seed, is_even=True)
    ways = itertools.product(range(floor, 9), repeat=3)
    least = min(missed(curves, way) for way in ways if sum(way) == total)
    found = share_out(curves, total, floor)
    assert sum(found) == total
    assert min(found) >= floor
    assert missed(curves, found) == pytest.approx(least, abs=1e-12)


def test_a_jump_behind_pages_that_gain_little_is_seen() -> None:
    slow = np.array([0.1, 0.12, 0.14, 0.9, 0.95, 1.0])
    steady = np.array([0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert share_out([slow, steady], 5, 1) == [4, 1]
    # With too few pages to reach it, they go where they gain something.
    assert share_out([slow, steady], 4, 1) == [1, 3]


@pytest.mark.parametrize("seed", range(5))
def test_no_more_pages_are_given_than_there_are(seed: int) -> None:
    curves = random_curves(3, 5, seed, is_even=False)
    assert share_out(curves, 100, 2) == [5, 5, 5]
    assert sum(share_out(curves, 12, 2)) == 12


def slow_curve(attention: torch.Tensor, num_kv: int, policy: SparsePolicy) -> list[float]:
    """Return what sinks, then the newest pages one by one capture; attention (Hq, length)."""
    num_pages = -(-attention.shape[1] // PAGE)
    shares = torch.zeros(num_kv, num_pages)
    group = attention.shape[0] // num_kv
    for head in range(attention.shape[0]):
        for place, weight in enumerate(attention[head]):
            shares[head // group, place // PAGE] += float(weight) / group
    order = [0, *range(num_pages - 1, 0, -1)]
    return [float(shares[:, order[: n + 1]].sum()) / num_kv for n in range(num_pages)]


def test_what_is_measured_is_the_attention_of_the_plain_model(saved: tuple[Any, Any]) -> None:
    model, tokenizer = saved
    # By position alone, pages rank alike for every head.
    policy = POLICY.replace(predictor=RecentPredictor(), tokens=48)
    text = "the cat and the dog . " * 40
    found = calibrate_budgets(model, tokenizer, text, policy, context=120, queries=1)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.tensor([ids[:61]]), output_attentions=True)
    model.set_attn_implementation("sdpa")
    curves = [slow_curve(layer[0, :, 60], 2, policy) for layer in out.attentions]
    assert found.missed_flat == pytest.approx(missed(curves, [3, 3, 3]) / 3, rel=SUMMED)
    assert found.queries == 1


def test_the_meter_ranks_by_the_predictor_and_sums_the_true_attention() -> None:
    stream = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 320, 8, generator=stream)
    query = torch.randn(2, 3, 8, generator=stream) * 3
    layer = SimpleNamespace(keys=keys)
    cache: Any = SimpleNamespace(layers=[layer], lengths={0: 300})
    sums: dict[int, Any] = {}
    meter = _Meter(POLICY, cache, sums, 25)
    summary = PageSummaries().refresh(keys, 0, 301)
    scores = meter.scores(query, summary, 0, 0.5)
    assert torch.equal(scores, POLICY.predictor.scores(query, summary, 0, 0.5))
    shares = scores.softmax(-1).mean(1)
    ranked = sorted(
        (
            (2.0 if p in (0, 17, 18) else float(shares[h, p]), h, p)
            for h in (0, 1)
            for p in range(19)
        ),
        reverse=True,
    )
    true = ((query @ keys[0, :, :301].transpose(1, 2)) * 0.5).softmax(-1).mean(1)
    captured, wanted = 0.0, []
    for rank, (_, h, p) in enumerate(ranked, start=1):
        captured += float(true[h, p * PAGE : (p + 1) * PAGE].sum()) / 2
        if rank % 2 == 0:
            wanted.append(captured)
    # Sinks and recent pages have no order among themselves.
    assert sums[0][2:19] == pytest.approx(wanted[2:], rel=SUMMED)
    assert sums[0][18:] == pytest.approx(np.ones(7), rel=SUMMED)


def wide_first_layer() -> Any:
    """Return a target whose first layer attends to all tokens alike."""
    model = tiny.llama(max_position_embeddings=512)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    return model


def test_a_layer_that_attends_widely_gets_more_and_less_is_missed(saved: tuple[Any, Any]) -> None:
    found = calibrate_budgets(wide_first_layer(), saved[1], None, POLICY, **SIZES)
    wide, *sharp = found.factors
    assert wide > max(sharp)
    assert min(found.factors) >= 3 * PAGE / 80
    assert sum(found.factors) == pytest.approx(3, rel=1e-12)
    assert 0 <= found.missed < found.missed_flat < 1


@pytest.mark.parametrize("tokens", [80, 95, 96, 61])
def test_steps_read_the_budget_shared_out_by_layer(saved: tuple[Any, Any], tokens: int) -> None:
    model = wide_first_layer()
    policy = POLICY.replace(tokens=tokens)
    found = calibrate_budgets(model, saved[1], None, policy, **SIZES)
    target, stats = FlatTarget(model, 32), SparseStats()
    target.read_sparsely(0, SparseRow(found.policy(policy, model), stats, 0))
    with torch.no_grad():
        target.forward([Feed(0, tiny.prompt(300), 1, is_prompt=True)])
        target.forward([Feed(0, [5], 1)])
    pages = [round(factor * tokens / PAGE) for factor in found.factors]
    assert sum(pages) == 3 * (tokens // PAGE)
    assert stats.calls == 3
    # Two key heads.
    assert stats.pages_read == 2 * sum(pages)
    assert stats.squares == sum(count**2 for count in pages)


def test_layers_that_do_not_select_keep_a_factor_of_one(saved: tuple[Any, Any]) -> None:
    policy = POLICY.replace(dense_layers=frozenset({1}))
    factors = calibrate_budgets(wide_first_layer(), saved[1], None, policy, **SIZES).factors
    assert factors[1] == 1
    assert factors[0] > 1 > factors[2]
    gemma = tiny.gemma3()
    assert calibrate_budgets(gemma, saved[1], None, POLICY, **SIZES).factors == (1, 1, 1)


def test_budgets_of_the_policy_itself_do_not_change_what_is_measured(
    saved: tuple[Any, Any],
) -> None:
    model, tokenizer = saved
    plain = calibrate_budgets(model, tokenizer, None, POLICY, **SIZES)
    tight = POLICY.replace(budget=FlatBudget((0.1, 0.1, 0.1)))
    assert calibrate_budgets(model, tokenizer, None, tight, **SIZES) == plain


FOUND = LayerBudgets((0.5, 1.0 / 3, 2.0), 2048, 8192, 64, 0.05, 0.04)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    FOUND.save(path)
    assert LayerBudgets.load(path) == FOUND


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}", '{"factors": [1.0]}', '{"factors": "abc"}',
        '{"factors": [-1], "tokens": 1, "context": 1, "queries": 1, "missed_flat": 0, "missed": 0}',
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "budgets.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"budgets|factors"):
        LayerBudgets.load(path)


def test_factors_go_to_either_budget_and_to_a_model_of_their_size(saved: tuple[Any, Any]) -> None:
    model, calm = saved[0], StepSignals(entropy=0.0, steps=9)
    boosted = SparsePolicy(budget=BoostedBudget(boost=4.0))
    for base, factor in (("fast", 1), (POLICY, 1), (boosted, 4)):
        budget = FOUND.policy(base, model).budget
        assert budget.factor(2, calm) == 2.0
        assert budget.factor(2, StepSignals(was_rejected=True)) == 2.0 * factor
    assert FOUND.policy("fast", model).tokens == 1024
    with pytest.raises(ConfigError, match="each of the model's 2 layers"):
        FOUND.policy(POLICY, tiny.llama(num_hidden_layers=2))
    foreign: Any = SimpleNamespace(needs_entropy=False)
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        FOUND.policy(POLICY.replace(budget=foreign), model)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"context": 160}, "context must be more than twice"),
        ({"context": 10**6}, "window"),
        ({"queries": 0}, "queries"),
        ({"policy": None}, "policy"),
        ({"policy": POLICY.replace(dense_layers=frozenset({0, 1, 2}))}, "full attention"),
    ],
    ids=str,
)
def test_calibrations_that_would_measure_nothing_are_refused(
    saved: tuple[Any, Any], values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        calibrate_budgets(*saved, **{"policy": POLICY, **SIZES, **values})


@pytest.mark.parametrize("name", ["bloom", "deepseek_v3"])
def test_models_off_the_flat_target_are_refused(name: str, saved: tuple[Any, Any]) -> None:
    with pytest.raises(NotImplementedError, match="flat target"):
        calibrate_budgets(tiny.ARCHITECTURES[name](), saved[1], None, POLICY, **SIZES)
