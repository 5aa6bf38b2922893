"""What a row's tokens count in a call that ends with its last row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drafters import RandomDrafter
from dspark_hf import DSparkForCausalLM, GenerationQueue
from dspark_hf.decode import LAG_POWER, lag_weights
from dspark_hf.verification.schedules.auto import CostAwareSchedule
from dspark_hf.verification.schedules.base import Draft, RowState, weighted
from dspark_hf.verification.schedules.confident import BudgetSchedule
from simulation import known
from tiny import VOCAB, llama, prompt


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


@pytest.mark.parametrize("make", [CostAwareSchedule, BudgetSchedule])
def test_a_row_that_lags_gets_the_drafts(make: Any) -> None:
    schedule = make(8, known(lambda width: 1 + 0.3 * (width - 2), num_rows=2))
    states = [RowState(0, 100, 8, weight=0.1), RowState(1, 100, 8, weight=1.9)]
    drafts = [Draft(3, 0, (0.9, 0.9, 0.9)), Draft(3, 0, (0.7, 0.7, 0.7))]
    schedule.observe_draft(3, 0.01)
    schedule.ask(states)
    lengths = schedule.cut(states, drafts)
    assert lengths[0] < lengths[1]


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


def test_a_batch_is_weighed_and_a_queue_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_weights(monkeypatch)
    model = DSparkForCausalLM.wrap(llama(), drafter=RandomDrafter(VOCAB))
    queue = GenerationQueue(model)
    with queue:
        handles = [queue.submit(prompt(n), max_new_tokens=n) for n in (8, 20)]
        for handle in handles:
            handle.result(timeout=60)
    assert found
    assert set(found) == {1.0}
