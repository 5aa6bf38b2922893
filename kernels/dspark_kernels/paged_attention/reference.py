"""Reference: gather the listed pages of each row and key head, then attend; also the CPU path."""

from __future__ import annotations

import torch

from dspark_kernels.tiles import PAGE_SIZE


def listed_positions(
    pages: torch.Tensor,  # [K]
    count: int,
    length: int,
    page_size: int,
) -> torch.Tensor:  # [S]
    """Return the cached positions on the first `count` pages of a list, those past `length` cut."""
    offsets = torch.arange(page_size, device=pages.device)
    positions = (pages[:count].long()[:, None] * page_size + offsets).flatten()
    return positions[positions < length]


def paged_attention_reference(
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
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, Hq, T, Dv], [R, Hq, T]
    """Attend as `paged_attention`; the output has the type of `query`, the sums are in `dtype`."""
    num_rows, num_heads, num_queries, dim = query.shape
    num_kv = key.shape[1]
    group = num_heads // num_kv
    out = query.new_zeros(num_rows, num_heads, num_queries, value.shape[-1])
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        places = length - num_queries + torch.arange(num_queries, device=query.device)
        for head in range(num_kv):
            found = listed_positions(pages[row, head], int(counts[row, head]), length, page_size)
            keys = key[slot, head].index_select(0, found).to(dtype)
            values = value[slot, head].index_select(0, found).to(dtype)
            heads = slice(head * group, (head + 1) * group)
            rows = query[row, heads].reshape(group * num_queries, dim).to(dtype)
            scores = (scale * (rows @ keys.T)).view(group, num_queries, -1)
            scores.masked_fill_(found[None, None] > places[None, :, None], -torch.inf)
            total = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - total.nan_to_num(neginf=0.0)[..., None])
            out[row, heads] = (weights @ values).to(query.dtype)
            lse[row, heads] = total.float()
    return out, lse
