"""Packed dense attention: the query heads of a group become rows of one matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_kernels.checks import (
    FLOATS,
    require_dtype,
    require_groups,
    require_last_axis_contiguous,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.ragged_attention.splitting import can_split, num_parts, split_attention
from dspark_kernels.ragged_attention.tiling import Plan, plan_tiles, rows_per_tile

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DIM = 256
"""Widest head a tile of the GPU kernel holds."""
MAX_SPLIT_QUERIES = 128
"""Queries with which heads alone keep a CPU's threads busy: the kernel splits them too."""


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

    Numerics: float32 accumulation and softmax for every input type. On a CPU long caches are read
    in parts, whose outputs have the inputs' type before they are merged; how many follows from the
    rows, heads, length and threads, so that one key more may change a result's rounding.
    """
    num_rows, num_heads, num_queries, dim = query.shape
    num_kv = key.shape[1]
    group = num_heads // num_kv
    packed = query.reshape(num_rows, num_kv, group * num_queries, dim)
    if softcap is not None or sinks is not None:
        out = _attend_eager(packed, key, value, mask, scale, softcap, sinks, num_queries)
    elif (parts := _num_parts(packed, key, value)) > 1:
        out = split_attention(packed, key, value, mask, scale=scale, parts=parts)
    else:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    out = out.view(num_rows, num_kv, group, num_queries, value.shape[-1])
    return out.permute(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, -1)


def _num_parts(packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    if not can_split(packed, value) or packed.shape[2] > MAX_SPLIT_QUERIES:
        return 1
    return num_parts(key.shape[0], key.shape[1], key.shape[2], torch.get_num_threads())


def ragged_attention(
    query: torch.Tensor,  # [N, Hq, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    segments: Sequence[tuple[int, int, int]],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]
    plan: Plan | None = None,
) -> torch.Tensor:  # [N, Hq, Dv]
    """Attend the new tokens of all rows of a step, each run to its own cache slot, causally.

    Args:
        query: Queries of all runs, one behind the other, of shape (N, Hq, D).
        key: Cached keys, the new ones included, of shape (slots, Hkv, S, D).
        value: Cached values of shape (slots, Hkv, S, Dv).
        segments: Slot, cached tokens before the run and new tokens of each run, in the order of
            `query`; the tokens add up to N. On the host, as the step's plan is.
        scale: Factor on the dot products.
        window: A token sees so many positions up to its own; None means all.
        softcap: c in c * tanh(x / c), applied before the softmax.
        sinks: One logit per query head that takes probability and gives no value, of shape (Hq,).
        plan: From `make_plan` with the same segments, window and shapes, to be shared by the layers
            of a step; None makes one. Used on a GPU only.

    Returns:
        torch.Tensor: Of shape (N, Hq, Dv), contiguous.

    Raises:
        ValueError: If shapes, types or devices do not fit.
        NotImplementedError: On a GPU, for heads wider than 256 or over 64 heads per key head.

    Limits: D and Dv at most 256, Hq / Hkv at most 64 (one tile of rows).
    Numerics: float32 accumulation and softmax, weights rounded to the value type before the second
    product; bounds tested: 2e-5 relative RMS in float32, 1.5e-2 in bfloat16.
    Layout: last axes contiguous, other strides free; positions past a run's end are not read.
    Batch: a run's result does not depend on other runs, on a GPU bit for bit: tiles and splits
    follow from the run alone.
    Cost: each visible key and value is read once per 64 query rows of a group.
    Source: Dao et al., FlashAttention, arXiv:2205.14135; Flash-Decoding (Dao, Haziza, Massa,
    Sizov, 2023) for the splits; sinks and soft-cap as in Transformers' eager attention.
    """
    require_shape("query", query, ("N", "Hq", "D"))
    require_shape("key", key, ("slots", "Hkv", "S", query.shape[-1]))
    require_shape("value", value, (*key.shape[:3], "Dv"))
    group = require_groups(query.shape[1], key.shape[1])
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_dtype(name, tensor, FLOATS)
        require_dtype(name, tensor, (query.dtype,))
        require_last_axis_contiguous(name, tensor)
    if sinks is not None:
        require_shape("sinks", sinks, (query.shape[1],))
    _check_segments(segments, query.shape[0], key.shape[0], key.shape[2])
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token; got {window}. Pass None for no window.")
    device = require_same_device(query=query, key=key, value=value, sinks=sinks)
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
    if not runs_triton(device):
        _attend_segments(query, key, value, segments, out, scale, window, softcap, sinks)
        return out
    if max(query.shape[-1], value.shape[-1]) > MAX_DIM or group > 64:
        raise NotImplementedError(
            f"heads must be at most {MAX_DIM} wide and 64 per key head; got D {query.shape[-1]}, "
            f"Dv {value.shape[-1]} and {group} heads. Use packed_attention."
        )
    from dspark_kernels.ragged_attention.kernel import ragged_attention_fwd

    if plan is None:
        plan = make_plan(segments, query, key, value, window)
    ragged_attention_fwd(
        query, key, value, plan, out, scale=scale, window=window, softcap=softcap, sinks=sinks
    )
    return out


def make_plan(
    segments: Sequence[tuple[int, int, int]],
    query: torch.Tensor,  # [N, Hq, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    window: int | None = None,
) -> Plan:
    """Cut a step's runs into tiles once for all layers of these shapes; as in `ragged_attention`.

    Returns:
        Plan: Holds its tables on the device after the first use.
    """
    group = require_groups(query.shape[1], key.shape[1])
    rows = rows_per_tile(value.shape[-1], key.element_size())
    return plan_tiles(segments, group, window, rows)


def _check_segments(
    segments: Sequence[tuple[int, int, int]], num_tokens: int, num_slots: int, num_positions: int
) -> None:
    for slot, past, count in segments:
        if not (0 <= slot < num_slots and past >= 0 <= count and past + count <= num_positions):
            raise ValueError(
                f"segments must lie in {num_slots} slots of {num_positions} positions; got slot "
                f"{slot}, past {past}, count {count}. Reserve room in the cache first."
            )
    total = sum(count for _, _, count in segments)
    if total != num_tokens:
        raise ValueError(
            f"the segments' tokens must add up to the {num_tokens} of query; got {total}. Pass one "
            "segment per run, in the order of query."
        )


def _attend_segments(
    query: torch.Tensor,  # [N, Hq, D]
    key: torch.Tensor,  # [slots, Hkv, S, D]
    value: torch.Tensor,  # [slots, Hkv, S, Dv]
    segments: Sequence[tuple[int, int, int]],
    out: torch.Tensor,  # [N, Hq, Dv]
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    start, group = 0, query.shape[1] // key.shape[1]
    for slot, past, count in segments:
        if count == 0:
            continue
        end = past + count
        first = 0 if window is None else max(0, past + 1 - window)
        place = torch.arange(past, end, device=query.device)[:, None]
        position = torch.arange(first, end, device=query.device)
        visible = position <= place
        if window is not None:
            visible &= position > place - window
        rows = query[start : start + count].transpose(0, 1)[None]
        keys, values = key[slot : slot + 1, :, first:end], value[slot : slot + 1, :, first:end]
        mask = pack_mask(visible[None], group, query.dtype)
        attended = packed_attention(
            rows, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks
        )
        out[start : start + count] = attended[0]
        start += count


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
