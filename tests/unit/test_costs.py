"""What forwards and drafts cost is learned from them, and borrowed where it was not measured."""

from __future__ import annotations

import pickle

import pytest

from dspark_hf.verification.costs import KEPT, RATIOS_JUDGED, StepCosts
from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.profile import StepSeconds


def test_costs_are_one_before_anything_was_measured() -> None:
    costs = StepCosts()
    assert costs.predict(1, 0) == costs.predict(9, 5000) == 1.0


def test_a_cost_is_the_median_of_the_latest_observations() -> None:
    costs = StepCosts()
    for seconds in (5.0, 5.0, 900.0):
        costs.observe(3, 100, seconds)
    assert costs.predict(3, 100) == 5.0
    for _ in range(KEPT):
        costs.observe(3, 100, 2.0)
    assert costs.predict(3, 100) == 2.0


def test_a_width_between_two_measured_ones_is_interpolated() -> None:
    costs = StepCosts()
    costs.observe(2, 100, 4.0)
    costs.observe(6, 100, 8.0)
    assert costs.predict(3, 100) == pytest.approx(5.0)
    assert costs.predict(5, 100) == pytest.approx(7.0)


def test_a_width_outside_the_measured_ones_is_assumed_to_cost_little_more() -> None:
    costs = StepCosts()
    costs.observe(2, 100, 4.0)
    costs.observe(6, 100, 8.0)
    assert costs.predict(1, 100) == 4.0
    assert 8.0 < costs.predict(10, 100) < 8.0 * 1.1


def test_wide_forwards_of_about_the_same_width_share_a_measurement() -> None:
    costs = StepCosts()
    costs.observe(34, 100, 7.0)
    assert costs.predict(40, 100) == costs.predict(33, 100) == 7.0
    assert costs.predict(41, 100) != 7.0


def test_a_context_without_any_width_borrows_from_the_nearest_context() -> None:
    costs = StepCosts()
    costs.observe(4, 100, 3.0)
    costs.observe(4, 40_000, 30.0)
    assert costs.predict(4, 700) == 3.0
    assert costs.predict(4, 30_000) == 30.0


def test_a_borrowed_width_is_scaled_by_one_that_both_contexts_have() -> None:
    costs = StepCosts()
    costs.observe(1, 100, 2.0)
    costs.observe(5, 100, 3.0)
    costs.observe(1, 5000, 20.0)
    # Growing context must not look like growing width: 3 / 2 as long as one token, here too.
    assert costs.predict(5, 5000) == pytest.approx(30.0)


def test_costs_survive_pickling() -> None:
    costs = StepCosts()
    costs.observe(2, 100, 4.0)
    arrived = pickle.loads(pickle.dumps(costs))  # noqa: S301 - our own bytes
    assert arrived.predict(2, 100) == 4.0


def test_rows_of_one_token_and_one_row_of_tokens_are_different_costs() -> None:
    costs = StepCosts()
    costs.observe(8, 100, 1.2, num_rows=1)
    costs.observe(8, 100, 2.2, num_rows=8)
    assert costs.predict(8, 100, 1) == 1.2
    assert costs.predict(8, 100, 8) == 2.2


def test_another_number_of_rows_borrows_the_shape_and_keeps_its_own_level() -> None:
    costs = StepCosts()
    for width, seconds in {1: 1.0, 2: 1.6, 4: 1.7, 8: 2.0}.items():
        costs.observe(width, 100, seconds)
    assert costs.predict(2, 100, 2) == 1.6
    costs.observe(2, 100, 3.2, num_rows=2)
    assert costs.predict(8, 100, 2) == pytest.approx(3.2 * 2.0 / 1.6)
    assert costs.predict(6, 100, 2) == pytest.approx(3.2 * 1.85 / 1.6)


def test_a_row_that_leaves_does_not_make_width_look_free() -> None:
    costs = StepCosts()
    for width in range(4, 21):
        costs.observe(width, 100, float(width), num_rows=4)
    costs.observe(3, 100, 3.0, num_rows=3)
    costs.observe(4, 100, 4.0, num_rows=3)
    assert costs.predict(12, 100, 3) == pytest.approx(12.0)


def test_one_slow_forward_of_a_width_counts_half_until_there_is_another() -> None:
    costs = StepCosts()
    for width in (1, 1, 3, 3):
        costs.observe(width, 100, 1.0)
    costs.observe(2, 100, 2.0)
    assert costs.predict(2, 100) == pytest.approx(1.5)
    costs.observe(2, 100, 2.0)
    assert costs.predict(2, 100) == 2.0


def test_one_fast_forward_of_a_width_counts_in_full() -> None:
    costs = StepCosts()
    for width in (1, 1, 3, 3):
        costs.observe(width, 100, 1.0)
    costs.observe(2, 100, 0.8)
    assert costs.predict(2, 100) == 0.8


def test_more_rows_than_a_few_share_cells() -> None:
    costs = StepCosts()
    costs.observe(16, 100, 5.0, num_rows=5)
    assert costs.predict(16, 100, 8) == 5.0
    costs.observe(16, 100, 9.0, num_rows=9)
    assert costs.predict(16, 100, 8) == 5.0


def test_a_drafters_cost_scales_with_the_length() -> None:
    costs = DraftCosts()
    assert not costs.is_known
    assert costs.predict(3) == 0.0
    costs.observe(4, 2.0)
    assert costs.is_known
    assert costs.predict(8) == 4.0
    assert costs.predict(0) == 0.0


def test_a_block_costs_the_same_however_little_of_it_is_wanted() -> None:
    costs = DraftCosts(block_size=7)
    costs.observe(7, 2.0)
    costs.observe(3, 2.0)
    assert costs.predict(1) == costs.predict(7) == 2.0


def test_a_block_that_grows_is_timed_at_two_lengths_and_read_between_them() -> None:
    costs, asked = DraftCosts(block_size=7, grows=True), []
    while length := costs.probe(8):
        asked.append(length)
        costs.observe(length, 6.0 + 0.2 * length)
    assert asked == [7, 7, 2, 2]
    assert costs.predict(4) == pytest.approx(6.8)
    assert costs.predict(7) == costs.predict(8) == pytest.approx(7.4)
    assert costs.predict(1) == costs.predict(2) == pytest.approx(6.4)
    # A text that ends asks for no further trials.
    assert [costs.probe(n) for n in (6, 3, 1, 0)] == [0, 0, 0, 0]


def test_a_short_text_tries_what_there_is_room_for() -> None:
    costs = DraftCosts(block_size=7, grows=True)
    assert [costs.probe(n) for n in (0, 1, 5)] == [0, 1, 5]
    costs.observe(1, 1.0)
    costs.observe(1, 1.0)
    assert costs.probe(1) == 1
    assert costs.probe(5) == 2


def test_a_round_without_drafts_is_asked_for_a_few_times_and_only_after_wide_ones() -> None:
    costs, asked = StepCosts(), 0
    for _ in range(100):
        is_plain = costs.needs_plain(2, 100)
        asked += is_plain
        costs.observe(2 if is_plain else 6, 100, 1.0, num_rows=2)
    assert asked == 4
    assert not costs.needs_plain(1, 100)


PROFILE = [StepSeconds(1, n, 100, 1.0 + n / 10) for n in (1, 2, 4, 8)]


def test_a_profile_is_believed_before_anything_is_observed_and_fades_behind_what_is() -> None:
    costs = StepCosts()
    costs.seed(PROFILE)
    assert costs.predict(4, 100) == 1.4
    assert costs.predict(6, 100) == pytest.approx(1.6)
    for _ in range(KEPT):
        costs.observe(4, 100, 1.3)
    assert costs.predict(4, 100) == 1.3


def test_a_profile_of_plain_forwards_saves_rounds_without_drafts_where_it_was_measured() -> None:
    costs = StepCosts()
    costs.seed(PROFILE)
    for _ in range(200):
        costs.observe(4, 100, 1.2)
    assert not costs.needs_plain(1, 100)
    assert costs.needs_plain(1, 4000)


def test_a_cost_follows_what_was_observed_last_however_often_it_was_asked_for() -> None:
    costs = StepCosts()
    for _ in range(KEPT):
        costs.observe(4, 100, 1.0)
        assert costs.predict(4, 100) == 1.0
    for _ in range(KEPT):
        costs.observe(4, 100, 2.0)
        costs.predict(8, 4000)
    assert costs.predict(4, 100) == 2.0
    costs.seed(PROFILE)
    assert costs.predict(2, 100) == 1.2


def test_a_contradicted_profile_is_dropped_and_reported_once() -> None:
    costs, reports = StepCosts(), []
    costs.seed(PROFILE, lambda: reports.append("stale"))
    for _ in range(RATIOS_JUDGED * 3):
        costs.observe(2, 100, 1.2 * 1.7)
    assert reports == ["stale"]
    assert costs.predict(2, 100) == pytest.approx(1.2 * 1.7)
    # Nothing is left of it: width 8 is what the one observed width suggests.
    assert costs.predict(8, 100) == pytest.approx(1.2 * 1.7 * 1.06)


def test_stalls_do_not_contradict_a_profile() -> None:
    costs, reports = StepCosts(), []
    costs.seed(PROFILE, lambda: reports.append("stale"))
    for i in range(RATIOS_JUDGED * 6):
        costs.observe(2, 100, 30.0 if i % 3 == 0 else 1.3)
    assert not reports
    assert costs.predict(8, 100) == 1.8
