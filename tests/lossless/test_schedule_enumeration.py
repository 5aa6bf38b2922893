"""The real schedules keep sampling exact with confidences that tell of drafted tokens.

A confidence c_k here is an arbitrary function of the text before token k, drafted tokens included,
with ties, zeros and ones. Each schedule is brought into a state by a few rounds, and in that state
every draft of one row, and every pair of drafts of two rows, is expanded in float64. With memory:
a whole text of three tokens is expanded with the schedule's own memory on every branch. A control
calls the same drafts exempt, which lets the schedule look ahead, and must be caught.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from dspark_hf.config import DSparkConfig
from dspark_hf.verification.acceptance import acceptance_probability, residual_distribution
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.schedules import base
from dspark_hf.verification.schedules.base import RowOutcome, RowState, Schedule
from dspark_hf.verification.schedules.build import build_schedule
from enumeration import (
    BIASED,
    EXACT,
    HORIZON,
    Conditional,
    Text,
    deviation,
    emitted_distribution,
    honest,
    table,
)

STAIRS = {1: 1.0, 2: 1.9, 3: 1.95, 4: 2.0, 5: 2.6, 6: 2.65, 7: 2.7, 8: 2.7}
"""A staircase: two tokens cost far more than one, a third almost nothing."""
SLOPE = {n: 1 + 0.12 * n for n in range(1, 9)}
CLIFF = {1: 1.0, 2: 1.0, 3: 1.5, 4: 1.55, 5: 1.6, 6: 2.3, 7: 2.35, 8: 2.4}
CURVES = {"stairs": STAIRS, "slope": SLOPE, "cliff": CLIFF}
NAMES = ("threshold", "prefix", "budget", "auto")
LEVELS = (0.0, 0.3, 0.55, 0.55, 0.8, 0.95, 1.0, 1.0)


def confidence_of(text: Text, seed: int = 0) -> float:
    """A confidence as a function of the tokens before it; equal ones are common."""
    return LEVELS[zlib.crc32(repr((seed, text)).encode()) % len(LEVELS)]


def confidences(text: Text, block: Text, seed: int = 0) -> tuple[float, ...]:
    """The confidences of a drafted block: entry k looks at tokens before token k only."""
    return tuple(confidence_of(text + block[:k], seed) for k in range(len(block)))


def prepared(
    name: str, curve: str, num_draft: int, num_rows: int = 1, *, num_rounds: int = 6
) -> Schedule:
    """A schedule that knows the costs and has seen a few rounds of drafts of middling worth."""
    config = DSparkConfig(schedule=name, max_draft_tokens=num_draft, confidence_threshold=0.5)
    costs = StepCosts()
    for rows in range(1, num_rows + 1):
        for width, seconds in CURVES[curve].items():
            if width >= rows:
                costs.observe(width, 10 * rows, seconds, rows)
    schedule = build_schedule(config, costs)
    rows = [RowState(row, 10, num_draft) for row in range(num_rows)]
    for i in range(num_rounds):
        schedule.ask(rows)
        schedule.observe_draft(num_draft, 0.0)
        told = [tuple(LEVELS[(5 * i + 3 * r + k) % 8] for k in range(num_draft)) for r in range(2)]
        drafts = [base.Draft(num_draft, 0, told[row], is_drawn=True) for row in range(num_rows)]
        lengths = schedule.cut(rows, drafts)
        outcomes = [
            RowOutcome(row, 0, n, min(n, 1 + (i + row) % 3), told[row][:n])
            for row, n in enumerate(lengths)
        ]
        width = num_rows + sum(lengths)
        schedule.observe(outcomes, width, 10 * num_rows, CURVES[curve][width])
    return schedule


def in_state(schedule: Schedule, *, is_drawn: bool = True) -> Callable[[Text, Text], int]:
    """What a schedule in its present state does with one row's draft."""

    @cache
    def cut(told: tuple[float, ...]) -> int:
        draft = base.Draft(len(told), 0, told, is_drawn=is_drawn)
        return copy.deepcopy(schedule).cut([RowState(0, 10, 9)], [draft])[0]

    return lambda text, block: cut(confidences(text, block))


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "num_draft"), [(2, 3), (3, 3), (4, 2)])
def test_confidence_schedules_emit_the_targets_distribution(
    size: int, num_draft: int, name: str, curve: str
) -> None:
    cut = in_state(prepared(name, curve, num_draft))
    target = table(size, seed=1)
    for drafted in (table(size, seed=7), table(size, seed=8, holes=0.4), target):
        assert deviation(target, honest(drafted), cut, size, num_draft) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_the_schedules_under_test_verify_lengths_that_depend_on_the_drafts(name: str) -> None:
    # With one row "budget" verifies a number fixed beforehand: which tokens, not how many.
    rows = [RowState(0, 10, 9), RowState(1, 10, 9)]
    blocks = list(itertools.product(range(3), repeat=3))
    told = [[confidences((), block, row) for block in blocks] for row in range(2)]
    seen = set()
    for curve in CURVES:
        schedule = prepared(name, curve, 3, 2)
        for pair in itertools.product(*told):
            drafts = [base.Draft(3, 0, each, is_drawn=True) for each in pair]
            seen.add(tuple(copy.deepcopy(schedule).cut(rows, drafts)))
    assert len(seen) >= 3, seen


def test_the_same_schedule_is_caught_when_it_is_let_look_ahead() -> None:
    target = table(3, seed=1)
    cut = in_state(prepared("auto", "stairs", 3, num_rounds=0), is_drawn=False)
    assert deviation(target, honest(table(3, seed=7)), cut, 3, 3) > BIASED


def appendix_a(*, is_drawn: bool) -> float:
    """How often token 0 comes first where c_2 tells whether the first draft token is token 0."""
    costs = StepCosts()
    for width, seconds in {1: 1.0, 2: 1.9, 3: 1.9}.items():
        costs.observe(width, 10, seconds)
    schedule = build_schedule(DSparkConfig(max_draft_tokens=2), costs)
    target = torch.tensor([0.7, 0.3], dtype=torch.float64)
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def cut(_text: Text, block: Text) -> int:
        told = (0.8, 0.99 if block[0] == 0 else 0.0)
        draft = base.Draft(2, 0, told, is_drawn=is_drawn)
        return copy.deepcopy(schedule).cut([RowState(0, 10, 9)], [draft])[0]

    emitted = emitted_distribution(lambda _: target, honest(lambda _: even), cut, 2, 2)
    return sum(prob for text, prob in emitted.items() if text[0] == 0)


def test_looking_ahead_has_the_published_bias_and_the_causal_rule_has_none() -> None:
    # DSpark, arXiv:2607.05147, appendix A: (0.7, 0.3) becomes (0.85, 0.15).
    assert appendix_a(is_drawn=False) == pytest.approx(0.85, abs=EXACT)
    assert appendix_a(is_drawn=True) == pytest.approx(0.7, abs=EXACT)


def text_law(
    target: Conditional, drafted: Conditional, block: Text, length: int, horizon: int
) -> torch.Tensor:
    """The law of a row's first `horizon` tokens, of shape (V,) * horizon, given block and length.

    What a round leaves open is drawn from the target.
    """
    size = len(target(()))
    law = torch.zeros([size] * horizon, dtype=torch.float64)

    def rest(text: Text, mass: float) -> None:
        if mass == 0:
            return
        if len(text) == horizon:
            law[text] += mass
            return
        for token, prob in enumerate(target(text).tolist()):
            rest((*text, token), mass * prob)

    prefix, mass = (), 1.0
    for token in block[:length]:
        keep = float(acceptance_probability(target(prefix), token, drafted(prefix)))
        if keep < 1:
            left = residual_distribution(target(prefix), token, drafted(prefix)).tolist()
            for other, prob in enumerate(left):
                rest((*prefix, other), mass * (1 - keep) * prob)
        mass *= keep
        prefix = (*prefix, token)
    rest(prefix, mass)
    return law


def two_row_deviation(
    schedule: Schedule,
    size: int,
    num_draft: int,
    drawn: tuple[bool, bool] = (True, True),
    told: Callable[[Text, int], tuple[float, ...]] = lambda block, row: confidences((), block, row),
) -> float:
    """The largest error of the joint law of two rows' texts after one round."""
    horizon = num_draft + 1
    targets = [table(size, seed=1), table(size, seed=2)]
    drafters = [table(size, seed=7), table(size, seed=8)]
    blocks = list(itertools.product(range(size), repeat=num_draft))

    @cache
    def law(row: int, block: Text, length: int) -> torch.Tensor:
        return text_law(targets[row], drafters[row], block, length, horizon).flatten()

    @cache
    def mass(row: int, block: Text) -> float:
        probs = [float(drafters[row](block[:k])[token]) for k, token in enumerate(block)]
        return float(torch.tensor(probs, dtype=torch.float64).prod())

    joint = torch.zeros(size**horizon, size**horizon, dtype=torch.float64)
    rows = [RowState(row, 10, 9) for row in range(2)]
    for pair in itertools.product(blocks, repeat=2):
        drafts = [
            base.Draft(num_draft, 0, told(pair[row], row), is_drawn=drawn[row]) for row in range(2)
        ]
        lengths = copy.deepcopy(schedule).cut(rows, drafts)
        laws = [law(row, pair[row], lengths[row]) for row in range(2)]
        joint += mass(0, pair[0]) * mass(1, pair[1]) * torch.outer(*laws)
    plain = [text_law(target, target, (), 0, horizon).flatten() for target in targets]
    return float((joint - torch.outer(*plain)).abs().max())


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "num_draft"), [(2, 3), (3, 2)])
def test_two_rows_that_compete_stay_exact_and_independent(
    size: int, num_draft: int, name: str, curve: str
) -> None:
    assert two_row_deviation(prepared(name, curve, num_draft, 2), size, num_draft) < EXACT


@pytest.mark.parametrize("drawn", [(False, False), (False, True), (True, False), (True, True)])
def test_two_rows_are_caught_when_one_of_them_is_let_look_ahead(drawn: tuple[bool, bool]) -> None:
    def told(block: Text, _row: int) -> tuple[float, ...]:
        return 0.5, 0.99 if block[0] == 0 else 0.0

    schedule = prepared("auto", "cliff", 2, 2, num_rounds=0)
    found = two_row_deviation(schedule, 2, 2, drawn, told)
    assert found < EXACT if all(drawn) else found > BIASED


def with_memory(
    schedule: Schedule,
    target: Conditional,
    drafted: Conditional,
    seconds: Callable[[Text], float] | None = None,
) -> float:
    """The largest error over texts of HORIZON tokens, every branch with its own schedule."""
    size, num_draft = len(target(())), 2
    emitted: dict[Text, float] = defaultdict(float)

    def decode(text: Text, mass: float, state: Schedule) -> None:
        if mass == 0:
            return
        if len(text) >= HORIZON:
            # A text that ran over the horizon is judged by its first tokens.
            emitted[text[:HORIZON]] += mass
            return
        rows = [RowState(0, 10, num_draft)]
        for block in itertools.product(range(size), repeat=num_draft):
            chance = mass
            for k, token in enumerate(block):
                chance *= float(drafted(text + block[:k])[token])
            told, here = confidences(text, block), copy.deepcopy(state)
            here.ask(rows)
            if seconds is not None:
                here.observe_draft(num_draft, seconds(block))
            (length,) = here.cut(rows, [base.Draft(num_draft, 0, told, is_drawn=True)])

            def go_on(longer: Text, part: float, accepted: int, here: Any = here, n: int = length,
                      told: Any = told) -> None:  # fmt: skip
                after = copy.deepcopy(here)
                after.observe([RowOutcome(0, 0, n, accepted, told[:n])], n + 1, 10, SLOPE[n + 1])
                decode(longer, part, after)

            prefix = text
            for k, token in enumerate(block[:length]):
                keep = float(acceptance_probability(target(prefix), token, drafted(prefix)))
                if keep < 1:
                    left = residual_distribution(target(prefix), token, drafted(prefix))
                    for other, prob in enumerate(left.tolist()):
                        go_on((*prefix, other), chance * (1 - keep) * prob, k)
                chance *= keep
                prefix = (*prefix, token)
            for token, prob in enumerate(target(prefix).tolist()):
                go_on((*prefix, token), chance * prob, length)

    decode((), 1.0, schedule)
    worst = 0.0
    for text in itertools.product(range(size), repeat=HORIZON):
        exact = 1.0
        for k, token in enumerate(text):
            exact *= float(target(text[:k])[token])
        worst = max(worst, abs(emitted[text] - exact))
    return worst


@pytest.mark.parametrize("name", NAMES)
def test_what_a_schedule_remembers_of_drafts_leaks_nothing(name: str) -> None:
    schedule = prepared(name, "slope", 2)
    assert with_memory(schedule, table(2, seed=1), table(2, seed=7)) < EXACT


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("name", NAMES)
def test_the_time_a_draft_takes_leaks_nothing(name: str, curve: str) -> None:
    # Drawing some tokens takes far longer: a choice by that time would know what was drawn.
    schedule = prepared(name, curve, 2, num_rounds=1)
    found = with_memory(
        schedule, table(2, seed=1), table(2, seed=7), lambda block: 5.0 if block[0] else 0.001
    )
    assert found < EXACT


def test_a_deterministic_draft_may_be_looked_at_in_full() -> None:
    # The tokens follow from the text, so their confidences do: nothing is revealed by them.
    target, picked = table(3, seed=1), table(3, seed=7)
    size = 3
    eye = torch.eye(size, dtype=torch.float64)
    drafter = replace(honest(lambda t: eye[int(picked(t).argmax())]), claimed=lambda _text: None)
    cut = in_state(prepared("auto", "stairs", 3), is_drawn=False)
    assert deviation(target, drafter, cut, size, 3) < EXACT
