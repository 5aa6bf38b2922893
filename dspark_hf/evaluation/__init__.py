"""Evaluation: how well a drafter guesses, and how far its confidences can be trusted."""

from dspark_hf.evaluation.calibrate import Calibration, calibrate_drafter

__all__ = ["Calibration", "calibrate_drafter"]
