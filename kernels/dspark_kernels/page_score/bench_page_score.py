"""Scores of all pages of the context, against the same arithmetic in PyTorch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from dspark_kernels import costs
from dspark_kernels.page_score.op import page_score
from dspark_kernels.page_score.reference import page_score_reference
from dspark_kernels.testing.bounds import BFLOAT16_RMS, relative_rms
from dspark_kernels.testing.timing import Case, main, shapes, title

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape


def baseline(query: torch.Tensor, centre: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """Score with two batched products."""
    packed = query.unflatten(1, (centre.shape[1], -1)).flatten(2, 3)  # [R, Hkv, G * T, D]
    scores = packed @ centre.mT + 0.5 * (packed.abs() @ half.mT)
    return torch.softmax(scores.float() * query.shape[-1] ** -0.5, -1).mean(2)


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: all rows of the same length."""
    query = torch.randn(shape.rows, shape.heads, shape.tokens, shape.dim, device=device).bfloat16()
    summary = (shape.rows, shape.kv_heads, shape.pages, shape.dim)
    centre = torch.randn(summary, device=device, dtype=torch.bfloat16)
    half = torch.rand(summary, device=device).bfloat16()
    rows = torch.arange(shape.rows, device=device)
    given = (query, centre, half, rows, torch.full_like(rows, shape.pages))
    scale = shape.dim**-0.5

    def check() -> float:
        expected = page_score_reference(*given, scale=scale)
        return relative_rms(page_score(*given, scale=scale), expected)

    return Case(
        title(shape),
        partial(page_score, *given, scale=scale),
        partial(baseline, query, centre, half),
        "PyTorch",
        check,
        BFLOAT16_RMS,
        costs.page_score(shape).floor_us,
    )


def cases(device: str) -> list[Case]:
    """Return the cases of this op."""
    return [make_case(shape, device) for shape in shapes(device)]


if __name__ == "__main__":
    main(cases)
