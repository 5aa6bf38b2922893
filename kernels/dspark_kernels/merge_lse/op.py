"""Public op: merge attention outputs by log-sum-exp."""

from __future__ import annotations

import torch

from dspark_kernels.checks import (
    FLOATS,
    require_contiguous,
    require_dtype,
    require_range,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.merge_lse.reference import merge_lse_reference


def merge_lse(
    outs: torch.Tensor,  # [S, ..., D]
    lses: torch.Tensor,  # [S, ...]
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [..., D], [...]
    """Merge attention outputs over S disjoint sets of keys into the output over their union.

    Used for split-K decoding, and to extend a selection: attend the additional pages only, then
    merge with what was attended before.

    Args:
        outs: Normalised output of each part, of shape (S, ..., D), contiguous.
        lses: Natural log-sum-exp of each part's scores, float32 of shape (S, ...); -inf for a part
            that saw no key, whose output is then not read.
        dtype: Type of the merged output; None keeps that of `outs`.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: Output (..., D), zeros where no part saw a key, and
        log-sum-exp (...), float32.

    Raises:
        ValueError: If shapes, types or devices do not fit.

    Limits: none on S; D up to 1024 (8 parts of a row are held in registers).
    Numerics: float32; tests hold it to 2e-5 relative RMS of float64.
    Layout: contiguous.
    Batch: a row's result depends on its own parts only, and not on empty parts added behind them.
    Cost: reads `outs` once; S * N * D * 4 bytes for float32 parts.
    Source: Dao et al., FlashAttention, arXiv:2205.14135, section 3.1 (the rescaling identity);
    Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023) for its use across splits.
    """
    require_dtype("outs", outs, FLOATS)
    require_dtype("lses", lses, (torch.float32,))
    require_shape("lses", lses, outs.shape[:-1])
    require_range("D", outs.shape[-1], 1, 1024)
    device = require_same_device(outs=outs, lses=lses)
    dtype = outs.dtype if dtype is None else dtype
    if not runs_triton(device):
        out, lse = merge_lse_reference(outs, lses)
        return out.to(dtype), lse
    from dspark_kernels.merge_lse.kernel import merge_lse_fwd

    require_contiguous("outs", outs)
    require_contiguous("lses", lses)
    out = torch.empty(outs.shape[1:], dtype=dtype, device=device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=device)
    merge_lse_fwd(outs, lses, out, lse)
    return out, lse
