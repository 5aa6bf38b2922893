"""Triton: one program per touched page and key head, which reads the page's keys once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from dspark_kernels.tiles import PAGE_SIZE, Build, Launch, ceil_div, power_of_two

if TYPE_CHECKING:
    import torch

LAUNCH = Launch(block=PAGE_SIZE, num_warps=2, num_stages=1)


@triton.jit
def _page_summary_fwd_kernel(
    p_k,  # [slots, Hkv, S, D]
    p_centre,  # [slots, Hkv, P, D]
    p_half,  # [slots, Hkv, P, D]
    p_slots,  # [R]
    p_past,  # [R]
    p_lengths,  # [R]
    stride_k_slot,
    stride_k_head,
    stride_k_token,
    stride_page_slot,
    stride_page_head,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_kv = tl.program_id(1).to(tl.int64)
    b_slot = tl.load(p_slots + i_row).to(tl.int64)
    b_length = tl.load(p_lengths + i_row).to(tl.int64)
    i_page = tl.load(p_past + i_row).to(tl.int64) // PAGE + tl.program_id(2)
    if i_page * PAGE < b_length:
        o_d = tl.arange(0, BLOCK_D)
        o_at = i_page * PAGE + tl.arange(0, PAGE)  # [PAGE]: position in the cache
        o_key = b_slot * stride_k_slot + i_kv * stride_k_head
        o_key += o_at[:, None] * stride_k_token + o_d[None, :]
        m_key = (o_at < b_length)[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_key, mask=m_key, other=0.0).to(tl.float32)  # [PAGE, D]
        b_top = tl.max(tl.where(m_key, b_k, float("-inf")), 0)  # [D]
        b_low = tl.min(tl.where(m_key, b_k, float("inf")), 0)
        o_page = b_slot * stride_page_slot + i_kv * stride_page_head + i_page * D + o_d
        b_centre = (b_top + b_low) * 0.5
        b_half = (b_top - b_low) * 0.5
        tl.store(p_centre + o_page, b_centre.to(p_centre.dtype.element_ty), mask=o_d < D)
        tl.store(p_half + o_page, b_half.to(p_half.dtype.element_ty), mask=o_d < D)


def update_page_summaries_fwd(
    key: torch.Tensor,  # [slots, Hkv, S, D]
    centre: torch.Tensor,  # [slots, Hkv, P, D]
    half: torch.Tensor,  # [slots, Hkv, P, D]
    slots: torch.Tensor,  # [R]
    past: torch.Tensor,  # [R]
    lengths: torch.Tensor,  # [R]
    *,
    max_new_tokens: int,
    page_size: int,
) -> None:
    """Launch the kernel."""
    dim = key.shape[-1]
    # A run that starts on a page's last token touches one page more than it fills.
    num_touched = ceil_div(max_new_tokens + page_size - 1, page_size)
    if slots.numel() == 0:
        return
    _page_summary_fwd_kernel[(slots.numel(), key.shape[1], num_touched)](
        key, centre, half, slots, past, lengths, *key.stride()[:3], *centre.stride()[:2],
        D=dim, PAGE=page_size, BLOCK_D=power_of_two(dim),
        num_warps=LAUNCH.num_warps, num_stages=LAUNCH.num_stages,
    )  # fmt: skip


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    found = []
    for dtype, dim in (("bf16", 128), ("fp32", 256)):
        pointers = dict.fromkeys(("p_k", "p_centre", "p_half"), dtype)
        pointers |= dict.fromkeys(("p_slots", "p_past", "p_lengths"), "i64")
        constants: dict[str, object] = {"D": dim, "PAGE": PAGE_SIZE, "BLOCK_D": dim}
        name = f"{dtype} D{dim}"
        kernel = _page_summary_fwd_kernel
        found.append(Build(name, kernel, pointers, constants, LAUNCH, has_dot=False))
    return found
