"""Self-tests of losslessness: does a wrapped model say what the same model says unwrapped?

Greedy text is compared token by token, sampled text by a chi-square test against the exact
distribution. `dspark-hf verify` prints both for a user's own model, drafter and settings.
"""

from dspark_hf.losslessness.greedy import (
    Fork,
    GreedyResult,
    find_forks,
    greedy_check,
)
from dspark_hf.losslessness.sampling import SamplingResult, chi_square, sampling_check
from dspark_hf.losslessness.sides import end_ids, unwrapped
from dspark_hf.verification.ties import margin_limit

__all__ = [
    "Fork",
    "GreedyResult",
    "SamplingResult",
    "chi_square",
    "end_ids",
    "find_forks",
    "greedy_check",
    "margin_limit",
    "sampling_check",
    "unwrapped",
]
