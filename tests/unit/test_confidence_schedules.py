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
