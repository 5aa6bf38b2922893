"""Joint choice of 2,048 tokens a key head, against packing with PyTorch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from dspark_kernels import costs
from dspark_kernels.page_select.choice import choose_pages, pack_pages
from dspark_kernels.page_select.op import page_select
from dspark_kernels.page_select.reference import page_select_reference
from dspark_kernels.testing.timing import Case, main, shapes, title
from dspark_kernels.tiles import PAGE_SIZE

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape

KEPT_BOUND = 1e-6
"""Kept weights are the same numbers, whichever of equal ones is taken; summed in another order."""


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: weights as a softmax gives them."""
    scores = torch.randn(shape.rows, shape.kv_heads, shape.pages, device=device)
    weights, rows = torch.softmax(3 * scores, -1), torch.arange(shape.rows, device=device)
    num_pages = torch.full_like(rows, shape.pages)
    per_head = shape.kept // PAGE_SIZE
    budget, cap = per_head * shape.kv_heads, min(shape.pages, max(5, 2 * per_head))
    form = {"max_pages": cap, "sinks": 1, "recent": 4, "floor": 0}

    def plain() -> object:
        budgets = torch.full_like(num_pages, budget)
        return pack_pages(choose_pages(weights, num_pages, budgets, max_budget=budget, **form), cap)

    def kept(pages: torch.Tensor) -> torch.Tensor:
        share = weights.gather(-1, pages.clamp(min=0).long())
        return torch.where(pages >= 0, share, 0.0).sum((1, 2))

    def check() -> float:
        ours, _ = page_select(weights, num_pages, budget, **form)
        budgets = torch.full_like(num_pages, budget)
        expected, _ = page_select_reference(weights, num_pages, budgets, **form)
        return float((kept(ours) / kept(expected) - 1).abs().max())

    run = partial(page_select, weights, num_pages, budget, **form)
    floor = costs.page_select(shape).floor_us
    return Case(title(shape), run, plain, "PyTorch packing", check, KEPT_BOUND, floor)


def cases(device: str) -> list[Case]:
    """Return the cases of this op."""
    return [make_case(shape, device) for shape in shapes(device)]


if __name__ == "__main__":
    main(cases)
