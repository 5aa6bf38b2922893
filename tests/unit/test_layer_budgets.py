"""Budgets by layer: what is measured, that sharing out is best, and where it may go.

Regimes: losses that flatten and losses with a late jump; layers that attend to everything or to a
window; heads that attend to much and to little; budgets that do not fill a page.
"""

from __future__ import annotations

import itertools
import json
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
from dspark_hf.evaluation.budgets import share_out
from dspark_hf.evaluation.layer_losses import LossMeter
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


def random_losses(layers: int, pages: int, seed: int, *, is_even: bool) -> list[Any]:
    """Return what is lost with 1, 2, ... pages; even losses shrink less with every page."""
    stream = np.random.default_rng(seed)
    losses = []
    for _ in range(layers):
        gains = stream.dirichlet(np.full(pages, 0.5))
        losses.append(1 - np.cumsum(np.sort(gains)[::-1] if is_even else gains))
    return losses


def lost(losses: list[Any], pages: Any) -> float:
    return sum(float(loss[count - 1]) for loss, count in zip(losses, pages, strict=True))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("total", "floor"), [(9, 1), (12, 3), (20, 2), (24, 1)])
def test_sharing_out_loses_least_of_all_ways_to_do_it(seed: int, total: int, floor: int) -> None:
    losses = random_losses(3, 8, seed, is_even=True)
    ways = itertools.product(range(floor, 9), repeat=3)
    least = min(lost(losses, way) for way in ways if sum(way) == total)
    found = share_out(losses, total, floor)
    assert sum(found) == total
    assert min(found) >= floor
    assert lost(losses, found) == pytest.approx(least, abs=1e-12)


def test_a_jump_behind_pages_that_save_little_is_seen() -> None:
    slow = np.array([0.9, 0.88, 0.86, 0.1, 0.05, 0.0])
    steady = np.array([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert share_out([slow, steady], 5, 1) == [4, 1]
    # With too few pages to reach it, they go where they save something.
    assert share_out([slow, steady], 4, 1) == [1, 3]


@pytest.mark.parametrize("seed", range(5))
def test_no_more_pages_are_given_than_there_are(seed: int) -> None:
    losses = random_losses(3, 5, seed, is_even=False)
    assert share_out(losses, 100, 2) == [5, 5, 5]
    assert sum(share_out(losses, 12, 2)) == 12


def missed_by_position(attention: torch.Tensor, num_kv: int) -> list[float]:
    """Return what is missed beside the first page and the newest; attention (Hq, length)."""
    num_pages = -(-attention.shape[1] // PAGE)
    order = [0, *range(num_pages - 1, 0, -1)]
    missed = []
    for count in range(1, num_pages + 1):
        read = sum(
            float(weight)
            for head in attention
            for place, weight in enumerate(head)
            if place // PAGE in order[:count]
        )
        missed.append(1 - read / len(attention))
    return missed


def test_what_is_missed_is_attention_of_the_plain_model(saved: tuple[Any, Any]) -> None:
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
    losses = [missed_by_position(layer[0, :, 60], 2) for layer in out.attentions]
    assert found.missed_flat == pytest.approx(lost(losses, [3, 3, 3]) / 3, rel=SUMMED)
    assert (found.queries, found.least) == (1, "error")


def slow_losses(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, read: set[tuple[int, int]]
) -> tuple[float, float]:
    """Return missed attention and the output's error, head by head; query (Hkv, G, D)."""
    missed, error, square = 0.0, 0.0, 0.0
    for h, heads in enumerate(query):
        seen = [p for p in range(keys.shape[1]) if (h, p // PAGE) in read]
        for q in heads:
            logits = keys[h] @ q * 0.5
            whole = logits.softmax(dim=0) @ values[h]
            part = logits[seen].softmax(dim=0) @ values[h, seen] if seen else whole * 0
            missed += 1 - float(logits.softmax(dim=0)[seen].sum())
            error += float((part - whole).square().sum())
            square += float(whole.square().sum())
    return missed / query.shape[:2].numel(), error / square


@pytest.mark.parametrize("sinks", [0, 1])
def test_losses_are_those_of_reading_the_best_pages_in_order(sinks: int) -> None:
    stream = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 320, 8, generator=stream).unbind()
    # One head attends to few pages, the other to all alike.
    query = torch.randn(2, 3, 8, generator=stream) * torch.tensor([4.0, 0.1])[:, None, None]
    policy = SparsePolicy(tokens=80, recent_pages=2, sink_pages=sinks)
    cache: Any = SimpleNamespace(
        layers=[SimpleNamespace(keys=keys, values=values)], lengths={0: 300}
    )
    meter = LossMeter(policy, cache, 25)
    summary = PageSummaries().refresh(keys, 0, 301)
    scores = meter.scores(query, summary, 0, 0.5)
    assert torch.equal(scores, policy.predictor.scores(query, summary, 0, 0.5))
    shares = scores.softmax(-1).mean(1)
    kept = {*range(sinks), 17, 18}
    pairs = [(h, p) for h in (0, 1) for p in range(19)]
    pairs.sort(key=lambda pair: 2.0 if pair[1] in kept else float(shares[pair]), reverse=True)
    floor, losses = len(kept), meter.losses[0]
    # Sinks and recent pages have no order among themselves.
    for count in range(floor, 20):
        missed, error = slow_losses(
            query, keys[0, :, :301], values[0, :, :301], set(pairs[: 2 * count])
        )
        assert losses.missed[count - 1] == pytest.approx(missed, abs=SUMMED)
        assert losses.error[count - 1] == pytest.approx(error, abs=SUMMED)
    assert losses.error[floor - 1] > 0.1
    for loss in (losses.missed, losses.error):
        assert loss[18:] == pytest.approx(np.zeros(7), abs=SUMMED)
    before = losses.missed.copy()
    meter.scores(query, summary, 0, 0.5)
    assert losses.missed == pytest.approx(before, abs=SUMMED)
    assert losses.num_tokens == 2


def wide_first_layer() -> Any:
    """Return a target whose first layer attends to all tokens alike."""
    model = tiny.llama(max_position_embeddings=512)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    return model


def test_a_layer_that_attends_widely_gets_more_and_less_is_missed(saved: tuple[Any, Any]) -> None:
    found = calibrate_budgets(wide_first_layer(), saved[1], None, POLICY, least="missed", **SIZES)
    wide, *sharp = found.factors
    assert wide > max(sharp)
    assert min(found.factors) >= 3 * PAGE / 80
    assert sum(found.factors) == pytest.approx(3, rel=1e-12)
    assert 0 <= found.missed < found.missed_flat < 1


def test_what_is_made_least_is_no_more_than_with_one_budget_for_all(
    saved: tuple[Any, Any],
) -> None:
    model, tokenizer = wide_first_layer(), saved[1]
    error, missed = (
        calibrate_budgets(model, tokenizer, None, POLICY, least=least, **SIZES)
        for least in ("error", "missed")
    )
    assert (error.error_flat, error.missed_flat) == (missed.error_flat, missed.missed_flat)
    assert 0 < error.error <= min(missed.error, error.error_flat)
    assert 0 < missed.missed <= min(error.missed, error.missed_flat)


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
    found = calibrate_budgets(wide_first_layer(), saved[1], None, policy, least="missed", **SIZES)
    assert found.factors[1] == 1
    assert found.factors[0] > 1 > found.factors[2]
    gemma = tiny.gemma3()
    assert calibrate_budgets(gemma, saved[1], None, POLICY, **SIZES).factors == (1, 1, 1)


def test_budgets_of_the_policy_itself_do_not_change_what_is_measured(
    saved: tuple[Any, Any],
) -> None:
    model, tokenizer = saved
    plain = calibrate_budgets(model, tokenizer, None, POLICY, **SIZES)
    tight = POLICY.replace(budget=FlatBudget((0.1, 0.1, 0.1)))
    assert calibrate_budgets(model, tokenizer, None, tight, **SIZES) == plain


FOUND = LayerBudgets((0.5, 1.0 / 3, 2.0), 2048, 8192, 64, "error", 0.02, 0.01, 0.05, 0.04)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    FOUND.save(path)
    assert LayerBudgets.load(path) == FOUND


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}", '{"factors": [1.0]}', '{"factors": "abc"}',
        json.dumps({**FOUND.to_dict(), "factors": [-1.0]}),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "budgets.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"budgets|factors"):
        LayerBudgets.load(path)


def test_factors_go_to_either_budget_and_to_a_model_of_their_size(saved: tuple[Any, Any]) -> None:
    model, calm = saved[0], StepSignals(entropy=0.0, steps=99)
    boosted = SparsePolicy(budget=BoostedBudget(boost=4.0))
    for base, factor in (("fast", 1), (POLICY, 1), (boosted, 4)):
        budget = FOUND.policy(base, model).budget
        assert budget.factor(2, calm) == 2.0
        assert budget.factor(2, StepSignals(was_rejected=True, steps=99)) == 2.0 * factor
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
        ({"least": "mass"}, "missed"),
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
