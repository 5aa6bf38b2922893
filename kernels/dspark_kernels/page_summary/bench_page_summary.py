"""Summaries after a step, against maximum and minimum in PyTorch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from dspark_kernels import costs
from dspark_kernels.page_summary.op import update_page_summaries
from dspark_kernels.page_summary.reference import update_page_summaries_reference
from dspark_kernels.testing.bounds import relative_rms
from dspark_kernels.testing.timing import Case, main, shapes, title

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape

ROUNDING = 2**-8
"""The same operations and one rounding to bfloat16, by device and reference alike."""


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: the last tokens of every row are new."""
    cache = (shape.rows, shape.kv_heads, shape.context, shape.dim)
    key = torch.randn(cache, device=device, dtype=torch.bfloat16)
    centre = torch.zeros(*cache[:2], shape.pages, shape.dim, device=device, dtype=torch.bfloat16)
    half, rows = torch.zeros_like(centre), torch.arange(shape.rows, device=device)
    lengths = torch.full_like(rows, shape.context)
    given = (rows, lengths - shape.tokens, lengths)

    def check() -> float:
        update_page_summaries(key, centre, half, *given, max_new_tokens=shape.tokens)
        middle, spread = torch.zeros_like(centre), torch.zeros_like(half)
        update_page_summaries_reference(key, middle, spread, *given)
        return max(relative_rms(centre, middle), relative_rms(half, spread))

    return Case(
        title(shape),
        partial(update_page_summaries, key, centre, half, *given, max_new_tokens=shape.tokens),
        partial(update_page_summaries_reference, key, centre, half, *given),
        "PyTorch, row by row",
        check,
        ROUNDING,
        costs.page_summary(shape).floor_us,
    )


def cases(device: str) -> list[Case]:
    """Return the cases of this op."""
    return [make_case(shape, device) for shape in shapes(device)]


if __name__ == "__main__":
    main(cases)
