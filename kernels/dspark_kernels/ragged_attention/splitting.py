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
    """Attend in `parts` equal parts of the keys, and a last one of what is left, then merge.

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

    def rest(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.narrow(axis, whole, tensor.shape[axis] - whole)[None]

    rows = []
    for row in range(query.shape[0]):
        own, keys, values = query[row], key[row], value[row]
        bias = None if mask is None else mask[row, 0]
        part = None if bias is None else cut(bias, 1)
        outs, lses = _attend(own, cut(keys, 1), cut(values, 1), part, scale)
        if whole < key.shape[2]:
            part = None if bias is None else rest(bias, 1)
            last = _attend(own, rest(keys, 1), rest(values, 1), part, scale)
            outs, lses = torch.cat([outs, last[0]]), torch.cat([lses, last[1]])
        # As `merge_lse`, in fewer operations: no query is hidden from all parts.
        weights = torch.softmax(lses, dim=0)[..., None]
        merged: torch.Tensor = (outs * weights).sum(dim=0)
        rows.append(merged.to(outs.dtype))
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
