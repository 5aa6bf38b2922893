"""Evaluation: how well a drafter guesses, and what sparse attention costs in perplexity."""

from dspark_hf.evaluation.budgets import LayerBudgets, calibrate_budgets
from dspark_hf.evaluation.calibrate import Calibration, calibrate_drafter
from dspark_hf.evaluation.drift import DriftReport, perplexity_drift
from dspark_hf.evaluation.perplexity import PerplexityReport, perplexity

__all__ = [
    "Calibration",
    "DriftReport",
    "LayerBudgets",
    "PerplexityReport",
    "calibrate_budgets",
    "calibrate_drafter",
    "perplexity",
    "perplexity_drift",
]
