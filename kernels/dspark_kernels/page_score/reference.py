"""Reference: the softened bound, softmax per query head, mean over the group; also the CPU path."""

from __future__ import annotations

import torch


def page_score_reference(
    query: torch.Tensor,  # [R, Hq, T, D]
    centre: torch.Tensor,  # [slots, Hkv, P, D]
    half: torch.Tensor,  # [slots, Hkv, P, D]
    slots: torch.Tensor,  # [R]
    num_pages: torch.Tensor,  # [R]
    *,
    scale: float,
    alpha: float = 0.5,
    num_queries: torch.Tensor | None = None,  # [R]
    max_pages: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # [R, Hkv, P]
    """Score as `page_score`, with sums in `dtype`; the result is float32."""
    num_rows, _, most, dim = query.shape
    num_kv = centre.shape[1]
    width = centre.shape[2] if max_pages is None else max_pages
    out = torch.zeros(num_rows, num_kv, width, dtype=torch.float32, device=query.device)
    real = [most] * num_rows if num_queries is None else num_queries.tolist()
    for row, (slot, pages) in enumerate(zip(slots.tolist(), num_pages.tolist(), strict=True)):
        if pages == 0 or real[row] == 0:
            continue
        queries = query[row, :, most - real[row] :].reshape(num_kv, -1, dim).to(dtype)
        middle = centre[slot, :, :pages].to(dtype)
        spread = half[slot, :, :pages].to(dtype)
        scores = queries @ middle.transpose(1, 2) + alpha * (queries.abs() @ spread.transpose(1, 2))
        out[row, :, :pages] = torch.softmax(scale * scores, dim=-1).mean(dim=1).float()
    return out
