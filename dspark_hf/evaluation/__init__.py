"""Evaluation: how well a drafter guesses, and what sparse attention costs in perplexity."""

from dspark_hf.evaluation.calibrate import Calibration, calibrate_drafter
from dspark_hf.evaluation.drift import DriftReport, perplexity_drift
from dspark_hf.evaluation.perplexity import PerplexityReport, perplexity

__all__ = [
    "Calibration",
    "DriftReport",
    "PerplexityReport",
    "calibrate_drafter",
    "perplexity",
    "perplexity_drift",
]
