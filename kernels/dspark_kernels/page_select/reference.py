"""Reference: one loop per row; sorts and takes, in the order of the rule."""

from __future__ import annotations

import torch


def page_select_reference(
    weights: torch.Tensor,  # [R, Hkv, P]
    num_pages: torch.Tensor,  # [R]
    budget: torch.Tensor,  # [R]
    *,
    max_pages: int,
    sinks: int = 1,
    recent: int = 4,
    floor: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, Hkv, max_pages], [R, Hkv]
    """Select as `page_select`; among equal weights, lower pages first, then lower heads."""
    num_rows, num_kv, _ = weights.shape
    pages = torch.full((num_rows, num_kv, max_pages), -1, dtype=torch.int32)
    counts = torch.zeros(num_rows, num_kv, dtype=torch.int32)
    for row in range(num_rows):
        total = int(num_pages[row])
        forced = [p for p in range(total) if p < sinks or p >= total - recent]
        kept: list[set[int]] = []
        offers: list[tuple[float, int, int]] = []
        for head in range(num_kv):
            share = weights[row, head].tolist()
            others = sorted((-share[p], p) for p in set(range(total)) - set(forced))
            ranked = (forced + [page for _, page in others])[:max_pages]
            certain = max(len(forced), floor)
            kept.append(set(ranked[:certain]))
            offers += [(-share[p], head, p) for p in ranked[certain:]]
        left = max(0, int(budget[row]) - sum(len(found) for found in kept))
        for _, head, page in sorted(offers)[:left]:
            kept[head].add(page)
        for head, found in enumerate(kept):
            pages[row, head, : len(found)] = torch.tensor(sorted(found), dtype=torch.int32)
            counts[row, head] = len(found)
    return pages.to(weights.device), counts.to(weights.device)
