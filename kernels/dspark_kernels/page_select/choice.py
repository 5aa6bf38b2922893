"""The selection itself, in PyTorch for every device: two `topk`, no sort, no synchronisation."""

from __future__ import annotations

import torch

KEPT = 4.0
"""Rank of what is kept in any case: above every weight, as those are at most 1."""
UNUSED = -1.0
"""Rank of pages that cannot be chosen: below every weight."""


def rank_pages(
    weights: torch.Tensor,  # [R, Hkv, P]
    num_pages: torch.Tensor,  # [R]
    sinks: int,
    recent: int,
) -> torch.Tensor:  # [R, Hkv, P]
    """Return the weights with forced pages raised to KEPT and unused ones lowered to UNUSED."""
    page = torch.arange(weights.shape[-1], device=weights.device)
    total = num_pages[:, None, None]
    ranks = torch.where((page < sinks) | (page >= total - recent), KEPT, weights)
    return torch.where(page < total, ranks, UNUSED)


def choose_pages(
    weights: torch.Tensor,  # [R, Hkv, P]
    num_pages: torch.Tensor,  # [R]
    budget: torch.Tensor,  # [R]
    *,
    max_pages: int,
    max_budget: int,
    sinks: int,
    recent: int,
    floor: int,
) -> torch.Tensor:  # [R, Hkv, P]
    """Return which pages are kept, as bool.

    First each head offers its best `max_pages`, of which the first `floor` are certain; then the
    offers of all heads compete for the budget.
    """
    num_rows, num_kv, width = weights.shape
    ranks = rank_pages(weights, num_pages, sinks, recent)
    offers, places = ranks.topk(min(max_pages, width), dim=-1)  # [R, Hkv, K]
    is_certain = torch.arange(offers.shape[-1], device=weights.device) < floor
    offers = torch.where(is_certain & (offers > UNUSED), KEPT, offers)
    flat = offers.flatten(1)
    certain = (flat == KEPT).sum(dim=-1)  # [R]
    limit = torch.maximum(certain, budget)[:, None]
    # As many as any row can need: the budget, or what is kept anyway.
    most = min(flat.shape[-1], max(max_budget, num_kv * max(floor, sinks + recent)))
    best, index = flat.topk(most, dim=-1)
    is_in = (torch.arange(most, device=weights.device) < limit) & (best > UNUSED)
    taken = torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, index, is_in)
    taken = taken.view(num_rows, num_kv, -1)
    return torch.zeros_like(ranks, dtype=torch.bool).scatter_(-1, places, taken)


def pack_pages(
    kept: torch.Tensor,  # [R, Hkv, P]
    max_pages: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, Hkv, max_pages], [R, Hkv]
    """List the kept pages of each head in ascending order, padded with -1."""
    counts = kept.sum(dim=-1, dtype=torch.int32)
    target = torch.where(kept, kept.cumsum(-1) - 1, max_pages)
    page = torch.arange(kept.shape[-1], dtype=torch.int32, device=kept.device).expand_as(target)
    pages = torch.full((*kept.shape[:-1], max_pages + 1), -1, dtype=torch.int32, device=kept.device)
    # Pages that are not kept all land in one more column, which is cut off.
    return pages.scatter_(-1, target, page)[..., :max_pages].contiguous(), counts
