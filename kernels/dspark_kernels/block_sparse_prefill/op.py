"""Public op: prompt attention over a list of pages per tile of queries."""

from __future__ import annotations

import torch

from dspark_kernels.block_sparse_prefill.reference import (
    QUERY_TILE,
    block_sparse_prefill_reference,
)
from dspark_kernels.checks import (
    FLOATS,
    INTEGERS,
    require_contiguous,
    require_dtype,
    require_groups,
    require_last_axis_contiguous,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.tiles import PAGE_SIZE, ceil_div, power_of_two

MAX_DIM = {2: 256, 4: 128}
"""Widest head, by bytes per element."""


def block_sparse_prefill(
    query: torch.Tensor,  # [R, Hq, N, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    pages: torch.Tensor,  # [R, Hkv, tiles, K]
    counts: torch.Tensor,  # [R, Hkv, tiles]
    slots: torch.Tensor,  # [R]
    past: torch.Tensor,  # [R]
    *,
    scale: float,
    page_size: int = PAGE_SIZE,
) -> torch.Tensor:  # [R, Hq, N, Dv]
    """Attend each tile of 64 prompt tokens to the pages listed for it, causally.

    Query n of row r is at position `past[r] + n` and sees listed positions up to its own, so the
    lists may name the tile's own pages in full; they must, for a token to see itself. This is not
    the model's own attention and off by default: its effect on quality is measured apart.

    Args:
        query: Queries of a prompt, or of a part of it, of shape (R, Hq, N, D).
        key: Cached keys, the prompt's own included, of shape (slots, Hkv, S, D).
        value: Cached values of shape (slots, Hkv, S, Dv).
        pages: Page numbers to read for each tile of 64 queries and key head, int32 of shape
            (R, Hkv, ceil(N / 64), K), each listed once; what lies behind `counts` is not read.
        counts: Listed pages, int32 of shape (R, Hkv, tiles), each at most K.
        slots: Cache slot of each row, of shape (R,).
        past: Cached tokens before the queries, of shape (R,).
        scale: Factor on the dot products.
        page_size: Tokens per page, a power of two.

    Returns:
        torch.Tensor: Of shape (R, Hq, N, Dv), contiguous; zeros for a query that sees nothing.

    Raises:
        ValueError: If shapes, types or devices do not fit.
        NotImplementedError: On a GPU, for heads wider than the limits.

    Limits: D and Dv at most 256, float32 128 (registers); `page_size` from 8 to 64.
    Numerics: float32 products and softmax, weights rounded to the value type before the second
    product; bounds tested: 2e-5 relative RMS in float32, 1.5e-2 in bfloat16.
    Layout: last axes contiguous, other strides free; `pages` and `counts` contiguous.
    Batch: a row's result does not depend on other rows.
    Cost: K * page_size * (D + Dv) elements per tile and query head, the group's from the L2 cache.
    Source: Jiang et al., MInference, arXiv:2407.02490, and Lai et al., FlexPrefill,
    arXiv:2502.20766 (block lists per query tile); the kernel after FlashAttention,
    arXiv:2205.14135.
    """
    require_shape("query", query, ("R", "Hq", "N", "D"))
    num_rows, num_heads, num_queries, dim = query.shape
    require_shape("key", key, ("slots", "Hkv", "S", dim))
    require_shape("value", value, (*key.shape[:3], "Dv"))
    require_groups(num_heads, key.shape[1])
    num_tiles = ceil_div(num_queries, QUERY_TILE)
    require_shape("pages", pages, (num_rows, key.shape[1], num_tiles, "K"))
    require_shape("counts", counts, pages.shape[:3])
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_dtype(name, tensor, FLOATS)
        require_dtype(name, tensor, (query.dtype,))
        require_last_axis_contiguous(name, tensor)
    for name, tensor in (("pages", pages), ("counts", counts)):
        require_dtype(name, tensor, (torch.int32,))
        require_contiguous(name, tensor)
    for name, tensor in (("slots", slots), ("past", past)):
        require_shape(name, tensor, (num_rows,))
        require_dtype(name, tensor, INTEGERS)
        require_contiguous(name, tensor)
    if page_size != power_of_two(page_size) or not 8 <= page_size <= 64:
        raise ValueError(
            f"page_size must be a power of two between 8 and 64; got {page_size}. Use {PAGE_SIZE}."
        )
    device = require_same_device(
        query=query, key=key, value=value, pages=pages, counts=counts, slots=slots, past=past
    )
    if not runs_triton(device):
        return block_sparse_prefill_reference(
            query, key, value, pages, counts, slots, past, scale=scale, page_size=page_size
        )
    from dspark_kernels.block_sparse_prefill.kernel import block_sparse_prefill_fwd

    widest = MAX_DIM[key.element_size()]
    if max(dim, value.shape[-1]) > widest:
        raise NotImplementedError(
            f"heads must be at most {widest} wide in {key.dtype}; got D {dim} and Dv "
            f"{value.shape[-1]}. Use dense attention for this model's prompts."
        )
    out = query.new_empty(num_rows, num_heads, num_queries, value.shape[-1])
    block_sparse_prefill_fwd(
        query, key, value, pages, counts, slots, past, out, scale=scale, page_size=page_size
    )
    return out
