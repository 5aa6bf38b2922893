"""Device functions shared by the attention kernels: tiles of keys into a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def listed_keys(p_list, i_page, i_last, o_n, b_end, PAGE: tl.constexpr):
    """Positions [N] of the keys of listed pages from `i_page` on, and which of them are real.

    The list ends at `i_last`, the row's keys at `b_end`.
    """
    o_page = i_page + o_n // PAGE  # [N]
    b_page = tl.load(p_list + o_page, mask=o_page < i_last, other=-1)
    b_at = b_page * PAGE + o_n % PAGE
    return b_at, (b_page >= 0) & (b_at < b_end)


@triton.jit
def load_tile(
    p_keys, p_values, b_at, m_key, o_d, o_dv, stride_k_token, stride_v_token,
    D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Keys [D, N] and values [N, Dv] at positions of the cache; zeros where `m_key` is not set."""
    o_at = b_at.to(tl.int64)
    p_tile = p_keys + o_at[None, :] * stride_k_token + o_d[:, None]
    b_k = tl.load(p_tile, mask=m_key[None, :] & (o_d < D)[:, None], other=0.0)
    p_tile = p_values + o_at[:, None] * stride_v_token + o_dv[None, :]
    b_v = tl.load(p_tile, mask=m_key[:, None] & (o_dv < DV)[None, :], other=0.0)
    return b_k, b_v


@triton.jit
def soft_cap(b_s, cap):  # [M, N]
    """`cap * tanh(s / cap)`, by an exponential: the interpreter has no tanh."""
    return cap * (1.0 - 2.0 / (tl.exp(b_s * (2.0 / cap)) + 1.0))


@triton.jit
def attend_tile(b_q, b_k, b_v, m_seen, b_acc, b_m, b_l, scale, cap, HAS_CAP: tl.constexpr):
    """Attend query rows to a tile of keys.

    `b_q` [M, D], `b_k` [D, N], `b_v` [N, Dv], `m_seen` [M, N]; running output `b_acc` [M, Dv],
    maximum `b_m` [M] and sum `b_l` [M], in base 2 and float32. Rows that see nothing stay as they
    are.
    """
    b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale  # [M, N]
    if HAS_CAP:
        b_s = soft_cap(b_s, cap)
    b_s = tl.where(m_seen, b_s * 1.4426950408889634, float("-inf"))
    b_top = tl.maximum(b_m, tl.max(b_s, 1))  # [M]
    # A row that has seen nothing yet keeps a maximum of -inf; -inf minus -inf would be NaN.
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_w = tl.exp2(b_s - b_base[:, None])  # [M, N]
    b_shrink = tl.exp2(b_m - b_base)  # [M]
    b_l = b_l * b_shrink + tl.sum(b_w, 1)
    b_acc = tl.dot(b_w.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_top, b_l


@triton.jit
def finish(b_acc, b_m, b_l):
    """Normalise: output [M, Dv] (zeros where nothing was seen) and natural log-sum-exp [M]."""
    b_out = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
    b_log = tl.log2(tl.where(b_l > 0, b_l, 1.0))
    b_lse = tl.where(b_l > 0, (b_m + b_log) * 0.6931471805599453, float("-inf"))
    return b_out, b_lse
