"""How far confidences can be trusted, and the map that puts them right while decoding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dspark_hf.errors import ShapeError
from dspark_hf.verification.calibration import (
    OnlineCalibration,
    area_under_curve,
    error_by_chance,
    expected_calibration_error,
    reliability,
)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match="shape of probabilities"):
        expected_calibration_error([0.5], [1, 0])


def test_the_calibration_error_is_the_mean_gap_of_the_bins() -> None:
    # Two bins of ten: 0.05 said 0 of 2, and 0.95 said 1 of 2.
    said, came = [0.05, 0.05, 0.95, 0.95], [0, 0, 1, 0]
    assert expected_calibration_error(said, came, bins=10) == pytest.approx(0.25)
    assert expected_calibration_error([1.0, 1.0], [1, 1]) == 0.0
    assert expected_calibration_error([], []) == 0.0


def test_reliability_bins_hold_what_was_said_and_what_came() -> None:
    found = reliability([0.05, 0.07, 0.95, 1.0], [0, 1, 1, True], bins=10)
    assert [(b.count, b.frequency) for b in found] == [(2, 0.5), (2, 1.0)]
    assert (found[0].low, found[1].high) == (0.0, 1.0)
    assert found[0].mean_probability == pytest.approx(0.06)
    said = np.random.default_rng(0).random(500)
    came = np.random.default_rng(1).random(500) < said**2
    gaps = [b.count * abs(b.mean_probability - b.frequency) for b in reliability(said, came)]
    assert sum(gaps) / 500 == pytest.approx(expected_calibration_error(said, came))


def test_the_area_under_the_curve_counts_ordered_pairs() -> None:
    assert area_under_curve([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1]) == 1.0
    assert area_under_curve([0.9, 0.8, 0.2, 0.1], [0, 0, 1, 1]) == 0.0
    assert area_under_curve([0.5, 0.5, 0.5], [0, 1, 1]) == 0.5
    assert area_under_curve([0.3, 0.5, 0.5, 0.7], [0, 1, 0, 1]) == pytest.approx(3.5 / 4)
    assert math.isnan(area_under_curve([0.1, 0.2], [1, 1]))


# The map learned while decoding.


def feed(calibration: OnlineCalibration, truth, seed: int, num_tokens: int = 6000) -> None:
    """Test drafts whose confidence is uniform and whose acceptance is `truth` of it."""
    stream = np.random.default_rng(seed)
    said = stream.random(num_tokens)
    for value, draw in zip(said.tolist(), stream.random(num_tokens).tolist(), strict=True):
        calibration.observe([value], 1, int(draw < truth(value)))


def test_without_outcomes_the_given_confidence_is_believed() -> None:
    said = [0.0, 0.03, 0.25, 0.5, 0.77, 0.96, 1.0]
    assert OnlineCalibration()(said) == pytest.approx(said, abs=0.011)


@pytest.mark.parametrize("power", [0.3, 1.0, 3.0])
def test_the_map_converges_to_the_observed_acceptance(power: float) -> None:
    calibration = OnlineCalibration()
    feed(calibration, lambda c: c**power, seed=0)
    stream = np.random.default_rng(9)
    said = stream.random(20_000)
    came = stream.random(20_000) < said**power
    before = expected_calibration_error(said, came)
    after = expected_calibration_error(calibration(said.tolist()), came)
    # Each bin remembers about 500 tokens, which leaves a standard error of 2 %.
    assert after <= 0.03
    assert power == 1.0 or after < before / 4


def test_a_drafter_that_is_always_sure_and_rarely_right_is_seen_through_at_once() -> None:
    calibration = OnlineCalibration()
    for _ in range(12):
        calibration.observe([0.99, 0.99], 1, 0)
    assert calibration([0.99])[0] < 0.35


def test_the_map_never_reverses_an_order() -> None:
    calibration = OnlineCalibration()
    for value, accepted in ((0.3, 1), (0.3, 1), (0.6, 0), (0.6, 0), (0.9, 1), (0.97, 0)) * 9:
        calibration.observe([value], 1, accepted)
    mapped = calibration(np.linspace(0, 1, 200).tolist())
    assert all(0 <= a <= b <= 1 for a, b in itertools.pairwise(mapped))


def test_the_map_follows_a_drafter_that_changes() -> None:
    calibration = OnlineCalibration()
    for truth in (0.9, 0.2):
        stream = np.random.default_rng(4)
        for draw in stream.random(3000).tolist():
            calibration.observe([0.75], 1, int(draw < truth))
        assert calibration([0.75])[0] == pytest.approx(truth, abs=0.08)


def test_only_tested_tokens_count() -> None:
    calibration = OnlineCalibration()
    for _ in range(50):
        # The second token is behind a refusal: nothing is known of it.
        calibration.observe([0.25, 0.75], 1, 0)
    low, high = calibration([0.25, 0.75])
    assert low < 0.05
    assert high == pytest.approx(0.75, abs=0.01)


def test_the_error_by_chance_is_that_of_predictions_that_are_right() -> None:
    stream = np.random.default_rng(1)
    said = stream.random(3000)
    errors = [expected_calibration_error(said, stream.random(3000) < said) for _ in range(60)]
    assert error_by_chance(said) == pytest.approx(np.mean(errors), rel=0.1)
    assert error_by_chance(said[:300]) > 2.5 * error_by_chance(said)
    assert error_by_chance([0.0, 1.0]) == 0.0
    assert error_by_chance([]) == 0.0
