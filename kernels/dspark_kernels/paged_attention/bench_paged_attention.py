"""Decode and verify over 2,048 listed tokens, against dense SDPA over the whole context."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_kernels import costs
from dspark_kernels.paged_attention.op import paged_attention
from dspark_kernels.paged_attention.reference import paged_attention_reference
from dspark_kernels.testing.bounds import BFLOAT16_RMS, relative_rms
from dspark_kernels.testing.timing import Case, main, shapes, title
from dspark_kernels.tiles import PAGE_SIZE

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: every row lists the same number of pages, spread over its context."""
    query = torch.randn(shape.rows, shape.heads, shape.tokens, shape.dim, device=device).bfloat16()
    cache = (shape.rows, shape.kv_heads, shape.context, shape.dim)
    key = torch.randn(cache, device=device, dtype=torch.bfloat16)
    value = torch.randn(cache, device=device, dtype=torch.bfloat16)
    listed = torch.linspace(0, shape.pages - 1, shape.kept // PAGE_SIZE, device=device).int()
    pages = listed.expand(shape.rows, shape.kv_heads, -1).contiguous()
    counts = torch.full(pages.shape[:2], pages.shape[-1], dtype=torch.int32, device=device)
    rows = torch.arange(shape.rows, device=device)
    lengths = torch.full_like(rows, shape.context)
    given = (query, key, value, pages, counts, rows, lengths)
    scale = shape.dim**-0.5

    def check() -> float:
        out, _ = paged_attention(*given, scale=scale)
        return relative_rms(out, paged_attention_reference(*given, scale=scale)[0])

    return Case(
        title(shape),
        partial(paged_attention, *given, scale=scale),
        partial(F.scaled_dot_product_attention, query, key, value, scale=scale, enable_gqa=True),
        "dense SDPA, no mask",
        check,
        BFLOAT16_RMS,
        costs.paged_attention(shape).floor_us,
    )


def cases(device: str) -> list[Case]:
    """Return the cases of this op."""
    return [make_case(shape, device) for shape in shapes(device)]


if __name__ == "__main__":
    main(cases)
