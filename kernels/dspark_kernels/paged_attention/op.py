"""Public op: attention over a list of cache pages."""

from __future__ import annotations

import torch

from dspark_kernels.checks import (
    FLOATS,
    INTEGERS,
    require_contiguous,
    require_dtype,
    require_groups,
    require_last_axis_contiguous,
    require_range,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.paged_attention.reference import paged_attention_reference
from dspark_kernels.tiles import MAX_TILE, MIN_DOT, PAGE_SIZE, power_of_two


def paged_attention(
    query: torch.Tensor,  # [R, Hq, T, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    pages: torch.Tensor,  # [R, Hkv, K]
    counts: torch.Tensor,  # [R, Hkv]
    slots: torch.Tensor,  # [R]
    lengths: torch.Tensor,  # [R]
    *,
    scale: float,
    page_size: int = PAGE_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, Hq, T, Dv], [R, Hq, T]
    """Attend each row's newest tokens to the listed pages of its slot only.

    Every listed page is read once for all query heads of its group and all T tokens, so verifying
    a draft costs the keys and values of one token. Token t of row r is at position
    `lengths[r] - T + t` and sees listed positions up to its own.

    Args:
        query: Queries of the newest T tokens of each row, of shape (R, Hq, T, D). A row with fewer
            has them at the end; what comes out for the others means nothing.
        key: Cached keys, those of the new tokens included, of shape (slots, Hkv, S, D).
        value: Cached values of shape (slots, Hkv, S, Dv).
        pages: Page numbers to read, int32 of shape (R, Hkv, K), each listed once; what lies behind
            `counts` is not read. The pages of the newest tokens must be among them for a token to
            see itself.
        counts: Listed pages, int32 of shape (R, Hkv), each at most K.
        slots: Cache slot of each row, of shape (R,).
        lengths: Cached tokens of each row, the new ones included, of shape (R,); positions from
            there on are neither read nor seen, so the last page may be partly filled.
        scale: Factor on the dot products.
        page_size: Tokens per page, a power of two.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: Output in the type of `query`, contiguous, and natural
        log-sum-exp, float32. A token that sees nothing gets zeros and -inf. Attention sinks can be
        added afterwards: `out * sigmoid(lse - sink)`.

    Raises:
        ValueError: If shapes, types or devices do not fit.
        NotImplementedError: On a GPU, if group times tokens is more than one tile holds.

    Limits: group * T * Dv (rounded up to powers of two) at most 16384, float32 4096, as the
    accumulator stays in registers: T up to 32 for a group of 4 and D 128. `page_size` a power of
    two from 8 to 64, D at most 256.
    Numerics: products and softmax in float32, weights rounded to the value type before the second
    product; bounds tested: 2e-5 relative RMS in float32, 1.5e-2 in bfloat16.
    Layout: last axes contiguous, other strides free; `pages` and `counts` contiguous.
    Batch: a row's result does not depend on other rows: lists are split every 256 tokens, and
    empty splits behind a short list change nothing.
    Cost: K * page_size * (D + Dv) elements per row and key head; no copy of pages.
    Source: Tang et al., Quest, arXiv:2406.10774 (attention over chosen pages); Flash-Decoding
    (Dao, Haziza, Massa, Sizov, 2023) for the splits.
    """
    num_rows, num_heads, num_queries, dim = _check(query, key, value, pages, counts, slots, lengths)
    if page_size != power_of_two(page_size) or not 8 <= page_size <= 64:
        raise ValueError(
            f"page_size must be a power of two between 8 and 64; got {page_size}. Use {PAGE_SIZE}."
        )
    device = require_same_device(
        query=query, key=key, value=value, pages=pages, counts=counts, slots=slots, lengths=lengths
    )
    if not runs_triton(device):
        return paged_attention_reference(
            query, key, value, pages, counts, slots, lengths, scale=scale, page_size=page_size
        )
    from dspark_kernels.paged_attention.kernel import paged_attention_fwd

    rows = power_of_two(num_heads // key.shape[1] * num_queries, MIN_DOT)
    most = MAX_TILE[key.element_size()]
    if rows * power_of_two(value.shape[-1], MIN_DOT) > most or dim > 256:
        raise NotImplementedError(
            f"query heads per key head x tokens x value width must be at most {most} and D at "
            f"most 256; got {rows} x {value.shape[-1]} and D {dim}. Attend fewer tokens per call."
        )
    out = query.new_empty(num_rows, num_heads, num_queries, value.shape[-1])
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=device)
    paged_attention_fwd(
        query, key, value, pages, counts, slots, lengths, out, lse, scale=scale, page_size=page_size
    )
    return out, lse


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[int, int, int, int]:
    require_shape("query", query, ("R", "Hq", "T", "D"))
    num_rows, num_heads, num_queries, dim = query.shape
    require_range("T", num_queries, 1)
    require_shape("key", key, ("slots", "Hkv", "S", dim))
    require_shape("value", value, (*key.shape[:3], "Dv"))
    require_groups(num_heads, key.shape[1])
    require_shape("pages", pages, (num_rows, key.shape[1], "K"))
    require_shape("counts", counts, (num_rows, key.shape[1]))
    require_shape("slots", slots, (num_rows,))
    require_shape("lengths", lengths, (num_rows,))
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_dtype(name, tensor, FLOATS)
        require_dtype(name, tensor, (query.dtype,))
        require_last_axis_contiguous(name, tensor)
    for name, tensor in (("pages", pages), ("counts", counts)):
        require_dtype(name, tensor, (torch.int32,))
        require_contiguous(name, tensor)
    for name, tensor in (("slots", slots), ("lengths", lengths)):
        require_dtype(name, tensor, INTEGERS)
        require_contiguous(name, tensor)
    return num_rows, num_heads, num_queries, dim
