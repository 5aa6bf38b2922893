"""Drafting is done where it pays and nowhere else.

The cost-aware schedule is driven through its protocol only, by a simulated target whose costs and
acceptance are known, so that what is tested is how it behaves and not how it computes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from drafters import RandomDrafter
from dspark_hf import DSparkForCausalLM
from dspark_hf.decode import Decoder
from dspark_hf.values import DraftRequest, Proposal
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.profile import StepSeconds
from dspark_hf.verification.schedules.accounts import (
    MOST_PROMISED,
    PATIENCE,
    START_CREDIT,
    Accounts,
)
from dspark_hf.verification.schedules.auto import CostAwareSchedule
from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState
from dspark_hf.verification.schedules.fixed import FixedSchedule
from harness import CONFIG, generate
from simulation import Simulation, nearly_flat, proportional
from tiny import VOCAB, llama, prompt


def cost_aware(*, may_pause: bool = True) -> CostAwareSchedule:
    return CostAwareSchedule(8, StepCosts(), may_pause=may_pause)


def test_drafting_stops_where_verifying_costs_more_than_it_saves() -> None:
    run = Simulation(cost_aware(), proportional, accept=lambda i, row: 0.4)
    run.run(400)
    assert run.share_verifying(100) < 0.1
    assert run.speed_up > 0.95


def test_drafting_stops_where_nothing_is_accepted_and_costs_little_in_all() -> None:
    run = Simulation(cost_aware(), lambda width: 1 + 0.1 * width, accept=lambda i, row: 0.0)
    run.run(400)
    assert run.share_verifying(100) < 0.1
    assert run.speed_up > 0.95


def test_a_slow_drafter_is_left_alone() -> None:
    run = Simulation(
        cost_aware(), nearly_flat, lambda i, row: 0.6, draft_s=lambda length: 0.9 * length
    )
    run.run(400)
    assert run.share_verifying(100) < 0.1
    assert run.speed_up > 0.9


def test_long_drafts_are_verified_where_verifying_is_cheap() -> None:
    run = Simulation(cost_aware(), nearly_flat, accept=lambda i, row: 0.9)
    run.run(200)
    assert run.share_verifying(20) > 0.95
    assert sum(lengths[0] for lengths in run.verified[20:]) / 180 > 5
    assert run.speed_up > 3


def test_a_paused_schedule_tries_again_when_the_text_changes() -> None:
    run = Simulation(
        cost_aware(), lambda width: 1 + 0.1 * width, accept=lambda i, row: 0.0 if i < 300 else 0.95
    )
    run.run(300)
    assert run.share_verifying(150) < 0.1
    run.run(500)
    assert run.share_verifying(700) > 0.8


def test_a_small_gain_of_many_rows_is_taken() -> None:
    # One in two is accepted for a third of a token's time: eight rows' luck must not pause it.
    run = Simulation(
        cost_aware(), lambda width: 1 + 0.2 * (width - 8) / 8,
        accept=lambda i, row: 0.5, draft_s=lambda length: 0.1, num_rows=8,
    )  # fmt: skip
    run.run(600)
    assert run.share_verifying(100) > 0.9
    assert run.speed_up > 1.1


def test_a_pause_with_many_rows_is_none_with_one() -> None:
    schedule = cost_aware()
    many = Simulation(schedule, proportional, accept=lambda i, row: 0.5, num_rows=8)
    many.run(200)
    assert many.share_verifying(100) < 0.1
    for _ in range(4):
        schedule._accounts_of(8).settle(0, 0.0, 1.0)
    assert schedule._accounts_of(8).is_paused(0)
    assert not schedule._accounts_of(1).is_paused(0)
    one = Simulation(schedule, nearly_flat, accept=lambda i, row: 0.5)
    one.run(20)
    assert one.share_verifying() > 0.8


def test_a_profile_of_short_contexts_does_not_hide_that_long_ones_cost_more() -> None:
    # In the profile width is nearly free; at this context two tokens cost as much as three steps.
    costs = StepCosts()
    costs.seed([StepSeconds(1, width, 256, nearly_flat(width)) for width in (1, 2, 4, 8, 16)])
    run = Simulation(
        CostAwareSchedule(8, costs), lambda width: 1.0 if width == 1 else 3.0,
        accept=lambda i, row: 0.3, context=4000,
    )  # fmt: skip
    run.run(1500)
    assert run.speed_up > 0.95


def test_drafts_of_the_row_that_lags_count_as_they_are_weighed() -> None:
    # Only the last row's drafts are worth their time; seven rows that gain nothing by theirs
    # must not make them look like a loss.
    left = [200, *[100] * 7]
    run = Simulation(
        cost_aware(), lambda width: 1 + 0.15 * (width - 8), accept=lambda i, row: 0.5,
        num_rows=8, left=left,
    )  # fmt: skip
    run.run(300)
    assert run.share_verifying(50) > 0.9
    assert all(not any(lengths[1:]) for lengths in run.verified[50:])


def test_after_wins_as_many_losing_rounds_pause_one_draft_among_many_rows() -> None:
    accounts = Accounts()
    streaks = []
    for num_rows in (1, 8):
        for _ in range(50):
            accounts.settle(num_rows, 4.0 / num_rows, 0.5 / num_rows)
        lost = 0
        while not accounts.is_paused(num_rows):
            accounts.settle(num_rows, 0.0, 0.5)
            lost += 1
        streaks.append(lost)
    assert streaks[0] == streaks[1] <= 8


def on_stairs(seed: int, *, may_pause: bool = True, truth: float = 1.0) -> Simulation:
    """Four tokens at half a step more; two tokens in five are very likely right."""
    schedule = CostAwareSchedule(4, StepCosts(), DraftCosts(4), may_pause=may_pause)
    return Simulation(
        schedule, lambda width: 1.0 if width == 1 else 1.46, draft_s=lambda length: 0.2,
        states=lambda stream: 0.95 if stream.random() < 0.4 else 0.45,
        truth=lambda stated: truth * stated, stream=random.Random(seed),  # noqa: S311
    )  # fmt: skip


def test_bad_luck_does_not_pause_drafts_that_pay() -> None:
    gains = []
    for seed in range(6):
        paused, unpaused = on_stairs(seed), on_stairs(seed, may_pause=False)
        paused.run(1200)
        unpaused.run(1200)
        gains.append(paused.speed_up / unpaused.speed_up)
    assert min(gains) > 0.9
    assert sum(gains) / len(gains) > 0.98


def test_confidences_that_mislead_are_found_out_and_cost_little() -> None:
    run = on_stairs(0, truth=0.0)
    run.run(100)
    # Eight drafts, once in the life of a model.
    assert run.speed_up > 0.93
    run.run(1100)
    assert run.speed_up > 0.97


def test_a_promise_lets_a_signal_owe_more_and_earn_sooner() -> None:
    accounts = Accounts()
    accounts.settle(1, 0.0, START_CREDIT + 1.0)
    assert accounts.is_paused(1)
    assert accounts.is_paused(1, promise=0.05)
    assert not accounts.is_paused(1, promise=0.1)
    accounts.settle(1, 0.0, PATIENCE * MOST_PROMISED)
    assert accounts.is_paused(1, promise=9.0), "what is promised is believed up to a bound"
    waits = []
    for promise in (0.0, 0.1):
        accounts = Accounts()
        accounts.settle(1, 0.0, START_CREDIT + 1.0)
        waits.append(0)
        while accounts.is_paused(1):
            accounts.refill({1}, promise)
            waits[-1] += 1
    assert waits[1] < 0.7 * waits[0]


def test_a_schedule_that_may_not_pause_always_verifies_something() -> None:
    run = Simulation(cost_aware(may_pause=False), proportional, accept=lambda i, row: 0.0)
    run.run(100)
    assert run.share_verifying() == 1.0


def test_the_row_whose_drafts_are_accepted_gets_the_longer_ones() -> None:
    run = Simulation(
        cost_aware(),
        lambda width: 1 + 0.12 * width,
        accept=lambda i, row: 0.95 if row == 0 else 0.02,
        num_rows=2,
        signal=lambda row: row,
    )
    run.run(300)
    good, bad = (sum(lengths[row] for lengths in run.verified[100:]) for row in (0, 1))
    assert good > 5 * bad


@pytest.mark.parametrize("may_pause", [False, True])
def test_no_schedule_verifies_more_than_was_drafted_or_than_there_is_room_for(
    may_pause: bool,
) -> None:
    stream = random.Random(3)  # noqa: S311 - not for secrets
    for schedule in (FixedSchedule(5), cost_aware(may_pause=may_pause)):
        for round_number in range(300):
            rows = [
                RowState(row, stream.randrange(5000), stream.randrange(8))
                for row in stream.sample(range(9), stream.randint(1, 5))
            ]
            asked = schedule.ask(rows)
            assert all(0 <= n <= row.room for n, row in zip(asked, rows, strict=True))
            drafted = [stream.randint(0, n) for n in asked]
            signals = [stream.randrange(8) for _ in rows]
            lengths = schedule.cut(rows, list(map(Draft, drafted, signals)))
            assert all(0 <= n <= most for n, most in zip(lengths, drafted, strict=True))
            outcomes = [
                RowOutcome(row.row_id, signal, length, stream.randint(0, length))
                for row, signal, length in zip(rows, signals, lengths, strict=True)
            ]
            width = len(rows) + sum(lengths)
            schedule.observe(outcomes, width, sum(r.context for r in rows), stream.random())
            schedule.observe_draft(max(drafted), stream.random() / 10)
            schedule.free(round_number % 9)


def test_a_fixed_schedule_asks_for_its_length_where_there_is_room() -> None:
    schedule = FixedSchedule(5)
    rows = [RowState(0, 10, 9), RowState(1, 10, 2), RowState(2, 10, 0)]
    assert schedule.ask(rows) == [5, 2, 0]
    assert schedule.cut(rows, [Draft(4), Draft(2, 3), Draft(0)]) == [4, 2, 0]


@dataclass
class Spy:
    """A fixed schedule that keeps everything it was asked before the first outcome."""

    inner: FixedSchedule = field(default_factory=lambda: FixedSchedule(4))
    seen: list[Any] = field(default_factory=list)

    def ask(self, rows: Any) -> list[int]:
        self.seen.append([(row.context, row.room) for row in rows])
        return self.inner.ask(rows)

    def cut(self, rows: Any, drafts: Any) -> list[int]:
        self.seen.append(([(r.context, r.room) for r in rows], list(drafts)))
        return self.inner.cut(rows, drafts)

    def observe(self, *args: Any) -> None:
        self.seen.append("outcome")

    def observe_draft(self, *args: Any) -> None:
        pass

    def free(self, row_id: int) -> None:
        pass


@dataclass(frozen=True)
class Signalling(RandomDrafter):
    """Random tokens with a signal that says how long the text is."""

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Propose with a signal."""
        return Proposal(super().propose_row(request).ids, signal=len(request.ids) % 5)


def test_a_schedule_never_sees_the_drafted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    spies = []

    def spied(self: Decoder, rows: Any) -> None:
        if not isinstance(self.schedule, Spy):
            self.schedule = Spy()
            spies.append(self.schedule)
        start(self, rows)

    start = Decoder.start
    monkeypatch.setattr(Decoder, "start", spied)
    prompts = [prompt(9, seed=2), prompt(14, seed=3)]
    for seed in (0, 1):
        model = DSparkForCausalLM.wrap(llama(), drafter=Signalling(VOCAB, seed=seed), config=CONFIG)
        generate(model, prompts, max_new_tokens=8)
    first, second = (spy.seen[: spy.seen.index("outcome")] for spy in spies)
    assert first == second
    assert first[1][1] == [Draft(4, 0), Draft(4, 0)]
