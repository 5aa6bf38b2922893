"""The budgeted schedule: what it asks for, how many tokens it verifies, and when it rests."""

from __future__ import annotations

import itertools
import random

import pytest

from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.schedules.accounts import PROBE_TOKENS
from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState
from dspark_hf.verification.schedules.confident import BudgetSchedule
from simulation import Simulation, known, rows


def test_a_budget_follows_from_drafts_up_to_the_one_before_last() -> None:
    costs = known(lambda width: 1 + 0.3 * (width - 1))
    schedule = BudgetSchedule(8, costs)
    good, bad = (0.95,) * 5, (0.05,) * 5
    for _ in range(6):
        # Probes have failed often enough to stay away.
        schedule.probes.observe([RowOutcome(9, 0, 1, 0)])
    lengths = []
    for told in (good, good, bad, bad, *[bad] * 9, good, good):
        schedule.ask(rows())
        (length,) = schedule.cut(rows(), [Draft(5, 0, told, is_drawn=True)])
        lengths.append(length)
    assert lengths[2:4] == [5, 5], "all good up to the one before last"
    assert lengths[11:13] == [0, 0], "all bad, whatever the current one says"
    assert lengths[13:] == [0, 0], "a good draft is two rounds from counting"


def test_one_bad_draft_moves_a_budget_little() -> None:
    schedule = BudgetSchedule(8, known(lambda width: 1 + 0.1 * (width - 1)))
    lengths = []
    for told in (*[(0.9,) * 5] * 8, (0.05,) * 5, *[(0.9,) * 5] * 4):
        schedule.ask(rows())
        lengths += schedule.cut(rows(), [Draft(5, 0, told, is_drawn=True)])
    assert set(lengths[2:]) == {5}


def test_the_budget_of_an_exempt_draft_follows_from_its_own_confidences() -> None:
    schedule = BudgetSchedule(8, known(lambda width: 1 + 0.1 * (width - 1)))
    lengths = []
    for told in (*[(0.9,) * 5] * 8, (0.9, 0.05, 0.9, 0.9, 0.9), (0.9,) * 5):
        schedule.ask(rows())
        lengths += schedule.cut(rows(), [Draft(5, 0, told)])
    assert lengths == [5] * 8 + [1, 5]


def budget() -> BudgetSchedule:
    return BudgetSchedule(8, StepCosts(), DraftCosts())


def ask_and_cut(schedule: BudgetSchedule, told: float) -> int:
    """Draft what is asked for, every token with this confidence; return how much it was."""
    (asked,) = schedule.ask(rows())
    if asked:
        schedule.observe_draft(asked, 0.01 * asked)
    schedule.cut(rows(), [Draft(asked, 0, (told,) * asked)])
    return asked


def test_a_budget_asks_for_little_more_than_it_verifies_and_grows_again() -> None:
    schedule = BudgetSchedule(8, known(lambda width: 1 + 0.2 * (width - 1)))
    assert [ask_and_cut(schedule, 0.45) for _ in range(30)][-1] <= 3
    assert [ask_and_cut(schedule, 0.99) for _ in range(60)][-1] == 8


def test_a_budget_that_buys_nothing_drafts_ever_more_seldom_and_comes_back() -> None:
    schedule = BudgetSchedule(8, known(lambda width: 0.6 + 0.4 * width))
    for _ in range(6):
        # Probes have failed often enough to stay away.
        schedule.probes.observe([RowOutcome(9, 0, 1, 0)])
    asked = [ask_and_cut(schedule, 0.1) for _ in range(200)]
    assert asked[0] == PROBE_TOKENS
    drafted = [i for i, length in enumerate(asked) if length]
    assert {asked[i] for i in drafted} == {PROBE_TOKENS}
    assert [after - before for before, after in itertools.pairwise(drafted)] == [8, 16, 32, 64, 64]
    # The latest drafts outvote the poor ones, one at a time until they do.
    asked = [ask_and_cut(schedule, 0.99) for _ in range(600)]
    assert asked[-1] >= 7


def test_a_budget_comes_back_to_a_drafter_that_states_nothing() -> None:
    run = Simulation(
        budget(), lambda width: 1 + 0.1 * (width - 1),
        accept=lambda i, row: 0.0 if i < 300 else 0.95, draft_s=lambda length: 0.1 * length,
    )  # fmt: skip
    run.run(300)
    assert run.share_verifying(200) < 0.1
    run.run(600)
    assert run.share_verifying(800) > 0.9


def test_confidences_that_misled_are_verified_again_and_trusted_again() -> None:
    # Steps of stairs: one draft token costs what four do, and alone it does not pay.
    run = Simulation(
        budget(), lambda width: 1.0 if width == 1 else 1.5, draft_s=lambda length: 0.05 * length,
        states=lambda stream: 0.8,
    )  # fmt: skip
    run.truth = lambda stated: 0.0
    run.run(300)
    assert run.share_verifying(200) < 0.1
    run.truth = lambda stated: stated
    run.run(1500)
    assert run.share_verifying(1500) > 0.9


def test_one_row_is_tried_for_all_the_one_with_most_to_go() -> None:
    schedule = BudgetSchedule(8, known(lambda width: 0.6 + 0.4 * width, num_rows=3))
    schedule.observe_draft(4, 200.0, 3)
    states = [RowState(r, 100, 8, left) for r, left in enumerate((40, 60, 40))]
    found = []
    for _ in range(20):
        asked = schedule.ask(states)
        drafts = [Draft(n, 0, (0.01,) * n, is_drawn=True) for n in asked]
        if any(asked):
            found.append((asked, schedule.cut(states, drafts)))
    assert found == [([0, PROBE_TOKENS, 0], [0, PROBE_TOKENS, 0])]


@pytest.mark.parametrize(("draft_s", "pays"), [(0.0, True), (0.1, True), (0.6, False)])
def test_a_budget_weighs_drafting_as_well(draft_s: float, pays: bool) -> None:
    run = Simulation(
        budget(), lambda width: 1 + 0.05 * (width - 1), draft_s=lambda _: draft_s,
        states=lambda _: 0.35,
    )  # fmt: skip
    run.run(400)
    assert (run.share_verifying(200) > 0.9) == pays
    assert run.speed_up > (1.05 if pays else 0.9)


def worth(length: int, token_s: float) -> float:
    """Return the tokens per second of rounds of so many drafts, in the next test."""
    draft_s = 0.6 + token_s * max(length, 2) if length else 0.0
    return sum(0.8**k for k in range(length + 1)) / (1 + 0.01 * (length + 1) + draft_s)


@pytest.mark.parametrize(("token_s", "expected"), [(0.0, 8), (0.3, 4), (0.6, 0)])
def test_a_budget_asks_for_the_length_that_drafting_and_verifying_are_worth(
    token_s: float, expected: int
) -> None:
    schedule = BudgetSchedule(8, known(lambda width: 1 + 0.01 * width), DraftCosts(8, grows=True))
    for length in (2, 8):
        schedule.observe_draft(length, 0.6 + token_s * length)
        schedule.observe_draft(length, 0.6 + token_s * length)
    schedule.ask(rows())
    schedule.cut(rows(), [Draft(8, 0, (0.8,) * 8)])
    schedule.observe([RowOutcome(0, 0, 1, 1, (0.8,))], 2, 100, None)
    assert schedule.ask(rows()) == [expected]
    assert expected == max(range(9), key=lambda n: worth(n, token_s))


def test_the_current_confidences_rank_what_the_budget_buys() -> None:
    schedule = BudgetSchedule(8, known(lambda width: 1 + 0.3 * (width - 2), num_rows=2))
    drafts = [Draft(3, 0, (0.9, 0.9, 0.1)), Draft(3, 0, (0.2, 0.2, 0.2))]
    swapped: list[int] = []
    for turn in (drafts, drafts, drafts, drafts[::-1]):
        schedule.ask(rows(2))
        first, swapped = swapped, schedule.cut(rows(2), turn)
    assert first[0] > first[1] and swapped == first[::-1]  # noqa: PT018 - one fact


def test_a_budget_survives_rows_that_join_and_leave() -> None:
    schedule, stream = budget(), random.Random(5)  # noqa: S311 - not for secrets
    for i in range(200):
        present = stream.sample(range(6), stream.randint(1, 4))
        states = [RowState(row, 100, 12) for row in present]
        drafts = [
            Draft(n, 0, tuple(stream.random() for _ in range(n)), is_drawn=True)
            for n in (stream.randint(0, 8) for _ in present)
        ]
        lengths = schedule.cut(states, drafts)
        assert all(0 <= n <= d.num_tokens for n, d in zip(lengths, drafts, strict=True))
        if i % 7 == 0:
            schedule.free(present[0])
    for row in range(6):
        schedule.free(row)
    assert not schedule._past
