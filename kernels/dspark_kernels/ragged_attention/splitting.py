"""Attention over long caches on a CPU, with the keys split so that every thread has its share.

PyTorch's kernel gives a key head of a row to one thread. Three heads take two threads as long as
four would, and sixteen threads no less than three: the keys are split too, and the parts merged.
"""

from __future__ import annotations

from typing import Any

import torch

_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""What `scaled_dot_product_attention` calls; by itself it tells the log-sum-exp too."""
MIN_PART = 3072
"""Keys of a part: fewer do not pay for the merge."""
MIN_GAIN = 1.15
"""Splitting must promise so many times the speed."""


def num_parts(rows: int, heads: int, length: int, threads: int) -> int:
    """Return into how many parts each row's keys are split; 1 for none.

    Args:
        rows: Rows attended at once.
        heads: Key heads.
        length: Keys.
        threads: Threads of the CPU.
    """
    whole = -(-rows * heads // threads)
    best, parts = whole / MIN_GAIN, 1
    for count in range(2, min(length // MIN_PART, threads) + 1):
        # Rows follow one another then, each on all threads.
        taken = rows * -(-heads * count // threads) / count
        if taken < best:
            best, parts = taken, count
    return parts


def can_split(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether `split_attention` serves these tensors: on a CPU, without a gradient."""
    is_plain = query.device.type == "cpu" and not torch.is_grad_enabled()
    return _KERNEL is not None and is_plain and query.shape[-1] == value.shape[-1]


def split_attention(
    query: torch.Tensor,  # [B, H, R, D]
    key: torch.Tensor,  # [B, H, S, D]
    value: torch.Tensor,  # [B, H, S, D]
    mask: torch.Tensor | None,  # [B, 1, R, S]
    *,
    scale: float,
    parts: int,
) -> torch.Tensor:  # [B, H, R, D]
    """Attend in `parts` equal parts of the keys, and to what is left key by key, then merge.

    Args:
        query: Queries; a group's heads are packed into R.
        key: Keys, any strides with a contiguous last axis.
        value: Values, as wide as keys.
        mask: Additive; every query sees something. None means everything is visible.
        scale: Factor on the dot products.
        parts: At least 2, at most S.
    """
    size = key.shape[2] // parts
    whole = size * parts

    def cut(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        # The parts come first; strides of the cache, no copy.
        pieces: torch.Tensor = tensor.narrow(axis, 0, whole).unflatten(axis, (parts, size))
        return pieces.movedim(axis, 0)

    rows = []
    for row in range(query.shape[0]):
        own, keys, values = query[row], key[row], value[row]
        bias = None if mask is None else mask[row, 0]
        part = None if bias is None else cut(bias, 1)
        outs, lses = _attend(own, cut(keys, 1), cut(values, 1), part, scale)
        if whole < key.shape[2]:
            # Fewer keys than parts: neither the kernel nor a matrix product is worth its start.
            scores = (own.float()[:, :, None] * keys[:, None, whole:]).sum(-1) * scale
            if bias is not None:
                scores = scores + bias[:, whole:]
            lses = torch.cat([lses, scores.movedim(-1, 0)])
        # As `merge_lse`, in fewer operations: no query is hidden from all parts.
        weights = (lses - lses.amax(dim=0)).exp()
        merged: torch.Tensor = (outs * weights[:parts, ..., None]).sum(dim=0)
        if whole < key.shape[2]:
            left = weights[parts:].movedim(0, -1)[..., None]  # [H, R, left, 1]
            merged = merged + (left * values[:, None, whole:]).sum(2)
        rows.append((merged / weights.sum(dim=0)[..., None]).to(outs.dtype))
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _attend(
    query: torch.Tensor,  # [H, R, D]
    keys: torch.Tensor,  # [P, H, S, D]
    values: torch.Tensor,  # [P, H, S, D]
    mask: torch.Tensor | None,  # [P, R, S]
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [P, H, R, D], [P, H, R]
    """Return the output and the log-sum-exp of each part."""
    outs, lses = _KERNEL(
        query.expand(keys.shape[0], *query.shape),
        keys,
        values,
        attn_mask=None if mask is None else mask[:, None],
        scale=scale,
    )
    if mask is not None:
        # The kernel says 0 for a query that sees none of a part.
        lses = lses.masked_fill(mask.amax(-1)[:, None] == -torch.inf, -torch.inf)
    return outs, lses
