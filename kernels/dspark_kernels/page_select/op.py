"""Public op: choose the pages to attend to."""

from __future__ import annotations

import torch

from dspark_kernels.checks import (
    INTEGERS,
    require_dtype,
    require_range,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.page_select.choice import choose_pages, pack_pages


def page_select(
    weights: torch.Tensor,  # [R, Hkv, P]
    num_pages: torch.Tensor,  # [R]
    budget: int | torch.Tensor,  # [R]
    *,
    max_pages: int,
    sinks: int = 1,
    recent: int = 4,
    floor: int = 0,
    max_budget: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, Hkv, max_pages], [R, Hkv]
    """Keep each row's pages of largest weight, jointly over the layer's key heads.

    Every head keeps its sinks and recent pages, and its best pages until it has `floor` in all;
    what is left of the budget goes to the largest remaining weights of any head. So a layer's work
    is fixed, and heads that spread their attention get more pages than heads that do not.

    Args:
        weights: Scores in [0, 1], float32 of shape (R, Hkv, P), from `page_score`.
        num_pages: Pages in use, of shape (R,), each at most P.
        budget: Pages per row over all key heads, a number or of shape (R,); where it is less than
            what is kept in any case, that is kept.
        max_pages: Length of the lists, at least what each head keeps in any case; a head offers at
            most so many of its pages.
        sinks: First pages always kept.
        recent: Last pages always kept; they must cover the tokens of a draft.
        floor: Pages each head keeps at least.
        max_budget: Upper bound of a tensor `budget`, so that its values need not be read on the
            host; None reads them.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: Page numbers, int32, ascending and padded with -1, and
        their counts, int32 of shape (R, Hkv).

    Raises:
        ValueError: If shapes, types, devices or numbers do not fit.

    Limits: none on P; `max_pages` at least max(sinks + recent, floor).
    Numerics: comparisons only. Which of several equal weights at the limit is kept is not
    specified, so neither is it reproducible between devices; the kept weights are.
    Layout: any strides.
    Batch: a row's kept weights do not depend on other rows.
    Cost: two `topk` and one packing pass over R * Hkv * P values; on a GPU 3 to 5 launches, no host
    synchronisation with an int budget or with `max_budget`.
    Source: Tang et al., Quest, arXiv:2406.10774 (top-K pages); the joint choice over heads
    is this project's.
    """
    require_shape("weights", weights, ("R", "Hkv", "P"))
    require_dtype("weights", weights, (torch.float32,))
    num_rows, _, width = weights.shape
    require_shape("num_pages", num_pages, (num_rows,))
    require_dtype("num_pages", num_pages, INTEGERS)
    for name, value in (("sinks", sinks), ("recent", recent), ("floor", floor)):
        require_range(name, value, 0)
    require_range("max_pages", max_pages, max(1, sinks + recent, floor))
    device = require_same_device(weights=weights, num_pages=num_pages)
    if isinstance(budget, torch.Tensor):
        require_shape("budget", budget, (num_rows,))
        require_dtype("budget", budget, INTEGERS)
        require_same_device(weights=weights, budget=budget)
        if max_budget is None:
            max_budget = int(budget.max()) if num_rows else 0
        budgets = budget
    else:
        require_range("budget", budget, 0)
        max_budget = budget
        budgets = torch.full((num_rows,), budget, device=device)
    kept = choose_pages(
        weights, num_pages, budgets, max_pages=min(max_pages, width), max_budget=max_budget,
        sinks=sinks, recent=recent, floor=floor,
    )  # fmt: skip
    if not runs_triton(device):
        return pack_pages(kept, max_pages)
    from dspark_kernels.page_select.kernel import page_pack_fwd

    pages = torch.empty(*weights.shape[:2], max_pages, dtype=torch.int32, device=device)
    counts = torch.empty(weights.shape[:2], dtype=torch.int32, device=device)
    page_pack_fwd(kept, pages, counts)
    return pages, counts
