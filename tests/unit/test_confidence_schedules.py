"""Schedules decide by confidence: which tokens, how many, and what poor confidences may cost.

What is drafted and accepted is simulated, so that the worth of a confidence is known. That sampling
is not biased is shown in tests/lossless/test_schedule_enumeration.py.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable

import pytest

from dspark_hf.config import SCHEDULES, DSparkConfig
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.schedules.accounts import LATEST_PROBE, PROBE_TOKENS
from dspark_hf.verification.schedules.auto import CostAwareSchedule
from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState, Schedule
from dspark_hf.verification.schedules.build import build_schedule
from dspark_hf.verification.schedules.confident import (
    BudgetSchedule,
    PrefixSchedule,
    ThresholdSchedule,
)
from dspark_hf.verification.schedules.fixed import FixedSchedule
from dspark_hf.verification.schedules.selection import adaptive_lengths, best_lengths, frontier
from simulation import Simulation, known, nearly_flat, proportional, rows

CONFIDENT = ("threshold", "prefix", "budget", "auto")


def stairs(width: int) -> float:
    """One token is cheap, two cost far more, and up to eight cost no more than two."""
    return 1.0 if width == 1 else 1.66 if width <= 8 else 3.0


def gentle(width: int) -> float:
    return 1 + 0.1 * width


def named(name: str, costs: StepCosts | None = None, **settings: object) -> Schedule:
    config = DSparkConfig(schedule=name, max_draft_tokens=8, **settings)
    return build_schedule(config, costs or StepCosts())


def test_each_name_builds_its_schedule() -> None:
    kinds = [FixedSchedule, CostAwareSchedule, ThresholdSchedule, PrefixSchedule, BudgetSchedule]
    found = {type(named(name)) for name in SCHEDULES}
    assert found == set(kinds)


# The frontier and the two searches.


def test_the_frontier_descends_and_breaks_ties_by_position_and_then_by_row() -> None:
    offered = list(frontier([[0.5, 0.5, 0.2], [0.9, 0.5], [], [0.5]]))
    assert offered == [(1, 0.9), (0, 0.5), (3, 0.5), (0, 0.5), (1, 0.5), (0, 0.2)]


class Secret(list):
    """Survivals that may only be read as far as they have been revealed."""

    revealed = 1

    def __getitem__(self, k):
        assert k < self.revealed, "read ahead"
        return super().__getitem__(k)


def test_the_frontier_reads_a_survival_only_when_the_tokens_before_it_were_taken() -> None:
    secrets = [Secret([0.9, 0.8, 0.1]), Secret([0.5, 0.4])]
    offers, taken = frontier(secrets), [0, 0]
    for row, _ in offers:
        taken[row] += 1
        secrets[row].revealed = taken[row] + 1
    assert taken == [3, 2]


def test_a_global_search_looks_past_a_drop() -> None:
    def rate(tokens: float, count: int) -> float:
        return tokens / stairs(1 + count)

    assert best_lengths([[0.5, 0.4, 0.3]], rate) == [3]
    assert best_lengths([[0.2, 0.1, 0.1]], rate) == [0]
    assert best_lengths([[0.2, 0.1, 0.1]], rate, taken=[1]) == [3]


def test_an_adapted_plan_expects_of_hidden_tokens_what_past_rounds_had() -> None:
    def rate(tokens: float, count: int) -> float:
        return tokens / stairs(1 + count)

    draft = Draft(3, 0, (0.55, 0.1, 0.1), is_drawn=True)
    # By its own survivals the draft would be left alone; the plan cannot know the last two.
    assert adaptive_lengths([draft], [[0.55, 0.05, 0.005]], [[0.55, 0.5, 0.4]], rate) == [3]
    assert adaptive_lengths([draft], [[0.55, 0.05, 0.005]], [[0.55, 0.03, 0.0]], rate) == [0]
    exempt = Draft(3, 0, (0.55, 0.1, 0.1))
    assert adaptive_lengths([exempt], [[0.55, 0.05, 0.005]], [[0.55, 0.5, 0.4]], rate) == [0]


# Threshold.


def test_a_threshold_cuts_before_the_first_token_below_it() -> None:
    schedule = ThresholdSchedule(8, StepCosts(), 0.9)
    drafts = [Draft(4, 0, (0.95, 0.9, 0.89, 0.99)), Draft(2, 0, (0.5, 1.0)), Draft(0)]
    assert schedule.ask(rows(3)) == [8, 8, 8]
    assert schedule.cut(rows(3), drafts) == [2, 0, 0]


def test_a_threshold_of_nothing_verifies_everything() -> None:
    schedule = ThresholdSchedule(8, StepCosts(), 0.0)
    assert schedule.cut(rows(2), [Draft(3, 0, (0.1, 0.0, 0.5)), Draft(5)]) == [3, 5]


def test_what_a_threshold_means_does_not_shift_with_what_is_accepted() -> None:
    run = Simulation(
        named("threshold", confidence_threshold=0.8),
        nearly_flat,
        states=lambda stream: stream.choice([0.6, 0.9]),
        truth=lambda stated: 0.1,
    )
    run.run(300)
    assert run.share_verifying(200) == pytest.approx(0.5, abs=0.1)


# The prefix scheduler.


def test_the_prefix_scheduler_takes_tokens_while_expected_speed_grows() -> None:
    costs = known(lambda width: 1 + 0.4 * (width - 2), num_rows=2)
    schedule = PrefixSchedule(8, costs)
    drafts = [Draft(3, 0, (0.95, 0.9, 0.2)), Draft(3, 0, (0.6, 0.5, 0.9))]
    # (2, 1.0), then 2.95 / 1.4, 3.805 / 1.8: 2.107 and 2.114; 4.405 / 2.2 = 2.002 is a drop.
    assert schedule.cut(rows(2), drafts) == [2, 0]


def test_the_prefix_scheduler_stops_before_a_stair_and_the_budget_climbs_it() -> None:
    draft = [Draft(4, 0, (0.65, 0.9, 0.9, 0.9))]
    prefix, budget = PrefixSchedule(8, known(stairs)), BudgetSchedule(8, known(stairs))
    assert prefix.cut(rows(), draft) == [0]
    assert budget.cut(rows(), draft) == [4]


# The budgeted scheduler.


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
    assert all(asked[i] == 1 for i in drafted[1:])
    assert [after - before for before, after in itertools.pairwise(drafted)] == [8, 16, 32, 64, 64]
    # The latest drafts outvote the poor ones, one at a time until they do.
    asked = [ask_and_cut(schedule, 0.99) for _ in range(600)]
    assert asked[-1] >= 7


def test_a_budget_comes_back_to_a_drafter_that_states_nothing() -> None:
    run = Simulation(
        named("budget"), lambda width: 1 + 0.1 * (width - 1),
        accept=lambda i, row: 0.0 if i < 300 else 0.95, draft_s=lambda length: 0.1 * length,
    )  # fmt: skip
    run.run(300)
    assert run.share_verifying(200) < 0.1
    run.run(600)
    assert run.share_verifying(800) > 0.9


def test_what_drafting_took_makes_verifying_more_of_it_pay() -> None:
    # A third token promises less than the two before it a second, drafting left out.
    drafts, lengths = [Draft(3, 0, (0.9, 0.9, 0.3))], []
    for draft_s in (0.0, 2.0):
        schedule = CostAwareSchedule(3, known(lambda width: 1 + 0.25 * (width - 1)))
        schedule.observe_draft(3, draft_s)
        schedule.estimates.note(0, Draft(3, 0, (0.99, 0.99, 0.99)))
        assert schedule.ask(rows())[0] == 3
        lengths += schedule.cut(rows(), drafts)
    assert lengths == [2, 3]


@pytest.mark.parametrize(("draft_s", "pays"), [(0.0, True), (0.1, True), (0.6, False)])
def test_a_budget_weighs_drafting_as_well(draft_s: float, pays: bool) -> None:
    run = Simulation(
        named("budget"), lambda width: 1 + 0.05 * (width - 1), draft_s=lambda _: draft_s,
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
    schedule, stream = named("budget"), random.Random(5)  # noqa: S311 - not for secrets
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


# All of them.


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("with_confidences", [False, True])
def test_every_schedule_answers_within_bounds(name: str, with_confidences: bool) -> None:
    stream, schedule = random.Random(3), named(name)  # noqa: S311 - not for secrets
    for i in range(200):
        states = [
            RowState(row, stream.randrange(5000), stream.randrange(8))
            for row in stream.sample(range(9), stream.randint(1, 5))
        ]
        asked = schedule.ask(states)
        assert all(0 <= n <= row.room for n, row in zip(asked, states, strict=True))
        drafts = []
        for n in (stream.randint(0, n) for n in asked):
            told = tuple(stream.choice([0.0, 0.5, stream.random(), 1.0]) for _ in range(n))
            told = told if with_confidences and stream.random() < 0.9 else ()
            drafts.append(Draft(n, stream.randrange(3), told, is_drawn=stream.random() < 0.5))
        lengths = schedule.cut(states, drafts)
        assert all(0 <= n <= d.num_tokens for n, d in zip(lengths, drafts, strict=True))
        outcomes = [
            RowOutcome(row.row_id, d.signal, n, stream.randint(0, n), d.confidence[:n])
            for row, d, n in zip(states, drafts, lengths, strict=True)
        ]
        schedule.observe(outcomes, len(states) + sum(lengths), 500, stream.random())
        schedule.observe_draft(max(d.num_tokens for d in drafts), stream.random() / 10)
        schedule.free(i % 9)
    again = pickle.loads(pickle.dumps(schedule))  # noqa: S301 - our own bytes
    assert again.cut(rows(), [Draft(3)]) == copy.deepcopy(schedule).cut(rows(), [Draft(3)])


@pytest.mark.parametrize("name", CONFIDENT)
def test_every_schedule_works_with_a_drafter_that_states_nothing(name: str) -> None:
    good = Simulation(named(name), nearly_flat, accept=lambda i, row: 0.99)
    good.run(300)
    assert good.share_verifying(100) > 0.9
    assert good.speed_up > 2
    bad = Simulation(named(name), proportional, accept=lambda i, row: 0.02)
    bad.run(600)
    assert bad.share_verifying(100) < 0.15
    assert bad.speed_up > 0.85


def test_a_held_back_signal_is_probed_ever_more_seldom_while_probes_fail() -> None:
    schedule, probes = named("threshold"), []
    for i in range(5 * LATEST_PROBE):
        (length,) = schedule.cut(rows(), [Draft(8, 1)])
        probes += [i] if length else []
        assert length in (0, PROBE_TOKENS)
        schedule.observe([RowOutcome(0, 1, length, 0)], 1 + length, 100, 1.0)
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert gaps[:6] == [4, 8, 16, 32, 64, LATEST_PROBE]


@pytest.mark.parametrize("is_drawn", [False, True])
def test_confidences_that_tell_right_from_wrong_beat_none(is_drawn: bool) -> None:
    def states(stream: random.Random) -> float:
        return stream.choice([0.99, 0.99, 0.15])

    def slope(width: int) -> float:
        return 1 + 0.15 * (width - 1)

    runs = {}
    for name, told in {"with": states, "without": None}.items():
        run = Simulation(
            named("auto"), slope, accept=lambda i, row: 0.71, states=told, is_drawn=is_drawn
        )
        run.run(600)
        runs[name] = run.speed_up
    assert runs["with"] > 1.05 * runs["without"] > 1.05


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("curve", [proportional, stairs, gentle])
def test_an_overconfident_drafter_is_seen_through(
    curve: Callable[[int], float], is_drawn: bool
) -> None:
    run = Simulation(
        named("auto"),
        curve,
        states=lambda stream: stream.uniform(0.9, 1.0),
        truth=lambda stated: 0.03,
        is_drawn=is_drawn,
    )
    run.run(400)
    assert run.share_verifying(100) < 0.2
    assert run.speed_up > 0.95


def test_a_modest_drafter_is_seen_through_as_well() -> None:
    run = Simulation(
        named("auto"), nearly_flat, states=lambda stream: 0.2, truth=lambda stated: 0.95
    )
    run.run(400)
    assert run.share_verifying(150) > 0.9
    assert run.speed_up > 2.5


def test_a_slow_drafter_whose_drafts_are_not_worth_verifying_is_left_alone() -> None:
    run = Simulation(
        named("auto"),
        proportional,
        draft_s=lambda length: 0.2 * length,
        states=lambda stream: stream.uniform(0.0, 0.5),
        is_drawn=True,
    )
    run.run(600)
    assert run.share_verifying(100) < 0.1
    assert run.speed_up > 0.93


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_stair_is_climbed_where_it_pays(is_drawn: bool) -> None:
    run = Simulation(
        named("auto"), stairs, states=lambda stream: stream.uniform(0.8, 1.0), is_drawn=is_drawn
    )
    run.run(300)
    assert run.share_verifying(50) > 0.95
    assert run.speed_up > 1.8


def test_a_good_drafter_is_tried_again_after_it_was_bad() -> None:
    run = Simulation(
        named("auto"),
        nearly_flat,
        states=lambda stream: 0.9,
        truth=lambda stated: 0.0 if len(run.verified) < 300 else 0.9,
        is_drawn=True,
    )
    run.run(300)
    run.run(600)
    assert run.share_verifying(700) > 0.8
