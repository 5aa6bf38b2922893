"""What a row's tokens count in a call that ends with its last row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drafters import RandomDrafter, RightDrafter
from dspark_hf import DSparkForCausalLM, GenerationQueue
from dspark_hf.decode import LAG_POWER, lag_weights
from dspark_hf.verification.schedules.auto import CostAwareSchedule
from dspark_hf.verification.schedules.base import Draft, RowState, weighted
from dspark_hf.verification.schedules.confident import BudgetSchedule
from simulation import known
from tiny import VOCAB, llama, plain_generate, prompt


def row(length: int, limit: int | None) -> Any:
    criteria = SimpleNamespace(max_tokens=limit)
    return SimpleNamespace(ids=[1] * length, criteria=criteria)


def test_the_row_with_most_to_go_counts_most_and_all_count_one_on_average() -> None:
    weights = lag_weights([row(10, 50), row(30, 50), row(5, 45)])
    assert sum(weights) == pytest.approx(3)
    assert weights[0] == weights[2]
    assert weights[1] == pytest.approx(weights[0] * 0.5**LAG_POWER)


@pytest.mark.parametrize(
    "rows",
    [[row(10, 50)], [row(10, 50), row(20, 60)], [row(10, 50), row(30, None)], []],
    ids=["one row", "as much to go", "no limit", "none"],
)
def test_rows_of_which_none_is_known_to_lag_count_alike(rows: list[Any]) -> None:
    assert lag_weights(rows) == [1.0] * len(rows)


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("make", [CostAwareSchedule, BudgetSchedule])
def test_a_row_that_lags_gets_the_drafts(make: Any, is_drawn: bool) -> None:
    schedule = make(8, known(lambda width: 1 + 0.3 * (width - 2), num_rows=2))
    states = [RowState(0, 100, 8, weight=0.1), RowState(1, 100, 8, weight=1.9)]
    drafts = [
        Draft(3, 0, (0.9, 0.9, 0.9), is_drawn=is_drawn),
        Draft(3, 0, (0.7, 0.7, 0.7), is_drawn=is_drawn),
    ]
    schedule.observe_draft(3, 0.01)
    for _ in range(4):
        schedule.ask(states)
        lengths = schedule.cut(states, drafts)
    assert lengths[0] < lengths[1]


@pytest.mark.parametrize(("peers", "pays"), [(1, True), (16, False)])
def test_rows_that_are_waited_for_together_must_promise_more(peers: int, pays: bool) -> None:
    # A token promises 1.8 / 1.6 = 1.13 times plain decoding's speed.
    schedule = CostAwareSchedule(1, known(lambda width: 1 + 0.5 * (width - 1)))
    schedule.observe_draft(1, 0.1)
    states = [RowState(0, 100, 8, peers=peers)]
    schedule.estimates.note(0, Draft(1, 0, (0.8,)))
    assert schedule.ask(states) == [int(pays)]
    assert schedule.cut(states, [Draft(1, 0, (0.8,))]) == [int(pays)]


def test_weights_scale_what_a_token_brings() -> None:
    states = [RowState(0, 9, 4), RowState(1, 9, 4, weight=0.5)]
    assert weighted(states, [[0.9, 0.8], [0.6]]) == [[0.9, 0.8], [0.3]]


def seen_weights(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that fills with the weights schedules are shown."""
    found: list[float] = []
    ask = CostAwareSchedule.ask

    def noting(self: CostAwareSchedule, rows: list[RowState]) -> list[int]:
        found.extend(state.weight for state in rows)
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
