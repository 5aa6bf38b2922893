"""Schedules of drafters that compute a whole block for any number of tokens."""

from __future__ import annotations

import pytest

from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.schedules.auto import CostAwareSchedule
from dspark_hf.verification.schedules.base import Draft, RowOutcome
from simulation import known, nearly_flat, proportional, rows


def block_schedule(costs: StepCosts, block_size: int = 7) -> CostAwareSchedule:
    return CostAwareSchedule(8, costs, DraftCosts(block_size))


@pytest.mark.parametrize("draft_s", [0.001, 0.4, 5.0])
def test_a_block_drafter_is_asked_for_a_whole_block_or_for_nothing(draft_s: float) -> None:
    schedule = block_schedule(known(nearly_flat))
    asked = {tuple(schedule.ask(rows()))}
    for i in range(300):
        lengths = schedule.ask(rows())
        asked.add(tuple(lengths))
        if any(lengths):
            schedule.observe_draft(7, draft_s)
        told = (0.8,) * min(7, lengths[0])
        (n,) = schedule.cut(rows(), [Draft(len(told), 0, told)])
        schedule.observe(
            [RowOutcome(0, 0, n, min(n, 1 + i % 5), told[:n])], 1 + n, 100, nearly_flat(1 + n)
        )
    assert asked <= {(8,), (0,)}
    assert ((0,) in asked) == (draft_s > 1)


def test_where_a_longer_part_costs_more_the_length_that_pays_is_asked_for() -> None:
    # Behind the first token one in five survives: the rest of a block is not worth its time.
    schedule = CostAwareSchedule(8, known(nearly_flat), DraftCosts(7, grows=True))
    asked = []
    for _ in range(60):
        (length,) = schedule.ask(rows())
        asked.append(length)
        if length:
            schedule.observe_draft(min(length, 7), 0.05 + 0.08 * min(length, 7))
        told = (0.75, *(0.2,) * 6)[: min(7, length)]
        (n,) = schedule.cut(rows(), [Draft(len(told), 0, told)])
        schedule.observe([RowOutcome(0, 0, n, min(n, 1), told[:n])], 1 + n, 100, nearly_flat(1 + n))
    assert asked[:4] == [7, 7, 2, 2]
    assert set(asked[-20:]) <= {1, 2}


def test_a_short_piece_of_a_block_is_worth_no_more_asking_than_its_cost() -> None:
    # Scaled by length a token of it would cost a seventh and seem to pay.
    schedule = block_schedule(known(proportional))
    for _ in range(3):
        schedule.observe_draft(7, 1.4)
    assert schedule.ask(rows()) == [0]


def test_a_block_pays_by_the_best_part_of_it() -> None:
    # Beyond four tokens verifying is dear; the block is asked for, and four of it are verified.
    schedule = block_schedule(known(lambda width: 1 + 0.02 * width + (3.0 if width > 5 else 0.0)))
    schedule.observe_draft(7, 0.1)
    assert schedule.ask(rows()) == [8]
    assert schedule.cut(rows(), [Draft(7, 0, (0.9,) * 7)]) == [4]
