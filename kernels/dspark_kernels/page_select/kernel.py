"""Triton: packs the kept pages of a head into an ascending list, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.tiles import Build, Launch

LAUNCH = Launch(block=1024, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=["num_pages", "max_pages"])
def _page_pack_fwd_kernel(
    p_kept,  # [R * Hkv, P] int8
    p_pages,  # [R * Hkv, max_pages] int32
    p_counts,  # [R * Hkv] int32
    num_pages,
    max_pages,
    BLOCK: tl.constexpr,
):
    i_list = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK)
    b_count = 0
    for i_page in range(0, num_pages, BLOCK):
        o_page = i_page + o_p
        m_page = o_page < num_pages
        p_block = p_kept + i_list * num_pages + o_page
        b_kept = tl.load(p_block, mask=m_page, other=0).to(tl.int32)  # [BLOCK]
        o_at = b_count + tl.cumsum(b_kept, 0) - b_kept
        m_store = (b_kept > 0) & (o_at < max_pages)
        tl.store(p_pages + i_list * max_pages + o_at, o_page, mask=m_store)
        b_count += tl.sum(b_kept, 0)
    b_count = tl.minimum(b_count, max_pages)
    for i_page in range(0, max_pages, BLOCK):
        o_at = i_page + o_p
        m_store = (o_at >= b_count) & (o_at < max_pages)
        tl.store(p_pages + i_list * max_pages + o_at, -1, mask=m_store)
    tl.store(p_counts + i_list, b_count)


def page_pack_fwd(
    kept: torch.Tensor,  # [R, Hkv, P] bool
    pages: torch.Tensor,  # [R, Hkv, max_pages]
    counts: torch.Tensor,  # [R, Hkv]
) -> None:
    """Launch the kernel; all tensors contiguous."""
    if counts.numel() == 0:
        return
    _page_pack_fwd_kernel[(counts.numel(),)](
        kept.view(torch.int8), pages, counts, kept.shape[-1], pages.shape[-1],
        BLOCK=LAUNCH.block, num_warps=LAUNCH.num_warps, num_stages=LAUNCH.num_stages,
    )  # fmt: skip


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    pointers = {"p_kept": "i8", "p_pages": "i32", "p_counts": "i32"}
    constants: dict[str, object] = {"BLOCK": LAUNCH.block}
    return [Build("pack", _page_pack_fwd_kernel, pointers, constants, LAUNCH)]
