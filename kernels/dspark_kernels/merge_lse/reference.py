"""Reference: the weighted mean of the parts, in float32 or float64."""

from __future__ import annotations

import torch


def merge_lse_reference(
    outs: torch.Tensor,  # [S, ..., D]
    lses: torch.Tensor,  # [S, ...]
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # [..., D], [...]
    """Merge as `merge_lse`, returning both in `dtype`.

    `out = sum_s exp(lse_s - lse) * out_s` with `lse = log(sum_s exp(lse_s))`.
    """
    lses = lses.to(dtype)
    top = lses.max(dim=0).values
    base = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weights = torch.exp(lses - base)  # [S, ...]
    total = weights.sum(dim=0)
    # A part that saw nothing may hold anything, also NaN: it is left out, not multiplied by zero.
    parts = torch.where(weights[..., None] > 0, outs.to(dtype), 0.0)
    merged = (weights[..., None] * parts).sum(dim=0)
    out = merged / torch.where(total > 0, total, torch.ones_like(total))[..., None]
    return out, base + torch.log(total)
