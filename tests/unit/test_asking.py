"""How much is asked for: the length that pays over drafts that may come together."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.schedules.asking import lengths_to_ask, rates_by_length
from dspark_hf.verification.schedules.base import Draft, RowState
from dspark_hf.verification.survival import SurvivalEstimates
from simulation import known, rows


def estimates_of(*drafts: tuple[float, ...]) -> SurvivalEstimates:
    """Estimates that have seen drafts with these confidences."""
    estimates = SurvivalEstimates()
    for told in drafts:
        estimates.note(0, Draft(len(told), 0, told))
    return estimates


def test_a_rate_counts_the_tokens_that_pay_and_the_drafting_of_all() -> None:
    # One draft of survivals 0.9 and 0.1; the second token is not worth its step.
    rates = rates_by_length(np.array([[[0.9, 0.1]]]), [1.0, 1.1, 1.5], [0.1, 0.2])
    assert rates == pytest.approx([1.9 / 1.2, 1.9 / 1.3])


def test_rates_are_those_of_counting_one_by_one() -> None:
    stream = np.random.default_rng(0)
    rounds = np.sort(stream.random((3, 4, 5)), axis=-1)[..., ::-1] * stream.random((1, 4, 1)) * 2
    rounds[:, 1, 2:] = 0
    steps = np.cumsum(stream.random(21) * 0.1).tolist()
    drafting = [0.1, 0.1, 0.2, 0.2, 0.3]
    expected = []
    for length, draft_s in enumerate(drafting, start=1):
        tokens = seconds = 0.0
        for drafts in rounds:
            ranked = sorted((s for row in drafts for s in row[:length]), reverse=True)
            tried = [(4 + sum(ranked[:n]), draft_s + steps[n]) for n in range(len(ranked) + 1)]
            found, took = max(tried, key=lambda pair: pair[0] / pair[1])
            tokens, seconds = tokens + found, seconds + took
        expected.append(tokens / seconds)
    assert rates_by_length(rounds, steps, drafting) == pytest.approx(expected)


def test_a_rate_is_over_all_rounds_and_not_a_mean_of_rates() -> None:
    rounds = np.array([[[1.0]], [[0.0]]])
    assert rates_by_length(rounds, [1.0, 1.5], [0.5]) == pytest.approx([3.0 / (2.0 + 1.5)])


def test_the_length_follows_what_drafting_and_verifying_cost() -> None:
    estimates = estimates_of(*[(0.8,) * 8] * 4)
    costs = known(lambda width: 1 + 0.01 * width)
    found = []
    for token_s in (0.0, 0.3, 2.0):
        drafting = DraftCosts(8, grows=True)
        for length in (2, 8):
            drafting.observe(length, token_s * length)
        found.extend(lengths_to_ask(rows(), [8], estimates, costs, drafting).lengths)
    assert found[0] == 8
    assert 1 <= found[1] < 8
    assert found[2] == 0


def test_rows_are_not_lucky_all_at_once() -> None:
    # Half of the drafts are good: a round has one good draft of two, and is worth 2 / 1.3.
    estimates = estimates_of(*[(0.99,), (0.01,)] * 8)
    costs = known(lambda width: 1.0 if width < 4 else 9.0, num_rows=2)
    drafting = DraftCosts(1)
    drafting.observe(1, 0.3)
    assert lengths_to_ask(rows(2), [1, 1], estimates, costs, drafting).lengths == [1, 1]
    assert lengths_to_ask(rows(2), [1, 1], estimates, costs, drafting, min_gain=1.3).lengths == [
        0,
        0,
    ]


def test_the_promise_is_what_the_best_length_brings_beyond_plain_decoding() -> None:
    costs = known(lambda width: 1.0 if width == 1 else 1.4)
    drafting = DraftCosts(2)
    drafting.observe(2, 0.1)
    good = lengths_to_ask(rows(), [2], estimates_of((0.8, 0.5)), costs, drafting)
    # 1 + 0.8 + 0.8 * 0.5 tokens in 1.4 + 0.1 seconds.
    assert good == ([2], pytest.approx(2.2 / 1.5 - 1))
    # Without any gain the best is a draft of which nothing is verified.
    assert lengths_to_ask(rows(), [2], estimates_of((0.1, 0.1)), costs, drafting) == (
        [0], pytest.approx(1 / 1.1 - 1),
    )  # fmt: skip


def test_a_row_without_room_is_not_counted() -> None:
    estimates = estimates_of((0.9,) * 4)
    costs = known(lambda width: 1 + 0.05 * width, num_rows=2)
    drafting = DraftCosts(4)
    drafting.observe(4, 0.8)
    both = lengths_to_ask(rows(2), [4, 4], estimates, costs, drafting).lengths
    one = lengths_to_ask(rows(2), [4, 0], estimates, costs, drafting, min_gain=1.5).lengths
    assert both == [4, 4]
    assert one == [0, 0]


def test_a_row_that_is_far_ahead_is_not_asked_for() -> None:
    estimates = estimates_of((0.9,) * 4)
    costs = known(lambda width: 1 + 0.2 * (width - 2), num_rows=2)
    drafting = DraftCosts(4)
    drafting.observe(4, 0.4, num_rows=1)
    drafting.observe(4, 0.8, num_rows=2)
    behind, ahead = RowState(0, 100, 8, left=90), RowState(1, 100, 8, left=30)
    asked = lengths_to_ask([ahead, behind], [4, 4], estimates, costs, drafting).lengths
    assert asked == [0, 4]
    assert all(lengths_to_ask([behind, behind], [4, 4], estimates, costs, drafting).lengths)


def test_rows_that_lag_alike_are_asked_for_together() -> None:
    estimates = estimates_of((0.9,) * 4)
    costs = known(lambda width: 1 + 0.02 * (width - 8), num_rows=8)
    drafting = DraftCosts(4)
    for count in (1, 2, 4, 8):
        drafting.observe(4, 0.1 * count, num_rows=count)
    states = [RowState(r, 100, 8, left=90 if r in (1, 6) else 40) for r in range(8)]
    asked = lengths_to_ask(states, [4] * 8, estimates, costs, drafting).lengths
    assert [r for r, length in enumerate(asked) if length] == [1, 6]
