"""Reference: maximum and minimum of the keys of every touched page; also the CPU path."""

from __future__ import annotations

import torch

from dspark_kernels.tiles import PAGE_SIZE, ceil_div


def update_page_summaries_reference(
    key: torch.Tensor,  # [slots, Hkv, S, D]
    centre: torch.Tensor,  # [slots, Hkv, P, D]
    half: torch.Tensor,  # [slots, Hkv, P, D]
    slots: torch.Tensor,  # [R]
    past: torch.Tensor,  # [R]
    lengths: torch.Tensor,  # [R]
    *,
    page_size: int = PAGE_SIZE,
) -> None:
    """Summarise as `update_page_summaries`, in place, in float32."""
    rows = zip(slots.tolist(), past.tolist(), lengths.tolist(), strict=True)
    for slot, start, end in rows:
        first, last = start // page_size, ceil_div(end, page_size)
        if first >= last:
            continue
        keys = key[slot, :, first * page_size : end].float()
        missing = (last - first) * page_size - keys.shape[1]
        # The last token again fills the last page: it changes neither maximum nor minimum.
        keys = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], dim=1)
        keys = keys.unflatten(1, (last - first, page_size))
        top, low = keys.amax(2), keys.amin(2)
        centre[slot, :, first:last] = ((top + low) / 2).to(centre.dtype)
        half[slot, :, first:last] = ((top - low) / 2).to(half.dtype)
