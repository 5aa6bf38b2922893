"""Packed dense attention: the query heads of a group become rows of one matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation


def pack_mask(visible: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Turn a visibility mask into the additive mask of `packed_attention`.

    Args:
        visible: True where a query may look, bool of shape (B, T, S).
        group: Query heads per key head.
        dtype: Type of the queries.

    Returns:
        torch.Tensor: 0 or -inf, of shape (B, 1, group * T, S).
    """
    num_rows, num_queries, length = visible.shape
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(~visible, float("-inf"))
    mask = mask[:, None, None].expand(num_rows, 1, group, num_queries, length)
    return mask.reshape(num_rows, 1, group * num_queries, length)


def packed_attention(
    query: torch.Tensor,  # [B, Hq, T, D]
    key: torch.Tensor,  # [B, Hkv, S, D]
    value: torch.Tensor,  # [B, Hkv, S, Dv]
    mask: torch.Tensor | None,  # [B, 1, G * T, S]
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]
) -> torch.Tensor:  # [B, T, Hq, Dv]
    """Attend as `packed_attention_reference`, with the group's heads packed into the query axis.

    Without packing, the CPU kernel reads every key once per query head and few-query decoding is
    several times slower; packed, a group of G heads and T tokens is one product with G * T rows.

    Args:
        query: Queries of shape (B, Hq, T, D).
        key: Keys of shape (B, Hkv, S, D); any strides with a contiguous last axis, so a slice of
            a preallocated cache needs no copy.
        value: Values of shape (B, Hkv, S, Dv).
        mask: From `pack_mask`; every query must see something. None means everything is visible.
        scale: Factor on the dot products.
        softcap: c in c * tanh(x / c), applied before the softmax.
        sinks: One logit per query head that takes probability and gives no value.

    Returns:
        torch.Tensor: Of shape (B, T, Hq, Dv), contiguous.

    Numerics: float32 accumulation and softmax for every input type.
    """
    num_rows, num_heads, num_queries, dim = query.shape
    num_kv = key.shape[1]
    group = num_heads // num_kv
    packed = query.reshape(num_rows, num_kv, group * num_queries, dim)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    else:
        out = _attend_eager(packed, key, value, mask, scale, softcap, sinks, num_queries)
    out = out.view(num_rows, num_kv, group, num_queries, value.shape[-1])
    return out.permute(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, -1)


def _attend_eager(
    packed: torch.Tensor,  # [B, Hkv, G * T, D]
    key: torch.Tensor,  # [B, Hkv, S, D]
    value: torch.Tensor,  # [B, Hkv, S, Dv]
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    num_queries: int,
) -> torch.Tensor:  # [B, Hkv, G * T, Dv]
    scores = torch.matmul(packed, key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float().view(1, key.shape[1], -1, 1, 1)
        column = column.expand(packed.shape[0], -1, -1, num_queries, 1)
        scores = torch.cat([scores, column.reshape(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)
