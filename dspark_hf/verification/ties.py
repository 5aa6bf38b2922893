"""Near-ties: how close two scores must be for rounding to decide between them."""

from __future__ import annotations

import math

import torch

NEAR_TIE = 0.1
"""Margin in logit units below which a difference counts as rounding, in 16 bits."""
NEAR_TIE_FLOAT32 = 1e-3
"""The same in float32, where rounding of logits is about 1e-5."""
NEAR_TIE_SPACINGS = 2
"""In 16 bits also this many steps between neighbouring values count as rounding: in bfloat16 scores
from 16 to 32 are 0.125 apart, so that two that differ by one step differ by more than 0.1."""


def margin_limit(dtype: torch.dtype, score: float, near_tie: float = NEAR_TIE) -> float:
    """Return the largest margin between two scores that rounding alone can turn around.

    Args:
        dtype: Type the model computes in.
        score: The better of the two scores.
        near_tie: Least limit in 16 bits.

    Returns:
        float: In logit units.
    """
    if dtype in (torch.float32, torch.float64):
        return NEAR_TIE_FLOAT32
    if not math.isfinite(score):
        return near_tie
    exponent = math.floor(math.log2(max(abs(score), 1.0)))
    return max(near_tie, NEAR_TIE_SPACINGS * torch.finfo(dtype).eps * 2.0**exponent)
