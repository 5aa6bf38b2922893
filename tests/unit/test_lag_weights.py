"""What a row's tokens count in a call that ends with its last row."""

from __future__ import annotations

import random
from typing import Any

import pytest

from drafters import RandomDrafter, RightDrafter
from dspark_hf import DSparkForCausalLM, GenerationQueue
from dspark_hf.verification.schedules.auto import CostAwareSchedule
from dspark_hf.verification.schedules.base import Draft, RowState
from dspark_hf.verification.schedules.confident import BudgetSchedule
from dspark_hf.verification.schedules.lag import (
    LAG_POWER,
    lag_weights,
    tokens_gained,
    weighted,
)
from simulation import known
from tiny import VOCAB, llama, plain_generate, prompt


def rows(*left: int | None) -> list[RowState]:
    return [RowState(r, 100, 8, tokens) for r, tokens in enumerate(left)]


def test_the_row_with_most_to_go_counts_most_and_all_count_one_on_average() -> None:
    weights = lag_weights(rows(40, 20, 40))
    assert sum(weights) == pytest.approx(3)
    assert weights[0] == weights[2]
    assert weights[1] == pytest.approx(weights[0] * 0.5**LAG_POWER)


@pytest.mark.parametrize(
    "left", [[40], [40, 40], [40, None], []], ids=["one row", "as much to go", "no limit", "none"]
)
def test_rows_of_which_none_is_known_to_lag_count_alike(left: list[int | None]) -> None:
    assert lag_weights(rows(*left)) == [1.0] * len(left)


@pytest.mark.parametrize("left", [[40, 40, 40], [40, None, 7]], ids=["level", "not together"])
def test_rows_gain_what_a_mean_row_gains_where_none_lags(left: list[int | None]) -> None:
    assert tokens_gained(rows(*left), [3, 0, 3]) == pytest.approx(2.0, rel=0.2)


def test_what_a_row_ahead_gets_is_no_gain_and_the_last_rows_tokens_are() -> None:
    states = rows(60, 20)
    assert tokens_gained(states, [0, 6]) == pytest.approx(0.0, abs=0.01)
    assert tokens_gained(states, [6, 0]) == pytest.approx(6.0, abs=0.05)


@pytest.mark.parametrize(("luck", "bound"), [([0, 2, 2, 2], 10.0), ([0, 0, 0, 2], 7.0)])
def test_gains_of_a_call_add_up_to_the_rounds_it_saved(luck: list[int], bound: float) -> None:
    # Each row gets at most so many drafts accepted a round; the call ends with its last row.
    stream = random.Random(1)  # noqa: S311 - not for secrets
    left, total, naive, num_rounds = dict(enumerate([60] * 4)), 0.0, 0.0, 0
    while left:
        num_rounds += 1
        accepted = [stream.randint(0, luck[r]) for r in left]
        total += tokens_gained(rows(*left.values()), accepted)
        naive += sum(accepted) / len(accepted)
        left = {r: n - 1 - a for (r, n), a in zip(left.items(), accepted, strict=True)}
        left = {r: n for r, n in left.items() if n > 0}
    assert total == pytest.approx(60 - num_rounds, abs=bound)
    assert abs(total - (60 - num_rounds)) < abs(naive - (60 - num_rounds)) / 2


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("make", [CostAwareSchedule, BudgetSchedule])
def test_a_row_that_lags_gets_the_drafts(make: Any, is_drawn: bool) -> None:
    schedule = make(8, known(lambda width: 1 + 0.3 * (width - 2), num_rows=2))
    states = [RowState(0, 100, 8, left=30), RowState(1, 100, 8, left=50)]
    drafts = [
        Draft(3, 0, (0.9, 0.9, 0.9), is_drawn=is_drawn),
        Draft(3, 0, (0.7, 0.7, 0.7), is_drawn=is_drawn),
    ]
    schedule.observe_draft(3, 0.01)
    for _ in range(4):
        schedule.ask(states)
        lengths = schedule.cut(states, drafts)
    assert lengths[0] < lengths[1]


def test_weights_scale_what_a_token_brings() -> None:
    states = rows(40, 20)
    heavy, light = lag_weights(states)
    assert weighted(states, [[0.9, 0.8], [0.6]]) == [[heavy * 0.9, heavy * 0.8], [light * 0.6]]


def seen_weights(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that fills with the weights schedules are shown."""
    found: list[float] = []
    ask = CostAwareSchedule.ask

    def noting(self: CostAwareSchedule, rows: list[RowState]) -> list[int]:
        found.extend(lag_weights(rows))
        return ask(self, rows)

    monkeypatch.setattr(CostAwareSchedule, "ask", noting)
    return found


def test_the_rows_of_a_call_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_weights(monkeypatch)
    # Drafts are right for one row and there are none for the other: the rows come apart.
    model, prompts = llama(), [prompt(7, seed=1), prompt(7, seed=2)]
    known = plain_generate(model, [prompts[0]], max_new_tokens=24)[0].tolist()
    drafter = RightDrafter({tuple(prompts[0]): known})
    DSparkForCausalLM.wrap(model, drafter=drafter)
    plain_generate(model, prompts, max_new_tokens=24)
    assert max(found) > 1.0 > min(found)


def test_the_requests_of_a_queue_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_weights(monkeypatch)
    model = DSparkForCausalLM.wrap(llama(), drafter=RandomDrafter(VOCAB))
    with GenerationQueue(model) as queue:
        for handle in [queue.submit(prompt(n), max_new_tokens=n) for n in (8, 20)]:
            handle.result(timeout=60)
    assert found
    assert set(found) == {1.0}
