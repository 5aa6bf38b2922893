"""Triton: accept per row, sum the residual by blocks of the vocabulary, then find the token.

The residual is formed twice, in registers; neither it nor a running sum over V is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.tiles import Build, Launch, ceil_div, power_of_two

BLOCK = 1024
"""Vocabulary entries per program; fixed, so that sums do not depend on the batch."""
LAUNCH = Launch(block=BLOCK, num_warps=4, num_stages=1)
FAR = 2**31 - 1
"""An index behind every other."""


@triton.jit(do_not_specialize=["num_drafts"])
def _accept_fwd_kernel(
    p_ids,  # [R, N] int64
    p_target,  # [R, N + 1, V] float32
    p_draft,  # [R, N, V] float32
    p_lengths,  # [R]
    p_uniforms,  # [R, N + 1] float32
    p_accepted,  # [R] int64
    num_drafts,
    num_tokens,
    HAS_DRAFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    b_length = tl.load(p_lengths + i_row).to(tl.int32)
    m_n = (o_n < b_length) & (o_n < num_drafts)
    b_id = tl.load(p_ids + i_row * num_drafts + o_n, mask=m_n, other=-1).to(tl.int64)  # [N]
    m_id = m_n & (b_id >= 0) & (b_id < num_tokens)
    o_target = (i_row * (num_drafts + 1) + o_n) * num_tokens + b_id
    b_chance = tl.load(p_target + o_target, mask=m_id, other=0.0)
    if HAS_DRAFT:
        o_draft = (i_row * num_drafts + o_n) * num_tokens + b_id
        b_claimed = tl.load(p_draft + o_draft, mask=m_id, other=1.0)
        b_ratio = tl.div_rn(b_chance, tl.where(b_claimed > 0, b_claimed, 1.0))
        b_chance = tl.where(b_claimed > 0, b_ratio, tl.where(b_chance > 0, 1.0, 0.0))
    o_uniform = i_row * (num_drafts + 1) + o_n
    b_uniform = tl.load(p_uniforms + o_uniform, mask=m_n, other=0.0)
    b_rejected = m_n & ~(b_uniform < b_chance)
    b_count = tl.min(tl.where(b_rejected, o_n, tl.minimum(b_length, num_drafts)), 0)
    tl.store(p_accepted + i_row, b_count.to(tl.int64))


@triton.jit
def _residual(
    p_ids, p_target, p_draft, i_row, b_count, b_length, num_drafts, num_tokens, o_v,
    HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Target probabilities and what the drafter left of them, both [V], at the row's position."""
    m_v = o_v < num_tokens
    o_target = (i_row * (num_drafts + 1) + b_count) * num_tokens + o_v
    b_p = tl.load(p_target + o_target, mask=m_v, other=0.0)
    is_rejected = b_count < b_length
    if HAS_DRAFT:
        o_draft = (i_row * num_drafts + b_count) * num_tokens + o_v
        b_q = tl.load(p_draft + o_draft, mask=m_v & is_rejected, other=0.0)
        b_rest = tl.maximum(b_p - b_q, 0.0)
    else:
        b_id = tl.load(p_ids + i_row * num_drafts + b_count, mask=is_rejected, other=-1)
        b_rest = tl.where(o_v == b_id, 0.0, b_p)
    return b_p, b_rest


@triton.jit(do_not_specialize=["num_rows", "num_drafts"])
def _residual_sum_fwd_kernel(
    p_ids,
    p_target,
    p_draft,
    p_lengths,
    p_accepted,
    p_sums,  # [2, R, blocks] float32: of the residual, of the target
    num_rows,
    num_drafts,
    num_tokens,
    HAS_DRAFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    b_count = tl.load(p_accepted + i_row)
    b_length = tl.minimum(tl.load(p_lengths + i_row).to(tl.int32), num_drafts)
    o_v = i_block * BLOCK_V + tl.arange(0, BLOCK_V)
    b_p, b_rest = _residual(
        p_ids, p_target, p_draft, i_row, b_count, b_length, num_drafts, num_tokens, o_v, HAS_DRAFT
    )
    o_sum = i_row * tl.num_programs(1) + i_block
    tl.store(p_sums + o_sum, tl.sum(b_rest, 0))
    o_sum += num_rows.to(tl.int64) * tl.num_programs(1)
    tl.store(p_sums + o_sum, tl.sum(b_p, 0))


@triton.jit
def _first_passing(b_w, o_at, b_goal, FAR: tl.constexpr):
    """Index at which the running sum of `b_w` passes `b_goal`; else the last one with weight."""
    b_passed = (b_w > 0) & (tl.cumsum(b_w, 0) > b_goal)
    b_first = tl.min(tl.where(b_passed, o_at, FAR), 0)
    b_last = tl.max(tl.where(b_w > 0, o_at, 0), 0)
    return tl.where(b_first == FAR, b_last, b_first)


@triton.jit(do_not_specialize=["num_rows", "num_drafts", "num_blocks"])
def _pick_fwd_kernel(
    p_ids,
    p_target,
    p_draft,
    p_lengths,
    p_accepted,
    p_uniforms,
    p_sums,
    p_token,  # [R] int64
    num_rows,
    num_drafts,
    num_tokens,
    num_blocks,
    HAS_DRAFT: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < num_blocks
    p_rest = p_sums + i_row * num_blocks
    b_sums = tl.load(p_rest + o_b, mask=m_b, other=0.0)  # [B]
    is_left = tl.sum(b_sums, 0) > 0
    p_whole = p_rest + num_rows.to(tl.int64) * num_blocks
    b_sums = tl.where(is_left, b_sums, tl.load(p_whole + o_b, mask=m_b, other=0.0))
    b_uniform = tl.load(p_uniforms + i_row * (num_drafts + 1) + num_drafts)
    b_goal = b_uniform * tl.sum(b_sums, 0)
    i_block = _first_passing(b_sums, o_b, b_goal, FAR)
    b_goal -= tl.sum(tl.where(o_b < i_block, b_sums, 0.0), 0)
    b_count = tl.load(p_accepted + i_row)
    b_length = tl.minimum(tl.load(p_lengths + i_row).to(tl.int32), num_drafts)
    o_v = i_block * BLOCK_V + tl.arange(0, BLOCK_V)
    b_p, b_rest = _residual(
        p_ids, p_target, p_draft, i_row, b_count, b_length, num_drafts, num_tokens, o_v, HAS_DRAFT
    )
    b_token = _first_passing(tl.where(is_left, b_rest, b_p), o_v, b_goal, FAR)
    tl.store(p_token + i_row, b_token.to(tl.int64))


def rejection_sample_fwd(
    draft_ids: torch.Tensor,  # [R, N]
    target_probs: torch.Tensor,  # [R, N + 1, V]
    draft_probs: torch.Tensor | None,  # [R, N, V]
    lengths: torch.Tensor,  # [R]
    uniforms: torch.Tensor,  # [R, N + 1]
    accepted: torch.Tensor,  # [R]
    token: torch.Tensor,  # [R]
) -> None:
    """Launch the three kernels; all tensors contiguous."""
    num_rows, num_drafts = draft_ids.shape
    size = target_probs.shape[-1]
    if num_rows == 0:
        return
    blocks = ceil_div(size, BLOCK)
    sums = torch.empty(2, num_rows, blocks, device=token.device)
    has_draft = draft_probs is not None
    given = (draft_ids, target_probs, target_probs if draft_probs is None else draft_probs, lengths)
    options = {"num_warps": LAUNCH.num_warps, "num_stages": LAUNCH.num_stages}
    _accept_fwd_kernel[(num_rows,)](
        *given, uniforms, accepted, num_drafts, size, HAS_DRAFT=has_draft,
        BLOCK_N=power_of_two(num_drafts, 2), num_warps=1,
    )  # fmt: skip
    _residual_sum_fwd_kernel[(num_rows, blocks)](
        *given, accepted, sums, num_rows, num_drafts, size, HAS_DRAFT=has_draft, BLOCK_V=BLOCK,
        **options,
    )  # fmt: skip
    _pick_fwd_kernel[(num_rows,)](
        *given, accepted, uniforms, sums, token, num_rows, num_drafts, size, blocks,
        HAS_DRAFT=has_draft, FAR=FAR, BLOCK_V=BLOCK, BLOCK_B=power_of_two(blocks, 2), **options,
    )  # fmt: skip


def builds() -> list[Build]:
    """Return the variants that are compiled ahead of time."""
    given = {"p_ids": "i64", "p_target": "fp32", "p_draft": "fp32", "p_lengths": "i64"}
    given |= {"p_accepted": "i64"}
    extra = {"p_uniforms": "fp32"}
    flag = {"HAS_DRAFT": True}
    one = Launch(BLOCK, 1, 1)
    pick = {**flag, "FAR": FAR, "BLOCK_V": BLOCK, "BLOCK_B": 256}
    sums = {"p_sums": "fp32"}
    return [
        Build("accept N8", _accept_fwd_kernel, given | extra, {**flag, "BLOCK_N": 8}, one),
        Build("sums", _residual_sum_fwd_kernel, given | sums, {**flag, "BLOCK_V": BLOCK}, LAUNCH),
        Build("pick", _pick_fwd_kernel, given | extra | sums | {"p_token": "i64"}, pick, LAUNCH),
    ]
