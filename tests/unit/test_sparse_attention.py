"""Attending to selected pages of one layer: summaries, selection, budgets, merging.

Regimes: all kinds of grouped heads with a head size that is no power of two; steps of one and
several tokens; pages cut by the row's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import (
    PRESETS,
    BoostedBudget,
    FlatBudget,
    SparsePolicy,
    StepSignals,
)
from dspark_hf.attention.predictors import BoundPredictor, RecentPredictor, page_weights
from dspark_hf.attention.sparse import SparseRow, SparseStats, attend_pages, best_pages, merge
from dspark_hf.errors import ConfigError
from sparse_rows import ALL, EXACT, error

HEADS = [(4, 4), (4, 2), (4, 1), (6, 3)]
DIM = 24


def tensors(
    heads: tuple[int, int], length: int, width: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries (Hq, T, D) and keys and values (2, Hkv, positions, D); NaN beyond length."""
    stream = torch.Generator().manual_seed(seed)
    positions = (length // 64 + 1) * 64
    query = torch.randn(heads[0], width, DIM, generator=stream) * 2
    keys = torch.randn(2, heads[1], positions, DIM, generator=stream)
    values = torch.randn(2, heads[1], positions, DIM, generator=stream)
    for held in (keys, values):
        held[:, :, length:] = 0
    return query, keys, values


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int,
    policy: SparsePolicy, stats: SparseStats | None = None, summaries: PageSummaries | None = None,
) -> torch.Tensor:  # fmt: skip
    row = SparseRow(policy, stats or SparseStats(), 0)
    past = length - query.shape[1]
    return attend_pages(
        query, keys, values, summaries or PageSummaries(), row,
        slot=1, past=past, layer=0, scale=DIM**-0.5,
    )  # fmt: skip


def slowly_chosen(
    query: torch.Tensor, keys: torch.Tensor, length: int, policy: SparsePolicy
) -> set[tuple[int, int]]:
    """Return the (key head, page) pairs to read, head by head and page by page."""
    group, num_kv = query.shape[0] // keys.shape[1], keys.shape[1]
    length -= query.shape[1] - 1
    num_pages = -(-length // PAGE)
    ranked = []
    for h in range(num_kv):
        rows = query[h * group : (h + 1) * group, 0]
        scores = torch.zeros(len(rows), num_pages)
        for page in range(num_pages):
            held = keys[1, h, page * PAGE : min((page + 1) * PAGE, length)]
            middle = (held.max(0).values + held.min(0).values) / 2
            half = (held.max(0).values - held.min(0).values) / 2
            for r, q in enumerate(rows):
                scores[r, page] = DIM**-0.5 * (q @ middle + 0.5 * q.abs() @ half)
        shares = scores.softmax(dim=1).mean(dim=0)
        for page in range(num_pages):
            is_kept = page < policy.sink_pages or page >= num_pages - policy.recent_pages
            ranked.append((2.0 if is_kept else float(shares[page]), h, page))
    ranked.sort(reverse=True)
    return {(h, page) for _, h, page in ranked[: policy.tokens // PAGE * num_kv]}


def slowly_attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int,
    chosen: set[tuple[int, int]] | None,
) -> torch.Tensor:  # fmt: skip
    """Attend head by head, masked by true positions; to everything when nothing is chosen."""
    num_heads, width = query.shape[:2]
    group = num_heads // keys.shape[1]
    out = torch.zeros(width, num_heads, DIM)
    for head in range(num_heads):
        h = head // group
        for t in range(width):
            position = length - width + t
            logits = keys[1, h, : position + 1] @ query[head, t] * DIM**-0.5
            for j in range(position + 1):
                if chosen is not None and (h, j // PAGE) not in chosen:
                    logits[j] = float("-inf")
            out[t, head] = logits.softmax(dim=0) @ values[1, h, : position + 1]
    return out


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("length", "width"), [(160, 1), (150, 5), (161, 16)])
def test_half_the_pages_are_those_a_slow_reference_reads(
    heads: tuple[int, int], length: int, width: int
) -> None:
    query, keys, values = tensors(heads, length, width)
    policy = SparsePolicy(tokens=80, recent_pages=2, min_context=0)
    chosen = slowly_chosen(query, keys, length, policy)
    # A page that a later token begins is read as well.
    chosen |= {(h, (length - 1) // PAGE) for h in range(heads[1])}
    wanted = slowly_attended(query, keys, values, length, chosen)
    assert error(attend(query, keys, values, length, policy), wanted) < EXACT
    dense = slowly_attended(query, keys, values, length, None)
    assert error(wanted, dense) > 0.01


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_all_pages_are_dense_attention_for_grouped_heads(heads: tuple[int, int]) -> None:
    query, keys, values = tensors(heads, 83, 3)
    wanted = slowly_attended(query, keys, values, 83, None)
    assert error(attend(query, keys, values, 83, ALL), wanted) < EXACT


def test_statistics_add_up() -> None:
    query, keys, values = tensors((4, 2), 300, 1)
    stats = SparseStats()
    policy = SparsePolicy(tokens=96, recent_pages=2, min_context=0)
    for _ in range(3):
        attend(query, keys, values, 300, policy, stats)
    assert (stats.calls, stats.pages_read, stats.pages_held) == (3, 3 * 6 * 2, 3 * 19 * 2)
    assert (stats.mean_pages, stats.spread_pages, stats.extensions) == (6, 0, 0)
    assert stats.share == pytest.approx(6 / 19)


def test_asking_for_mass_reads_more_and_stops_at_the_ceiling() -> None:
    query, keys, values = tensors((4, 2), 640, 1)
    read = {}
    for mass in (None, 0.3, 0.7, 0.999, 1.0):
        stats = SparseStats()
        policy = SparsePolicy(tokens=64, recent_pages=2, mass=mass, most_tokens=320, min_context=0)
        out = attend(query, keys, values, 640, policy, stats)
        assert torch.isfinite(out).all()
        read[mass] = stats.mean_pages
        assert (stats.extensions > 0) == (stats.mean_pages > 4)
    assert read[None] == 4
    assert 4 <= read[0.3] <= read[0.7] <= read[0.999] == read[1.0] == 20
    assert read[0.7] > 4


def test_extending_gives_what_reading_at_once_gives() -> None:
    query, keys, values = tensors((6, 3), 640, 4)
    grown = SparsePolicy(tokens=64, recent_pages=2, mass=1.0, most_tokens=320, min_context=0)
    once = SparsePolicy(tokens=320, recent_pages=2, min_context=0)
    found = [attend(query, keys, values, 640, policy) for policy in (grown, once)]
    assert error(*found) < EXACT


def test_merging_two_halves_is_one_softmax() -> None:
    logits, values = torch.randn(3, 2, 40), torch.randn(3, 40, 8)
    logits[0, :, :13] = float("-inf")

    def part(span: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return logits[..., span].softmax(-1) @ values[:, span], logits[..., span].logsumexp(-1)

    out, total = merge(*part(slice(0, 13)), *part(slice(13, 40)))
    whole, whole_total = part(slice(0, 40))
    assert error(out, whole) < EXACT
    assert error(total, whole_total) < EXACT


@pytest.mark.parametrize("count", [6, 9, 40, 100])
def test_sinks_and_recents_come_first_however_little_they_weigh(count: int) -> None:
    weights = torch.rand(2, 20)
    weights[:, 0] = weights[:, -2:] = 0
    chosen = best_pages(weights, count, 1, 2).tolist()
    assert set(chosen[:6]) == {0, 18, 19, 20, 38, 39}
    assert len(set(chosen)) == min(count, 40)


def test_recent_pages_stay_in_order_over_very_long_contexts() -> None:
    scores = RecentPredictor().scores(torch.zeros(2, 3, 4), torch.zeros(2, 5000, 8), 0, 1.0)
    chosen = best_pages(page_weights(scores), 2 * 300, 1, 2)
    assert set(chosen.tolist()) == {
        h * 5000 + page for h in (0, 1) for page in (0, *range(4701, 5000))
    }


def test_at_alpha_one_no_key_scores_above_its_page() -> None:
    query, keys, _ = tensors((4, 2), 100, 1)
    summary = PageSummaries().refresh(keys, 1, 100)
    bound = BoundPredictor(alpha=1.0).scores(query.reshape(2, 2, DIM), summary, 0, 1.0)
    logits = query.reshape(2, 2, DIM) @ keys[1, :, :100].transpose(1, 2)
    for page in range(7):
        best = logits[..., page * PAGE : (page + 1) * PAGE].amax(-1)
        assert (best <= bound[..., page] + 1e-4).all()


@dataclass(frozen=True)
class FirstPages:
    """A predictor as a user may write it: older is better."""

    def scores(
        self,
        query: torch.Tensor,
        summary: torch.Tensor,
        layer: int,
        scale: float,
    ) -> torch.Tensor:
        return -torch.arange(summary.shape[1]).float().expand(*query.shape[:2], -1)


def test_a_predictor_of_the_users_own_chooses_the_pages() -> None:
    query, keys, values = tensors((4, 2), 320, 1)
    policy = SparsePolicy(tokens=96, recent_pages=2, min_context=0, predictor=FirstPages())
    chosen = {(h, page) for h in (0, 1) for page in (0, 1, 2, 3, 18, 19)}
    wanted = slowly_attended(query, keys, values, 320, chosen)
    assert error(attend(query, keys, values, 320, policy), wanted) < EXACT


def test_a_boosted_budget_grows_at_critical_steps_only() -> None:
    budget = BoostedBudget(boost=3.0, entropy=2.0, delimiters=frozenset({7}), by_layer=(1.0, 0.5))
    calm = StepSignals(entropy=1.0, token=3, steps=9)
    assert (budget.factor(0, calm), budget.factor(1, calm)) == (1.0, 0.5)
    for signals in (
        StepSignals(entropy=2.5, token=3, steps=9),
        StepSignals(entropy=1.0, token=7, steps=9),
        StepSignals(entropy=1.0, token=3, steps=3),
        StepSignals(entropy=1.0, token=3, steps=9, was_rejected=True),
    ):
        assert (budget.factor(0, signals), budget.factor(1, signals)) == (3.0, 1.5)
    unmoved = BoostedBudget(boost=3.0, entropy=None, after_rejection=False)
    assert budget.needs_entropy
    assert not unmoved.needs_entropy
    assert unmoved.factor(0, StepSignals(entropy=9.0, steps=9, was_rejected=True)) == 1.0
    assert FlatBudget((0.25, 2.0)).factor(1, calm) == 2.0


def test_fast_reads_twice_as_much_where_an_answer_begins() -> None:
    query, keys, values = tensors((4, 2), 4096, 1)
    read = []
    for steps in (0, 15, 16):
        row = SparseRow(PRESETS["fast"], SparseStats(), 0, StepSignals(steps=steps))
        attend_pages(
            query, keys, values, PageSummaries(), row, slot=0, past=4095, layer=0, scale=0.3
        )
        read.append(row.stats.mean_pages)
    assert read == [128, 128, 64]


@pytest.mark.parametrize(
    "values",
    [{"recent_pages": 1}, {"sink_pages": -1}, {"tokens": 64}, {"mass": 0.0}, {"most_tokens": 100}],
    ids=str,
)
def test_policies_that_cannot_be_honoured_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        SparsePolicy(**values)
