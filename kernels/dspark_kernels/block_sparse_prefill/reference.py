"""Reference: gather the pages listed for each tile and key head, then attend; also the CPU path."""

from __future__ import annotations

import torch

from dspark_kernels.paged_attention.reference import listed_positions
from dspark_kernels.tiles import PAGE_SIZE

QUERY_TILE = 64
"""Queries that share a list."""


def block_sparse_prefill_reference(
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
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # [R, Hq, N, Dv]
    """Attend as `block_sparse_prefill`; the output has the type of `query`, sums are in `dtype`."""
    num_rows, num_heads, num_queries, _ = query.shape
    num_kv = key.shape[1]
    group = num_heads // num_kv
    out = query.new_zeros(num_rows, num_heads, num_queries, value.shape[-1])
    for row, (slot, before) in enumerate(zip(slots.tolist(), past.tolist(), strict=True)):
        for tile in range(pages.shape[2]):
            span = slice(tile * QUERY_TILE, min(num_queries, (tile + 1) * QUERY_TILE))
            places = before + torch.arange(num_queries, device=query.device)[span]
            for head in range(num_kv):
                count = int(counts[row, head, tile])
                found = listed_positions(
                    pages[row, head, tile], count, before + span.stop, page_size
                )
                keys = key[slot, head].index_select(0, found).to(dtype)
                values = value[slot, head].index_select(0, found).to(dtype)
                heads = slice(head * group, (head + 1) * group)
                scores = scale * (query[row, heads, span].to(dtype) @ keys.T)
                scores.masked_fill_(found > places[:, None], -torch.inf)
                top = torch.logsumexp(scores, dim=-1, keepdim=True).nan_to_num(neginf=0.0)
                out[row, heads, span] = (torch.exp(scores - top) @ values).to(query.dtype)
    return out
