"""Confidences are scaled on held-out rounds: temperatures, shifts, and their file.

Synthetic drafters with known acceptance: what a calibrated confidence would be is known.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dspark_hf.errors import CheckpointError, ShapeError
from dspark_hf.verification.calibration import expected_calibration_error
from dspark_hf.verification.scaling import MOST_SHIFT, Scaling, Scalings, fit_sts

ECE_LIMIT = 0.02
"""Published effect: 3-8 % before, about 1 % after; chance alone gives half a percent here."""
SHARPNESS = (3.0, 2.0, 1.5, 2.5)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def misjudged(
    num_rounds: int, seed: int, sharpness: tuple[float, ...] = SHARPNESS, bias: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Logits `sharpness` times those of the truth less `bias`, and how many were accepted."""
    stream = np.random.default_rng(seed)
    true = stream.normal(0.8, 1.2, (num_rounds, len(sharpness)))
    survives = stream.random(true.shape) < sigmoid(true)
    return (true - bias) * np.asarray(sharpness), survives.cumprod(axis=1).sum(axis=1)


def errors(confidence: np.ndarray, accepted: np.ndarray) -> list[float]:
    """The calibration error of each survival."""
    survival = confidence.cumprod(axis=1)
    return [
        expected_calibration_error(survival[:, k], accepted > k) for k in range(survival.shape[1])
    ]


@pytest.mark.parametrize("with_shifts", [True, False])
def test_an_overconfident_drafter_is_calibrated_on_rounds_it_was_not_fitted_on(
    with_shifts: bool,
) -> None:
    scaling = fit_sts(*misjudged(20_000, seed=0), with_shifts=with_shifts)
    assert scaling.temperatures == pytest.approx(SHARPNESS, rel=0.15)
    assert scaling.shifts == pytest.approx([0.0] * 4, abs=0.2)
    logits, accepted = misjudged(20_000, seed=1)
    assert max(errors(sigmoid(logits), accepted)) > 0.05
    assert max(errors(scaling.apply(logits), accepted)) <= ECE_LIMIT


def test_a_biased_drafter_needs_shifts() -> None:
    logits, accepted = misjudged(20_000, seed=0, bias=1.0)
    scaling = fit_sts(logits, accepted)
    assert scaling.shifts == pytest.approx([1.0] * 4, abs=0.2)
    unshifted = fit_sts(logits, accepted, with_shifts=False)
    assert unshifted.shifts == (0.0,) * 4
    logits, accepted = misjudged(20_000, seed=1, bias=1.0)
    assert max(errors(scaling.apply(logits), accepted)) <= ECE_LIMIT
    assert max(errors(unshifted.apply(logits), accepted)) > 2 * ECE_LIMIT


def test_a_calibrated_drafter_is_left_about_as_it_is() -> None:
    scaling = fit_sts(*misjudged(20_000, seed=2, sharpness=(1.0, 1.0, 1.0)))
    assert scaling.temperatures == pytest.approx([1.0] * 3, rel=0.15)
    assert scaling.shifts == pytest.approx([0.0] * 3, abs=0.15)


def test_the_mean_survival_is_what_survived() -> None:
    logits, accepted = misjudged(500, seed=3, bias=-2.0)
    survival = fit_sts(logits, accepted).apply(logits).cumprod(axis=1)
    for k in range(4):
        assert survival[:, k].mean() == pytest.approx((accepted > k).mean(), abs=1e-6)


def test_each_position_is_fitted_with_those_before_it_fixed() -> None:
    logits, accepted = misjudged(5000, seed=3)
    longer, shorter = fit_sts(logits, accepted), fit_sts(logits[:, :2], accepted.clip(max=2))
    assert longer.temperatures[:2] == shorter.temperatures
    assert longer.shifts[:2] == shorter.shifts


def test_positions_that_few_rounds_reach_are_left_as_they_are() -> None:
    logits, accepted = misjudged(400, seed=5)
    scaling = fit_sts(logits, np.minimum(accepted, 1))
    assert scaling.temperatures[2:] == (1.0, 1.0)
    assert scaling.shifts[2:] == (0.0, 0.0)
    # All survive, or none: the shift ends somewhere.
    for count in (0, 4):
        found = fit_sts(logits, np.full(400, count))
        assert all(abs(shift) <= MOST_SHIFT for shift in found.shifts)


def test_scaling_keeps_the_order_and_takes_any_leading_shape() -> None:
    logits = torch.randn(3, 5, 4)
    scaled = Scaling((2.0, 1.0, 0.5, 1.0), (0.0, 0.0, 1.0, 0.0)).apply(logits)
    assert scaled.shape == (3, 5, 4)
    assert scaled[..., 1] == pytest.approx(torch.sigmoid(logits[..., 1]).numpy(), abs=1e-6)
    assert scaled[..., 2] == pytest.approx(torch.sigmoid(2 * logits[..., 2] + 1).numpy(), abs=1e-6)
    order = logits.numpy().reshape(-1, 4).argsort(axis=0)
    assert (scaled.reshape(-1, 4).argsort(axis=0) == order).all()


def test_extreme_logits_are_no_trouble() -> None:
    assert Scaling((0.1, 0.1), (0.0, 0.0)).apply([[1e4, -1e4]]).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("logits", "accepted"), [([[1.0, 2.0]], [1, 2]), ([1.0, 2.0], [1, 2]), (np.ones((0, 2)), [])]
)
def test_rounds_whose_shapes_do_not_fit_are_named(logits: object, accepted: object) -> None:
    with pytest.raises(ShapeError, match=r"shape \(rounds, N\)"):
        fit_sts(logits, accepted)


def test_logits_of_another_length_are_refused() -> None:
    with pytest.raises(ShapeError, match="one entry per temperature, 2"):
        Scaling.plain(2).apply(np.ones((2, 3)))


def test_both_tables_come_back_from_their_file() -> None:
    greedy, sampled = Scaling((1.5, 2.0), (0.25, -1.0)), Scaling.plain(2)
    stored = json.loads(json.dumps({"greedy": greedy.to_dict(), "sampled": sampled.to_dict()}))
    scalings = Scalings.from_dict(stored)
    assert scalings == Scalings(greedy, sampled)
    assert scalings.of(is_drawn=False) == greedy
    assert scalings.of(is_drawn=True) == sampled


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({}, "under 'greedy'"),
        ({"temperatures": [1.0]}, "under 'greedy'"),
        ({"greedy": {"temperatures": [1.0]}}, "'shifts' under 'greedy'"),
        ({"greedy": {"temperatures": ["a"], "shifts": [0]}}, "under 'greedy'"),
        ({"greedy": {"temperatures": [1.0, 1.0], "shifts": [0.0]}}, "one shift per draft token"),
        ({"greedy": {"temperatures": [0.0], "shifts": [0.0]}}, "temperature above 0"),
        ({"greedy": {"temperatures": [1.0], "shifts": [float("nan")]}}, "one shift per draft"),
    ],
)
def test_a_file_that_is_none_is_refused(stored: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Scalings.from_dict(stored)
