"""Triton: one program per row, which reads the parts' log-sum-exps twice and their outputs once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from dspark_kernels.tiles import LN_2, LOG2_E, MIN_DOT, Build, Launch, power_of_two

if TYPE_CHECKING:
    import torch

PARTS = 8
"""Parts per step; fixed, so that empty parts added behind change no bit of the result."""


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _merge_lse_fwd_kernel(
    p_outs,  # [S, N, D]
    p_lses,  # [S, N] float32
    p_out,  # [N, D]
    p_lse,  # [N] float32
    num_parts,
    num_rows,
    stride_part,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LOG2E: tl.constexpr,
    LN2: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    o_s = tl.arange(0, BLOCK_S)
    b_top = tl.full([BLOCK_S], float("-inf"), tl.float32)  # [S]
    for i_part in range(0, num_parts, BLOCK_S):
        o_part = (i_part + o_s).to(tl.int64)
        m_part = o_part < num_parts
        p_part = p_lses + o_part * num_rows + i_row
        b_top = tl.maximum(b_top, tl.load(p_part, mask=m_part, other=float("-inf")))
    b_max = tl.max(b_top, 0)
    b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.zeros([BLOCK_S], tl.float32)  # [S]
    b_acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)  # [S, D]
    for i_part in range(0, num_parts, BLOCK_S):
        o_part = (i_part + o_s).to(tl.int64)
        m_part = o_part < num_parts
        p_part = p_lses + o_part * num_rows + i_row
        b_lse = tl.load(p_part, mask=m_part, other=float("-inf"))  # [S]
        b_w = tl.exp2((b_lse - b_base) * LOG2E)  # [S]
        # What weighs nothing is not read: it may never have been written.
        m_out = (b_w > 0)[:, None] & (o_d < D)[None, :]
        p_part = p_outs + o_part[:, None] * stride_part + i_row * D + o_d[None, :]
        b_out = tl.load(p_part, mask=m_out, other=0.0).to(tl.float32)  # [S, D]
        b_acc += b_w[:, None] * b_out
        b_sum += b_w
    b_total = tl.sum(b_sum, 0)
    b_merged = tl.sum(b_acc, 0) / tl.where(b_total > 0, b_total, 1.0)  # [D]
    tl.store(p_out + i_row * D + o_d, b_merged.to(p_out.dtype.element_ty), mask=o_d < D)
    b_log = tl.log2(tl.where(b_total > 0, b_total, 1.0)) * LN2
    tl.store(p_lse + i_row, tl.where(b_total > 0, b_base + b_log, float("-inf")))


def constants(dim: int) -> dict[str, object]:
    """Return the compile-time arguments for a head dimension."""
    block_d = power_of_two(dim, MIN_DOT)
    return {"D": dim, "BLOCK_D": block_d, "BLOCK_S": PARTS, "LOG2E": LOG2_E, "LN2": LN_2}


LAUNCH = Launch(block=PARTS, num_warps=4, num_stages=2)


def merge_lse_fwd(
    outs: torch.Tensor,  # [S, ..., D]
    lses: torch.Tensor,  # [S, ...]
    out: torch.Tensor,  # [..., D]
    lse: torch.Tensor,  # [...]
) -> None:
    """Launch the kernel; all tensors contiguous, `lses` and `lse` float32."""
    num_rows = lse.numel()
    if num_rows == 0:
        return
    _merge_lse_fwd_kernel[(num_rows,)](
        outs, lses, out, lse, outs.shape[0], num_rows, num_rows * outs.shape[-1],
        **constants(outs.shape[-1]), num_warps=LAUNCH.num_warps, num_stages=LAUNCH.num_stages,
    )  # fmt: skip


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    return [
        Build(
            name=f"{out} D{dim}",
            kernel=_merge_lse_fwd_kernel,
            pointers={"p_outs": "fp32", "p_lses": "fp32", "p_out": out, "p_lse": "fp32"},
            constants=constants(dim),
            launch=LAUNCH,
            has_dot=False,
        )
        for out, dim in (("bf16", 128), ("fp32", 256))
    ]
