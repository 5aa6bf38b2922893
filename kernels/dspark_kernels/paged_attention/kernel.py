"""Triton: split-K over the page list; a group's heads times the new tokens are one tile of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.merge_lse.kernel import merge_lse_fwd
from dspark_kernels.online_softmax import attend_tile, finish, listed_keys, load_tile
from dspark_kernels.tiles import MIN_DOT, PAGE_SIZE, Build, Launch, ceil_div, power_of_two

SPLIT_TOKENS = 256
"""Listed tokens per program; fixed, so that a row's sums do not depend on other rows' lists."""
WIDE_TILE = 8_192
"""From here on a tile takes 8 warps."""
TALL_TILE = 128
"""From so many query rows on fewer keys are taken per step, or scores spill."""

LAUNCHES = {  # (bytes per element, width of the wider head): keys per step
    (2, 64): Launch(block=64, num_warps=4, num_stages=3),
    (2, 128): Launch(block=64, num_warps=4, num_stages=2),
    (2, 256): Launch(block=32, num_warps=4, num_stages=2),
    (4, 64): Launch(block=32, num_warps=8, num_stages=2),
    (4, 128): Launch(block=16, num_warps=8, num_stages=2),
    (4, 256): Launch(block=16, num_warps=8, num_stages=1),
}


@triton.jit(do_not_specialize=["num_rows", "num_queries", "num_listed"])
def _paged_attention_fwd_kernel(
    p_q,  # [R, Hq, T, D]
    p_k,  # [slots, Hkv, S, D]
    p_v,  # [slots, Hkv, S, Dv]
    p_pages,  # [R, Hkv, K] int32
    p_counts,  # [R, Hkv] int32
    p_slots,  # [R]
    p_lengths,  # [R]
    p_out,  # [splits, R, Hq, T, Dv]
    p_lse,  # [splits, R, Hq, T] float32
    scale,
    num_rows,
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
    SPLIT_PAGES: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_kv = tl.program_id(1)
    i_split = tl.program_id(2)
    i_list = i_row * num_kv + i_kv
    b_slot = tl.load(p_slots + i_row).to(tl.int64)
    b_length = tl.load(p_lengths + i_row).to(tl.int32)
    b_count = tl.minimum(tl.load(p_counts + i_list), num_listed)

    o_m = tl.arange(0, BLOCK_M)  # [M]: head within the group, then token
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_row = o_m < GROUP * num_queries
    o_head = i_kv * GROUP + o_m // num_queries
    o_token = o_m % num_queries
    b_place = b_length - num_queries + o_token  # [M]

    o_q = o_head.to(tl.int64) * stride_q_head + o_token.to(tl.int64) * stride_q_token
    p_rows = p_q + i_row * stride_q_row + o_q[:, None] + o_d[None, :]
    b_q = tl.load(p_rows, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)  # [M, D]

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    p_keys = p_k + b_slot * stride_k_slot + i_kv.to(tl.int64) * stride_k_head
    p_values = p_v + b_slot * stride_v_slot + i_kv.to(tl.int64) * stride_v_head
    p_list = p_pages + i_list * num_listed
    i_first = i_split * SPLIT_PAGES
    i_last = tl.minimum(b_count, i_first + SPLIT_PAGES)
    for i_page in range(i_first, i_last, BLOCK_N // PAGE):
        b_at, m_key = listed_keys(p_list, i_page, i_last, o_n, b_length, PAGE)
        b_k, b_v = load_tile(
            p_keys, p_values, b_at, m_key, o_d, o_dv, stride_k_token, stride_v_token, D, DV
        )
        m_seen = m_row[:, None] & m_key[None, :] & (b_at[None, :] <= b_place[:, None])
        b_acc, b_m, b_l = attend_tile(b_q, b_k, b_v, m_seen, b_acc, b_m, b_l, scale, 0.0, False)

    b_out, b_lse = finish(b_acc, b_m, b_l)
    o_part = i_split.to(tl.int64) * num_rows + i_row
    o_out = (o_part * (num_kv * GROUP) + o_head) * num_queries + o_token  # [M]
    tl.store(p_lse + o_out, b_lse, mask=m_row)
    m_out = m_row
    if IS_PARTIAL:
        m_out = m_row & (b_l > 0)  # the merge reads no part whose log-sum-exp is -inf
    p_rows = p_out + o_out[:, None] * DV + o_dv[None, :]
    m_store = m_out[:, None] & (o_dv < DV)[None, :]
    tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_store)


def choose(dim: int, dim_v: int, element_bytes: int, tile_rows: int) -> Launch:
    """Return the launch options for head widths, an element size and a tile's rows."""
    width = min(256, power_of_two(max(dim, dim_v), 64))
    launch = LAUNCHES[element_bytes, width]
    if tile_rows * power_of_two(dim_v, MIN_DOT) < WIDE_TILE:
        return launch
    return Launch(launch.block if tile_rows < TALL_TILE else 32, 8, launch.num_stages)


def constants(
    group: int,
    num_queries: int,
    dims: tuple[int, int],
    page_size: int,
    block_n: int,
    *,
    is_partial: bool,
) -> dict[str, object]:
    """Return the compile-time arguments of a regime."""
    return {
        "GROUP": group,
        "D": dims[0],
        "DV": dims[1],
        "PAGE": page_size,
        "SPLIT_PAGES": max(SPLIT_TOKENS, block_n) // page_size,
        "IS_PARTIAL": is_partial,
        "BLOCK_M": power_of_two(group * num_queries, MIN_DOT),
        "BLOCK_N": max(block_n, page_size),
        "BLOCK_D": power_of_two(dims[0], MIN_DOT),
        "BLOCK_DV": power_of_two(dims[1], MIN_DOT),
    }


def paged_attention_fwd(
    query: torch.Tensor,  # [R, Hq, T, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    pages: torch.Tensor,  # [R, Hkv, K]
    counts: torch.Tensor,  # [R, Hkv]
    slots: torch.Tensor,  # [R]
    lengths: torch.Tensor,  # [R]
    out: torch.Tensor,  # [R, Hq, T, Dv]
    lse: torch.Tensor,  # [R, Hq, T]
    *,
    scale: float,
    page_size: int,
) -> None:
    """Launch the kernel, and the merge if lists are longer than one split."""
    num_rows, num_heads, num_queries, dim = query.shape
    num_kv, dim_v, num_listed = key.shape[1], value.shape[-1], pages.shape[-1]
    group = num_heads // num_kv
    if out.numel() == 0:
        return
    tile_rows = power_of_two(group * num_queries, MIN_DOT)
    launch = choose(dim, dim_v, key.element_size(), tile_rows)
    block_n = max(launch.block, page_size)
    num_splits = max(1, ceil_div(num_listed * page_size, max(SPLIT_TOKENS, block_n)))
    is_partial = num_splits > 1
    part_out, part_lse = out, lse
    if is_partial:
        part_out = out.new_empty((num_splits, *out.shape), dtype=torch.float32)
        part_lse = lse.new_empty((num_splits, *lse.shape))
    _paged_attention_fwd_kernel[(num_rows, num_kv, num_splits)](
        query, key, value, pages, counts, slots, lengths, part_out, part_lse,
        scale, num_rows, num_kv, num_queries, num_listed,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        **constants(
            group, num_queries, (dim, dim_v), page_size, launch.block, is_partial=is_partial
        ),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if is_partial:
        merge_lse_fwd(part_out, part_lse, out, lse)


REGIMES = (("bf16", 128, 4, 1), ("bf16", 128, 16, 8), ("bf16", 256, 8, 8), ("fp32", 128, 4, 8))
"""Type, head width, group and tokens of the variants compiled ahead of time."""


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    return [_build(*regime) for regime in REGIMES]


def _build(dtype: str, dim: int, group: int, num_queries: int) -> Build:
    element_bytes = 4 if dtype == "fp32" else 2
    launch = choose(dim, dim, element_bytes, power_of_two(group * num_queries, MIN_DOT))
    pointers = dict.fromkeys(("p_q", "p_k", "p_v"), dtype)
    pointers |= dict.fromkeys(("p_pages", "p_counts"), "i32")
    pointers |= {"p_slots": "i64", "p_lengths": "i64", "p_out": "fp32", "p_lse": "fp32"}
    return Build(
        name=f"{dtype} D{dim} G{group} T{num_queries}",
        kernel=_paged_attention_fwd_kernel,
        pointers=pointers,
        constants=constants(
            group, num_queries, (dim, dim), PAGE_SIZE, launch.block, is_partial=True
        ),
        launch=launch,
        floats=("scale",),
    )
