"""Triton: one program per tile of 64 queries and query head, which walks the tile's page list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from dspark_kernels.block_sparse_prefill.reference import QUERY_TILE
from dspark_kernels.online_softmax import attend_tile, finish, listed_keys, load_tile
from dspark_kernels.tiles import MIN_DOT, PAGE_SIZE, Build, Launch, power_of_two

if TYPE_CHECKING:
    import torch

LAUNCHES = {  # (bytes per element, width of the wider head): keys per step
    (2, 64): Launch(block=64, num_warps=4, num_stages=3),
    (2, 128): Launch(block=64, num_warps=8, num_stages=2),
    (2, 256): Launch(block=32, num_warps=8, num_stages=1),
    (4, 64): Launch(block=32, num_warps=8, num_stages=2),
    (4, 128): Launch(block=16, num_warps=8, num_stages=1),
}


@triton.jit(do_not_specialize=["num_queries", "num_listed"])
def _block_sparse_prefill_fwd_kernel(
    p_q,  # [R, Hq, N, D]
    p_k,  # [slots, Hkv, S, D]
    p_v,  # [slots, Hkv, S, Dv]
    p_pages,  # [R, Hkv, tiles, K] int32
    p_counts,  # [R, Hkv, tiles] int32
    p_slots,  # [R]
    p_past,  # [R]
    p_out,  # [R, Hq, N, Dv]
    scale,
    num_kv,
    num_queries,
    num_listed,
    stride_q_row,
    stride_q_head,
    stride_q_token,
    stride_k_slot,
    stride_k_head,
    stride_k_token,
    stride_v_slot,
    stride_v_head,
    stride_v_token,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # Heads of a group run next to each other, as they read the same pages.
    i_head = tl.program_id(0)
    i_part = tl.program_id(1)  # a tile of queries, or a part of one
    i_row = tl.program_id(2).to(tl.int64)
    i_kv = i_head // GROUP
    i_tile = i_part * BLOCK_M // TILE
    num_tiles = (num_queries + TILE - 1) // TILE
    b_slot = tl.load(p_slots + i_row).to(tl.int64)
    b_past = tl.load(p_past + i_row).to(tl.int32)

    o_m = i_part * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]: query
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_row = o_m < num_queries
    b_place = b_past + o_m
    p_rows = p_q + i_row * stride_q_row + i_head.to(tl.int64) * stride_q_head
    o_q = o_m.to(tl.int64)[:, None] * stride_q_token + o_d[None, :]
    b_q = tl.load(p_rows + o_q, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)  # [M, D]

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    p_keys = p_k + b_slot * stride_k_slot + i_kv.to(tl.int64) * stride_k_head
    p_values = p_v + b_slot * stride_v_slot + i_kv.to(tl.int64) * stride_v_head
    i_list = (i_row * num_kv + i_kv) * num_tiles + i_tile
    p_list = p_pages + i_list * num_listed
    b_count = tl.minimum(tl.load(p_counts + i_list), num_listed)
    b_end = b_past + tl.minimum((i_part + 1) * BLOCK_M, num_queries)
    for i_page in range(0, b_count, BLOCK_N // PAGE):
        b_at, m_key = listed_keys(p_list, i_page, b_count, o_n, b_end, PAGE)
        b_k, b_v = load_tile(
            p_keys, p_values, b_at, m_key, o_d, o_dv, stride_k_token, stride_v_token, D, DV
        )
        m_seen = m_row[:, None] & m_key[None, :] & (b_at[None, :] <= b_place[:, None])
        b_acc, b_m, b_l = attend_tile(b_q, b_k, b_v, m_seen, b_acc, b_m, b_l, scale, 0.0, False)

    b_out, _ = finish(b_acc, b_m, b_l)
    o_out = (i_row * (num_kv * GROUP) + i_head) * num_queries + o_m
    p_rows = p_out + o_out[:, None] * DV + o_dv[None, :]
    m_store = m_row[:, None] & (o_dv < DV)[None, :]
    tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_store)


def choose(dim: int, dim_v: int, element_bytes: int) -> Launch:
    """Return the launch options for head widths and an element size."""
    return LAUNCHES[element_bytes, power_of_two(max(dim, dim_v), 64)]


def constants(
    group: int, dims: tuple[int, int], page_size: int, element_bytes: int, block_n: int
) -> dict[str, object]:
    """Return the compile-time arguments of a regime."""
    # Exact float32 products keep their operands in registers: a list is walked by more programs.
    block_m = QUERY_TILE if element_bytes == 2 else max(MIN_DOT, 2048 // power_of_two(dims[1], 64))
    return {
        "GROUP": group,
        "D": dims[0],
        "DV": dims[1],
        "PAGE": page_size,
        "TILE": QUERY_TILE,
        "BLOCK_M": block_m,
        "BLOCK_N": max(block_n, page_size),
        "BLOCK_D": power_of_two(dims[0], MIN_DOT),
        "BLOCK_DV": power_of_two(dims[1], MIN_DOT),
    }


def block_sparse_prefill_fwd(
    query: torch.Tensor,  # [R, Hq, N, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    pages: torch.Tensor,  # [R, Hkv, tiles, K]
    counts: torch.Tensor,  # [R, Hkv, tiles]
    slots: torch.Tensor,  # [R]
    past: torch.Tensor,  # [R]
    out: torch.Tensor,  # [R, Hq, N, Dv]
    *,
    scale: float,
    page_size: int,
) -> None:
    """Launch the kernel."""
    num_rows, num_heads, num_queries, dim = query.shape
    num_kv, dim_v = key.shape[1], value.shape[-1]
    if out.numel() == 0:
        return
    launch = choose(dim, dim_v, key.element_size())
    chosen = constants(
        num_heads // num_kv, (dim, dim_v), page_size, key.element_size(), launch.block
    )
    parts = pages.shape[2] * (QUERY_TILE // int(str(chosen["BLOCK_M"])))
    _block_sparse_prefill_fwd_kernel[(num_heads, parts, num_rows)](
        query, key, value, pages, counts, slots, past, out,
        scale, num_kv, num_queries, pages.shape[-1],
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        **chosen, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


REGIMES = (("bf16", 64, 4), ("bf16", 128, 4), ("bf16", 256, 8), ("fp32", 128, 4))
"""Type, head width and group of the variants compiled ahead of time."""


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    found = []
    for dtype, dim, group in REGIMES:
        size = 4 if dtype == "fp32" else 2
        launch = choose(dim, dim, size)
        pointers = dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), dtype)
        pointers |= dict.fromkeys(("p_pages", "p_counts"), "i32")
        pointers |= dict.fromkeys(("p_slots", "p_past"), "i64")
        found.append(
            Build(
                name=f"{dtype} D{dim} G{group}",
                kernel=_block_sparse_prefill_fwd_kernel,
                pointers=pointers,
                constants=constants(group, (dim, dim), PAGE_SIZE, size, launch.block),
                launch=launch,
                floats=("scale",),
            )
        )
    return found
