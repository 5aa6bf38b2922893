"""Triton: dense attention of ragged token runs; a group's heads and a run's tokens are one tile.

Short runs (decoding, drafts) are split along the keys and merged; long ones (prompts) are not. Both
depend on the run alone, so a row's result does not depend on what it is batched with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dspark_kernels.merge_lse.kernel import merge_lse_fwd
from dspark_kernels.online_softmax import attend_tile, finish, load_tile
from dspark_kernels.ragged_attention.tiling import NO_SPLIT, SPLIT_TOKENS
from dspark_kernels.tiles import LOG2_E, MIN_DOT, Build, Launch, power_of_two

if TYPE_CHECKING:
    from dspark_kernels.ragged_attention.tiling import Plan

LAUNCHES = {  # (bytes per element, width of the wider head): keys per step
    (2, 64): Launch(block=64, num_warps=4, num_stages=3),
    (2, 128): Launch(block=64, num_warps=4, num_stages=2),
    (2, 256): Launch(block=32, num_warps=4, num_stages=2),
    (4, 64): Launch(block=32, num_warps=8, num_stages=2),
    (4, 128): Launch(block=16, num_warps=8, num_stages=2),
    (4, 256): Launch(block=16, num_warps=8, num_stages=1),
}
WIDE_TILE = 8_192
"""Query rows times value width from which a tile takes 8 warps."""


@triton.jit(do_not_specialize=["num_out"])
def _ragged_attention_fwd_kernel(
    p_q,  # [N, Hq, D]
    p_k,  # [slots, Hkv, S, D]
    p_v,  # [slots, Hkv, S, Dv]
    p_sinks,  # [Hq] float32
    p_tiles,  # [tiles, 5] int32: slot, position of the first token, its place in N, tokens, in O
    p_out,  # [splits, O, Hq, Dv]
    p_lse,  # [splits, O, Hq] float32
    scale,
    cap,
    num_out,
    num_kv,
    window,
    split_tokens,
    stride_q_token,
    stride_q_head,
    stride_k_slot,
    stride_k_head,
    stride_k_token,
    stride_v_slot,
    stride_v_head,
    stride_v_token,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    LOG2E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_split = tl.program_id(2)
    b_slot = tl.load(p_tiles + i_tile * 5).to(tl.int64)
    b_first = tl.load(p_tiles + i_tile * 5 + 1)
    b_start = tl.load(p_tiles + i_tile * 5 + 2)
    b_count = tl.load(p_tiles + i_tile * 5 + 3)
    b_target = tl.load(p_tiles + i_tile * 5 + 4)

    o_m = tl.arange(0, BLOCK_M)  # [M]: token, then head within the group
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_token = o_m // GROUP
    o_head = i_kv * GROUP + o_m % GROUP
    m_row = o_token < b_count
    b_place = b_first + o_token  # [M]: position
    o_q = (b_start + o_token).to(tl.int64) * stride_q_token
    o_q += o_head.to(tl.int64) * stride_q_head  # [M]
    m_q = m_row[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=m_q, other=0.0)  # [M, D]

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - known when compiling, unlike the split
        if i_split == 0:  # a sink is one more score without a value, counted once
            b_sink = tl.load(p_sinks + o_head, mask=m_row, other=0.0).to(tl.float32)
            b_m = b_sink * LOG2E
            b_l += 1.0
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    p_keys = p_k + b_slot * stride_k_slot + i_kv.to(tl.int64) * stride_k_head
    p_values = p_v + b_slot * stride_v_slot + i_kv.to(tl.int64) * stride_v_head
    b_end = b_first + b_count
    b_low = 0
    if HAS_WINDOW:
        b_low = tl.maximum(b_first + 1 - window, 0) // BLOCK_N * BLOCK_N
    b_low = b_low + i_split * split_tokens
    b_high = tl.minimum(b_end, b_low + split_tokens)
    for i_key in range(b_low, b_high, BLOCK_N):
        o_key = i_key + o_n  # [N]: position in the cache
        m_key = o_key < b_high
        b_k, b_v = load_tile(
            p_keys, p_values, o_key, m_key, o_d, o_dv, stride_k_token, stride_v_token, D, DV
        )
        m_seen = m_row[:, None] & m_key[None, :] & (o_key[None, :] <= b_place[:, None])
        if HAS_WINDOW:
            m_seen = m_seen & (o_key[None, :] > b_place[:, None] - window)
        b_acc, b_m, b_l = attend_tile(b_q, b_k, b_v, m_seen, b_acc, b_m, b_l, scale, cap, HAS_CAP)

    b_out, b_lse = finish(b_acc, b_m, b_l)
    o_out = i_split.to(tl.int64) * num_out + b_target + o_token
    o_out = o_out * (num_kv * GROUP) + o_head  # [M]
    tl.store(p_lse + o_out, b_lse, mask=m_row)
    m_out = m_row
    if IS_PARTIAL:
        m_out = m_row & (b_l > 0)  # the merge reads no part whose log-sum-exp is -inf
    m_store = m_out[:, None] & (o_dv < DV)[None, :]
    p_rows = p_out + o_out[:, None] * DV + o_dv[None, :]
    tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_store)


def choose(dim: int, dim_v: int, element_bytes: int, tile_rows: int) -> Launch:
    """Return the launch options for head widths, an element size and a tile's rows."""
    launch = LAUNCHES[element_bytes, min(256, power_of_two(max(dim, dim_v), 64))]
    if tile_rows * power_of_two(dim_v, MIN_DOT) >= WIDE_TILE:
        return Launch(launch.block, 8, launch.num_stages)
    return launch


def constants(
    group: int, dims: tuple[int, int], tile_rows: int, block_n: int, features: dict[str, bool]
) -> dict[str, object]:
    """Return the compile-time arguments of a regime; `features` are its HAS_ and IS_ flags."""
    return {
        "GROUP": group,
        "D": dims[0],
        "DV": dims[1],
        "LOG2E": LOG2_E,
        "BLOCK_M": tile_rows,
        "BLOCK_N": block_n,
        "BLOCK_D": power_of_two(dims[0], MIN_DOT),
        "BLOCK_DV": power_of_two(dims[1], MIN_DOT),
        **features,
    }


def ragged_attention_fwd(
    query: torch.Tensor,  # [N, Hq, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    plan: Plan,
    out: torch.Tensor,  # [N, Hq, Dv]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]
) -> None:
    """Launch the kernel once per tile height, and the merge where short runs are split."""
    num_heads, dim = query.shape[1:]
    num_kv, dim_v = key.shape[1], value.shape[-1]
    group = num_heads // num_kv
    features = {
        "HAS_WINDOW": window is not None,
        "HAS_CAP": softcap is not None,
        "HAS_SINKS": sinks is not None,
    }

    def launch(
        table: torch.Tensor, rows: int, split: int, target: torch.Tensor, sums: torch.Tensor
    ) -> None:
        num_splits, num_out = sums.shape[:2]
        chosen = choose(dim, dim_v, key.element_size(), rows)
        flags = {**features, "IS_PARTIAL": num_splits > 1}
        _ragged_attention_fwd_kernel[(len(table), num_kv, num_splits)](
            query, key, value, query if sinks is None else sinks, table, target, sums,
            scale, softcap or 0.0, num_out, num_kv, window or 0, split,
            *query.stride()[:2], *key.stride()[:3], *value.stride()[:3],
            **constants(group, (dim, dim_v), rows, chosen.block, flags),
            num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip

    if plan.long:
        lse = out.new_empty((1, out.shape[0], num_heads), dtype=torch.float32)
        launch(plan.table(0, out.device), plan.long_rows, NO_SPLIT, out, lse)
    if not plan.short:
        return
    # Beside a prompt, or split, the short runs write to a buffer of their own.
    num_short, is_split = len(plan.short_places), plan.num_splits > 1
    result = out.new_empty(num_short, num_heads, dim_v) if plan.long else out
    parts, sums = result, result.new_empty((1, num_short, num_heads), dtype=torch.float32)
    if is_split:
        shape = (plan.num_splits, num_short, num_heads)
        parts = result.new_empty((*shape, dim_v), dtype=torch.float32)
        sums = sums.new_empty(shape)
    for rows in plan.short:
        launch(plan.table(rows, out.device), rows, SPLIT_TOKENS, parts, sums)
    if is_split:
        merge_lse_fwd(parts, sums, result, sums.new_empty(sums.shape[1:]))
    if plan.long:
        out.index_copy_(0, plan.places(out.device), result)


REGIMES = (
    ("bf16", 128, 4, 16),
    ("bf16", 128, 4, 64),
    ("bf16", 256, 8, 64),
    ("fp32", 128, 4, 32),
    ("fp32", 256, 4, 16),
)
"""Type, head width, group and tile height of the variants compiled ahead of time."""


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    plain = dict.fromkeys(("HAS_WINDOW", "HAS_CAP", "HAS_SINKS", "IS_PARTIAL"), False)
    found = [_build(*regime, plain) for regime in REGIMES]
    everything = dict.fromkeys(plain, True)
    return [*found, _build("bf16", 128, 4, 32, everything)]


def _build(dtype: str, dim: int, group: int, rows: int, features: dict[str, bool]) -> Build:
    launch = choose(dim, dim, 4 if dtype == "fp32" else 2, rows)
    pointers = dict.fromkeys(("p_q", "p_k", "p_v"), dtype)
    pointers |= {"p_sinks": "fp32", "p_tiles": "i32", "p_lse": "fp32"}
    pointers["p_out"] = "fp32" if features["IS_PARTIAL"] else dtype
    every = " window cap sinks" * features["HAS_WINDOW"]
    return Build(
        name=f"{dtype} D{dim} G{group} M{rows}{every}",
        kernel=_ragged_attention_fwd_kernel,
        pointers=pointers,
        constants=constants(group, (dim, dim), rows, launch.block, features),
        launch=launch,
        floats=("scale", "cap"),
    )
