"""Triton: raw scores and each block's softmax sums first, then weights averaged over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.tiles import LOG2_E, MIN_DOT, Build, Launch, ceil_div, power_of_two

PARTS = 32
"""Blocks of pages whose sums are combined per step."""

LAUNCHES = {  # (bytes per element, head width): pages per block
    (2, 64): Launch(block=64, num_warps=4, num_stages=1),
    (2, 128): Launch(block=64, num_warps=4, num_stages=1),
    (2, 256): Launch(block=32, num_warps=4, num_stages=1),
    (4, 64): Launch(block=32, num_warps=4, num_stages=1),
    (4, 128): Launch(block=16, num_warps=8, num_stages=1),
    (4, 256): Launch(block=16, num_warps=8, num_stages=1),
}


@triton.jit
def _is_real(o_m, GROUP: tl.constexpr, num_queries, b_real):
    """Rows of the tile [M] that hold one of the row's last `b_real` queries."""
    return (o_m < GROUP * num_queries) & (o_m % num_queries >= num_queries - b_real)


@triton.jit(do_not_specialize=["num_queries", "max_pages"])
def _page_score_fwd_kernel(
    p_q,  # [R, Hq, T, D]
    p_centre,  # [slots, Hkv, P, D]
    p_half,  # [slots, Hkv, P, D]
    p_slots,  # [R]
    p_pages,  # [R]
    p_real,  # [R]
    p_scores,  # [R, Hkv, G * T, max_pages] float32
    p_tops,  # [R, Hkv, blocks, G * T] float32
    p_sums,  # [R, Hkv, blocks, G * T] float32
    scale,
    alpha,
    num_kv,
    num_queries,
    max_pages,
    stride_q_row,
    stride_q_head,
    stride_q_token,
    stride_page_slot,
    stride_page_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_kv = tl.program_id(1)
    i_block = tl.program_id(2)
    b_pages = tl.minimum(tl.load(p_pages + i_row).to(tl.int32), max_pages)
    if i_block * BLOCK_P < b_pages:
        b_slot = tl.load(p_slots + i_row).to(tl.int64)
        b_real = tl.load(p_real + i_row).to(tl.int32)
        o_m = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        o_p = i_block * BLOCK_P + tl.arange(0, BLOCK_P)  # [P]
        m_row = _is_real(o_m, GROUP, num_queries, b_real)
        m_d = o_d < D
        m_p = o_p < b_pages
        o_head = (i_kv * GROUP + o_m // num_queries).to(tl.int64)
        o_q = o_head * stride_q_head + (o_m % num_queries).to(tl.int64) * stride_q_token
        p_rows = p_q + i_row * stride_q_row + o_q[:, None] + o_d[None, :]
        b_q = tl.load(p_rows, mask=m_row[:, None] & m_d[None, :], other=0.0)  # [M, D]
        b_abs = tl.abs(b_q.to(tl.float32)).to(b_q.dtype)

        o_base = b_slot * stride_page_slot + i_kv.to(tl.int64) * stride_page_head
        o_tile = o_base + o_p.to(tl.int64)[None, :] * D + o_d[:, None]  # [D, P]
        m_tile = m_d[:, None] & m_p[None, :]
        b_centre = tl.load(p_centre + o_tile, mask=m_tile, other=0.0)
        b_half = tl.load(p_half + o_tile, mask=m_tile, other=0.0)
        b_s = tl.dot(b_q, b_centre, input_precision="ieee")
        b_s += alpha * tl.dot(b_abs, b_half, input_precision="ieee")
        b_s = tl.where(m_p[None, :], b_s * scale, float("-inf"))  # [M, P], base 2

        b_top = tl.max(b_s, 1)  # [M]; finite, as the block has a page
        b_sum = tl.sum(tl.exp2(b_s - b_top[:, None]), 1)
        num_tile = GROUP * num_queries
        i_list = i_row * num_kv + i_kv
        o_part = (i_list * tl.num_programs(2) + i_block) * num_tile + o_m
        tl.store(p_tops + o_part, b_top, mask=m_row)
        tl.store(p_sums + o_part, b_sum, mask=m_row)
        o_score = (i_list * num_tile + o_m)[:, None] * max_pages + o_p[None, :]
        tl.store(p_scores + o_score, b_s, mask=m_row[:, None] & m_p[None, :])


@triton.jit(do_not_specialize=["num_queries", "max_pages"])
def _page_weight_fwd_kernel(
    p_scores,  # [R, Hkv, G * T, max_pages]
    p_tops,  # [R, Hkv, blocks, G * T]
    p_sums,  # [R, Hkv, blocks, G * T]
    p_pages,  # [R]
    p_real,  # [R]
    p_out,  # [R, Hkv, max_pages] float32
    num_kv,
    num_queries,
    max_pages,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_kv = tl.program_id(1)
    i_block = tl.program_id(2)
    i_list = i_row * num_kv + i_kv
    b_pages = tl.minimum(tl.load(p_pages + i_row).to(tl.int32), max_pages)
    b_real = tl.load(p_real + i_row).to(tl.int32)
    o_m = tl.arange(0, BLOCK_M)
    o_b = tl.arange(0, BLOCK_B)
    o_p = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    m_row = _is_real(o_m, GROUP, num_queries, b_real)
    num_tile = GROUP * num_queries
    b_mean = tl.zeros([BLOCK_P], tl.float32)
    if i_block * BLOCK_P < b_pages:
        num_blocks = (b_pages + BLOCK_P - 1) // BLOCK_P
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        for i_part in range(0, num_blocks, BLOCK_B):
            o_part = i_part + o_b
            m_part = m_row[:, None] & (o_part < num_blocks)[None, :]
            o_at = (i_list * tl.num_programs(2) + o_part)[None, :] * num_tile + o_m[:, None]
            b_tops = tl.load(p_tops + o_at, mask=m_part, other=float("-inf"))  # [M, B]
            b_sums = tl.load(p_sums + o_at, mask=m_part, other=0.0)
            b_new = tl.maximum(b_max, tl.max(b_tops, 1))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_sum = b_sum * tl.exp2(b_max - b_base)
            b_sum += tl.sum(b_sums * tl.exp2(b_tops - b_base[:, None]), 1)
            b_max = b_new
        o_score = (i_list * num_tile + o_m)[:, None] * max_pages + o_p[None, :]
        m_score = m_row[:, None] & (o_p < b_pages)[None, :]
        b_s = tl.load(p_scores + o_score, mask=m_score, other=float("-inf"))  # [M, P]
        b_base = tl.where(m_row, b_max, 0.0)
        b_w = tl.exp2(b_s - b_base[:, None]) / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
        b_mean = tl.sum(b_w, 0) / tl.maximum(GROUP * b_real, 1)
    tl.store(p_out + i_list * max_pages + o_p, b_mean, mask=o_p < max_pages)


WIDE_TILE = 64
"""From so many query rows on a program takes 8 warps, or its sums spill."""


def choose(dim: int, element_bytes: int, tile_rows: int) -> Launch:
    """Return the launch options for a head width, an element size and a tile's rows."""
    launch = LAUNCHES[element_bytes, min(256, power_of_two(dim, 64))]
    return launch if tile_rows < WIDE_TILE else Launch(launch.block, 8, launch.num_stages)


def constants(group: int, num_queries: int, launch: Launch) -> dict[str, object]:
    """Return the compile-time arguments both kernels share."""
    block_m = power_of_two(group * num_queries, MIN_DOT)
    return {"GROUP": group, "BLOCK_M": block_m, "BLOCK_P": launch.block}


def page_score_fwd(
    query: torch.Tensor,  # [R, Hq, T, D]
    centre: torch.Tensor,  # [slots, Hkv, P, D]
    half: torch.Tensor,  # [slots, Hkv, P, D]
    slots: torch.Tensor,  # [R]
    num_pages: torch.Tensor,  # [R]
    num_queries: torch.Tensor,  # [R]
    out: torch.Tensor,  # [R, Hkv, max_pages]
    *,
    scale: float,
    alpha: float,
) -> None:
    """Launch both kernels."""
    num_rows, num_heads, most, dim = query.shape
    num_kv, max_pages = centre.shape[1], out.shape[-1]
    if out.numel() == 0:
        return
    tile_rows = num_heads // num_kv * most
    launch = choose(dim, query.element_size(), tile_rows)
    shared = constants(num_heads // num_kv, most, launch)
    blocks = ceil_div(max_pages, launch.block)
    scores = out.new_empty(num_rows, num_kv, tile_rows, max_pages)
    tops = out.new_empty(num_rows, num_kv, blocks, tile_rows)
    sums = torch.empty_like(tops)
    grid = (num_rows, num_kv, blocks)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    _page_score_fwd_kernel[grid](
        query, centre, half, slots, num_pages, num_queries, scores, tops, sums,
        scale * LOG2_E, alpha, num_kv, most, max_pages,
        *query.stride()[:3], *centre.stride()[:2],
        D=dim, BLOCK_D=power_of_two(dim, MIN_DOT), **shared, **options,
    )  # fmt: skip
    _page_weight_fwd_kernel[grid](
        scores, tops, sums, num_pages, num_queries, out, num_kv, most, max_pages,
        BLOCK_B=PARTS, **shared, **options,
    )  # fmt: skip


REGIMES = (("bf16", 128, 4, 1), ("bf16", 256, 8, 8), ("bf16", 128, 16, 8), ("fp32", 128, 4, 8))
"""Type, head width, group and tokens of the variants compiled ahead of time."""


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    found = []
    for dtype, dim, group, tokens in REGIMES:
        launch = choose(dim, 4 if dtype == "fp32" else 2, group * tokens)
        shared = constants(group, tokens, launch)
        pointers = dict.fromkeys(("p_q", "p_centre", "p_half"), dtype)
        pointers |= dict.fromkeys(("p_slots", "p_pages", "p_real"), "i64")
        pointers |= dict.fromkeys(("p_scores", "p_tops", "p_sums"), "fp32")
        wide = {"D": dim, "BLOCK_D": power_of_two(dim, MIN_DOT)}
        name = f"{dtype} D{dim} G{group} T{tokens}"
        scalars = ("scale", "alpha")
        found.append(
            Build(name, _page_score_fwd_kernel, pointers, {**shared, **wide}, launch, scalars)
        )
        if group == 16:
            pointers = {"p_pages": "i64", "p_real": "i64"}
            pointers |= dict.fromkeys(("p_scores", "p_tops", "p_sums", "p_out"), "fp32")
            parts = {**shared, "BLOCK_B": PARTS}
            name = f"weights G{group} T{tokens}"
            found.append(Build(name, _page_weight_fwd_kernel, pointers, parts, launch))
    return found
