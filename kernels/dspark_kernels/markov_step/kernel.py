"""Triton: each program scores a block of the vocabulary for a tile of rows; a second one reduces.

The V-wide sum stays in registers. Every row of `weight` is read once for all rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.tiles import LN_2, LOG2_E, MIN_DOT, Build, Launch, ceil_div, power_of_two

BLOCK_ROWS = 16
"""Rows per tile: what tensor cores need at least, and enough for a batch of drafts; fixed."""
PARTS = 1024
"""Blocks reduced per step."""
NOWHERE = 2**31 - 1
"""A token that loses every tie."""

LAUNCHES = {  # bytes per element: vocabulary entries per program
    2: Launch(block=128, num_warps=4, num_stages=2),
    4: Launch(block=64, num_warps=4, num_stages=2),
}


@triton.jit(do_not_specialize=["num_rows"])
def _markov_step_fwd_kernel(
    p_base,  # [R, V]
    p_weight,  # [V, r]
    p_code,  # [R, r]
    p_noise,  # [R, V]
    p_best,  # [blocks, R] float32: highest perturbed score
    p_token,  # [blocks, R] int32: its token
    p_score,  # [blocks, R] float32: its score without noise
    p_top,  # [blocks, R] float32: highest score
    p_sum,  # [blocks, R] float32: sum of exp2(score - top)
    inverse_temperature,
    num_rows,
    num_tokens,
    stride_base,
    stride_weight,
    stride_code,
    stride_noise,
    RANK: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    LOG2E: tl.constexpr,
    NOWHERE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_block = tl.program_id(0)
    o_v = i_block * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
    o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)  # [R]
    o_k = tl.arange(0, BLOCK_K)
    m_v = o_v < num_tokens
    m_r = o_r < num_rows
    o_row = o_r.to(tl.int64)
    o_entry = o_v.to(tl.int64)
    b_s = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for i_k in range(0, RANK, BLOCK_K):
        m_k = i_k + o_k < RANK
        p_tile = p_code + o_row[:, None] * stride_code + (i_k + o_k)[None, :]
        b_code = tl.load(p_tile, mask=m_r[:, None] & m_k[None, :], other=0.0)  # [R, K]
        p_tile = p_weight + o_entry[None, :] * stride_weight + (i_k + o_k)[:, None]
        b_weight = tl.load(p_tile, mask=m_k[:, None] & m_v[None, :], other=0.0)  # [K, V]
        b_s = tl.dot(b_code, b_weight, b_s, input_precision="ieee")
    m_tile = m_r[:, None] & m_v[None, :]
    p_tile = p_base + o_row[:, None] * stride_base + o_entry[None, :]
    b_s += tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)  # [R, V]
    b_s = tl.where(m_v[None, :], b_s * inverse_temperature, float("-inf"))
    b_p = b_s
    if HAS_NOISE:
        p_tile = p_noise + o_row[:, None] * stride_noise + o_entry[None, :]
        b_p = b_s + tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    b_best = tl.max(b_p, 1)  # [R]
    b_is_best = (b_p == b_best[:, None]) & m_v[None, :]
    b_token = tl.min(tl.where(b_is_best, o_v[None, :], NOWHERE), 1)
    b_score = tl.max(tl.where(o_v[None, :] == b_token[:, None], b_s, float("-inf")), 1)
    b_top = tl.max(b_s, 1)
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_sum = tl.sum(tl.exp2((b_s - b_base[:, None]) * LOG2E), 1)
    o_out = i_block.to(tl.int64) * num_rows + o_r
    tl.store(p_best + o_out, b_best, mask=m_r)
    tl.store(p_token + o_out, b_token, mask=m_r)
    tl.store(p_score + o_out, b_score, mask=m_r)
    tl.store(p_top + o_out, b_top, mask=m_r)
    tl.store(p_sum + o_out, b_sum, mask=m_r)


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def _markov_choice_fwd_kernel(
    p_best,  # [blocks, R]
    p_token,
    p_score,
    p_top,
    p_sum,
    p_out,  # [R] int64
    p_chosen,  # [R] float32
    p_lse,  # [R] float32
    num_blocks,
    num_rows,
    LOG2E: tl.constexpr,
    LN2: tl.constexpr,
    NOWHERE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_b = tl.arange(0, BLOCK)
    b_best = float("-inf")
    b_token = NOWHERE
    b_score = float("-inf")
    b_top = float("-inf")
    b_sum = 0.0
    for i_block in range(0, num_blocks, BLOCK):
        o_part = i_block + o_b
        m_part = o_part < num_blocks
        o_at = o_part.to(tl.int64) * num_rows + i_row
        b_bests = tl.load(p_best + o_at, mask=m_part, other=float("-inf"))  # [B]
        b_tokens = tl.load(p_token + o_at, mask=m_part, other=NOWHERE)
        b_scores = tl.load(p_score + o_at, mask=m_part, other=float("-inf"))
        b_tops = tl.load(p_top + o_at, mask=m_part, other=float("-inf"))
        b_sums = tl.load(p_sum + o_at, mask=m_part, other=0.0)
        b_high = tl.max(b_bests, 0)
        b_first = tl.min(tl.where(b_bests == b_high, b_tokens, NOWHERE), 0)
        b_its = tl.max(tl.where(b_tokens == b_first, b_scores, float("-inf")), 0)
        # Strictly above: among equals the earlier block, so the lower token, stays.
        is_above = (b_high > b_best) | (b_token == NOWHERE)
        b_token = tl.where(is_above, b_first, b_token)
        b_score = tl.where(is_above, b_its, b_score)
        b_best = tl.maximum(b_best, b_high)
        b_new = tl.maximum(b_top, tl.max(b_tops, 0))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp2((b_top - b_base) * LOG2E)
        b_sum += tl.sum(b_sums * tl.exp2((b_tops - b_base) * LOG2E), 0)
        b_top = b_new
    tl.store(p_out + i_row, b_token.to(tl.int64))
    tl.store(p_chosen + i_row, b_score)
    tl.store(p_lse + i_row, b_top + tl.log2(b_sum) * LN2)


def constants(rank: int, launch: Launch, *, has_noise: bool) -> dict[str, object]:
    """Return the compile-time arguments of the scoring kernel."""
    return {
        "RANK": rank,
        "HAS_NOISE": has_noise,
        "LOG2E": LOG2_E,
        "NOWHERE": NOWHERE,
        "BLOCK_R": BLOCK_ROWS,
        "BLOCK_V": launch.block,
        "BLOCK_K": min(64, power_of_two(rank, MIN_DOT)),
    }


CHOICE: dict[str, object] = {"LOG2E": LOG2_E, "LN2": LN_2, "NOWHERE": NOWHERE, "BLOCK": PARTS}


def markov_step_fwd(
    base: torch.Tensor,  # [R, V]
    weight: torch.Tensor,  # [V, r]
    code: torch.Tensor,  # [R, r]
    noise: torch.Tensor | None,  # [R, V]
    token: torch.Tensor,  # [R]
    chosen: torch.Tensor,  # [R]
    lse: torch.Tensor,  # [R]
    *,
    temperature: float,
) -> None:
    """Launch both kernels."""
    num_rows, num_tokens = base.shape
    if num_rows == 0:
        return
    launch = LAUNCHES[weight.element_size()]
    blocks = ceil_div(num_tokens, launch.block)
    best, score, top, total = torch.empty(4, blocks, num_rows, device=base.device)
    tokens = torch.empty(blocks, num_rows, dtype=torch.int32, device=base.device)
    _markov_step_fwd_kernel[(blocks, ceil_div(num_rows, BLOCK_ROWS))](
        base, weight, code, base if noise is None else noise, best, tokens, score, top, total,
        1.0 / temperature, num_rows, num_tokens, base.stride(0), weight.stride(0), code.stride(0),
        0 if noise is None else noise.stride(0),
        **constants(weight.shape[1], launch, has_noise=noise is not None),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    _markov_choice_fwd_kernel[(num_rows,)](
        best, tokens, score, top, total, token, chosen, lse, blocks, num_rows, **CHOICE,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    parts = dict.fromkeys(("p_best", "p_score", "p_top", "p_sum"), "fp32") | {"p_token": "i32"}
    found = []
    for dtype, rank, has_noise in (("bf16", 256, True), ("fp32", 256, False)):
        launch = LAUNCHES[4 if dtype == "fp32" else 2]
        given = dict.fromkeys(("p_base", "p_weight", "p_code"), dtype) | {"p_noise": "fp32"}
        found.append(
            Build(
                name=f"{dtype} r{rank}" + " noise" * has_noise,
                kernel=_markov_step_fwd_kernel,
                pointers={**given, **parts},
                constants=constants(rank, launch, has_noise=has_noise),
                launch=launch,
                floats=("inverse_temperature",),
            )
        )
    results = {"p_out": "i64", "p_chosen": "fp32", "p_lse": "fp32"}
    launch = Launch(PARTS, 4, 1)
    return [*found, Build("choice", _markov_choice_fwd_kernel, parts | results, CHOICE, launch)]
