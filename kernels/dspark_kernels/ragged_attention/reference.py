"""Reference: one loop per row, head and query, in float32 or float64. The text of the formula."""

from __future__ import annotations

import torch


def packed_attention_reference(
    query: torch.Tensor,  # [B, Hq, T, D]
    key: torch.Tensor,  # [B, Hkv, S, D]
    value: torch.Tensor,  # [B, Hkv, S, Dv]
    visible: torch.Tensor | None,  # [B, T, S]
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # [B, T, Hq, Dv]
    """Attend with `softmax(cap(scale * q k))`, a sink adding `exp(sink)` to the denominator.

    Args:
        query: Queries of shape (B, Hq, T, D).
        key: Keys of shape (B, Hkv, S, D); query head h reads key head h // (Hq / Hkv).
        value: Values of shape (B, Hkv, S, Dv).
        visible: True where a query may look, of shape (B, T, S); None means everywhere.
        scale: Factor on the dot products.
        softcap: c in c * tanh(x / c), applied before the softmax.
        sinks: One logit per query head that takes probability and gives no value.
        dtype: Arithmetic type.

    Returns:
        torch.Tensor: Of shape (B, T, Hq, Dv); a query that sees nothing gets zeros.
    """
    num_rows, num_heads, num_queries, _ = query.shape
    group = num_heads // key.shape[1]
    out = query.new_zeros(num_rows, num_queries, num_heads, value.shape[-1], dtype=dtype)
    for row in range(num_rows):
        for head in range(num_heads):
            keys, values = key[row, head // group].to(dtype), value[row, head // group].to(dtype)
            for i in range(num_queries):
                scores = scale * (keys @ query[row, head, i].to(dtype))
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                seen = (
                    torch.ones_like(scores, dtype=torch.bool)
                    if visible is None
                    else visible[row, i]
                )
                if not seen.any():
                    continue
                weights = torch.exp(scores[seen] - scores[seen].max())
                total = weights.sum()
                if sinks is not None:
                    total = total + torch.exp(sinks[head].to(dtype) - scores[seen].max())
                out[row, i, head] = (weights / total) @ values[seen]
    return out.to(query.dtype)


def ragged_attention_reference(
    query: torch.Tensor,  # [N, Hq, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    segments: list[tuple[int, int, int]],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # [N, Hq, Dv]
    """Attend as `ragged_attention`: each run by `packed_attention_reference`."""
    outs, start = [query.new_empty(0, query.shape[1], value.shape[-1])], 0
    for slot, past, count in segments:
        place = torch.arange(past, past + count, device=query.device)[:, None]
        position = torch.arange(past + count, device=query.device)
        visible = position <= place
        if window is not None:
            visible &= position > place - window
        rows = query[start : start + count].transpose(0, 1)[None]
        cached = slice(slot, slot + 1), slice(None), slice(0, past + count)
        attended = packed_attention_reference(
            rows, key[cached], value[cached], visible[None],
            scale=scale, softcap=softcap, sinks=sinks, dtype=dtype,
        )  # fmt: skip
        outs.append(attended[0])
        start += count
    return torch.cat(outs)
