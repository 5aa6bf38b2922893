"""Curves of costs: noise between widths is made smaller, what was really measured stays."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from dspark_hf.verification.cost_curves import Measured, steadied
from dspark_hf.verification.costs import StepCosts

WIDTHS = range(2, 17)
Curve = Callable[[int], float]


def straight(width: int) -> float:
    return 40 + 1.4 * width


def stairs(width: int) -> float:
    return 60.0 if width < 5 else 75.0 if width < 9 else 90.0


def observed(truth: Curve, noise: float, times: int, seed: int) -> dict[int, Measured]:
    stream = random.Random(seed)  # noqa: S311 - not for secrets
    return {
        width: Measured.of([truth(width) * math.exp(stream.gauss(0, noise)) for _ in range(times)])
        for width in WIDTHS
    }


def error(curve: dict[int, float], truth: Curve) -> float:
    """Mean square error of how much each width costs beside the others, as a part of it."""
    level = sum(curve[w] / truth(w) for w in WIDTHS) / len(WIDTHS)
    return sum((curve[w] / truth(w) / level - 1) ** 2 for w in WIDTHS) / len(WIDTHS)


def errors(truth: Curve, noise: float, times: int) -> tuple[float, float]:
    """What is left of the noise as measured and steadied, over many machines."""
    before = after = 0.0
    for seed in range(40):
        measured = observed(truth, noise, times, seed)
        known = {width: found.seconds for width, found in measured.items()}
        before += error(known, truth)
        after += error(steadied(known, measured), truth)
    return before, after


def worst_step(seconds: list[float]) -> float:
    """By how much a further token's cost is misjudged at most; it costs 1.4 everywhere."""
    return max(abs(after - before - 1.4) for before, after in itertools.pairwise(seconds))


@pytest.mark.parametrize(("times", "left"), [(3, 0.7), (9, 0.5), (31, 0.5)])
def test_of_a_straight_curve_half_of_the_noise_is_left_at_most(times: int, left: float) -> None:
    before, after = errors(straight, 0.06, times)
    assert after < left * before


@pytest.mark.parametrize("times", [9, 31])
def test_stairs_are_not_made_much_worse(times: int) -> None:
    before, after = errors(stairs, 0.06, times)
    assert after < 1.5 * before
    exact = observed(stairs, 1e-4, times, seed=1)
    curve = steadied({width: found.seconds for width, found in exact.items()}, exact)
    assert [curve[width] for width in WIDTHS] == pytest.approx([*map(stairs, WIDTHS)], rel=1e-3)


def test_without_noise_or_neighbours_everything_is_as_measured() -> None:
    exact = observed(stairs, 0.0, 5, seed=1)
    known = {width: found.seconds for width, found in exact.items()}
    assert steadied(known, exact) == known
    noisy = {width: found for width, found in observed(straight, 0.1, 5, 1).items() if width < 4}
    known = {width: found.seconds for width, found in noisy.items()}
    assert steadied(known, noisy) == known
    # Nothing tells of the noise of a width that was seen twice.
    seldom = observed(straight, 0.1, 2, seed=1)
    known = {width: found.seconds for width, found in seldom.items()}
    assert steadied(known, seldom) == known


def test_step_costs_steady_drafts_and_leave_the_plain_forward_alone() -> None:
    costs, stream = StepCosts(), random.Random(2)  # noqa: S311 - not for secrets
    times: dict[int, list[float]] = {width: [] for width in range(1, 9)}
    for _ in range(9):
        for width, taken in times.items():
            base = 30.0 if width == 1 else straight(width)
            taken.append(base * math.exp(stream.gauss(0, 0.06)))
            costs.observe(width, 100, taken[-1])
    curve = costs.predict_widths(range(1, 9), 100)
    assert curve[0] == pytest.approx(30.0, rel=0.06)
    assert curve[0] == Measured.of(times[1]).seconds
    medians = [Measured.of(times[width]).seconds for width in range(2, 9)]
    assert worst_step(curve[1:]) < min(1.4, 0.8 * worst_step(medians))
