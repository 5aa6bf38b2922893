"""A prompt with 2,048 tokens listed per tile, against causal SDPA over all of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_kernels import costs
from dspark_kernels.block_sparse_prefill.op import block_sparse_prefill
from dspark_kernels.block_sparse_prefill.reference import (
    QUERY_TILE,
    block_sparse_prefill_reference,
)
from dspark_kernels.testing.bounds import BFLOAT16_RMS, relative_rms
from dspark_kernels.testing.timing import Case, main, shapes
from dspark_kernels.tiles import PAGE_SIZE, ceil_div

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: every tile lists its own pages and others spread evenly before them."""
    cache = (1, shape.kv_heads, shape.context, shape.dim)
    key = torch.randn(cache, device=device, dtype=torch.bfloat16)
    value = torch.randn(cache, device=device, dtype=torch.bfloat16)
    query = torch.randn(1, shape.heads, *cache[2:], device=device).bfloat16()
    tiles, most = ceil_div(shape.context, QUERY_TILE), shape.kept // PAGE_SIZE
    pages, counts = torch.full((tiles, most), -1, dtype=torch.int32), []
    for tile in range(tiles):
        total = min(shape.pages, (tile + 1) * QUERY_TILE // PAGE_SIZE)
        listed = torch.linspace(0, total - 1, min(total, most)).int()
        pages[tile, : len(listed)] = listed
        counts.append(len(listed))
    lists = pages.to(device).expand(1, shape.kv_heads, -1, -1).contiguous()
    number = torch.tensor(counts, dtype=torch.int32, device=device)
    number = number.expand(1, shape.kv_heads, -1).contiguous()
    first = torch.zeros(1, dtype=torch.int64, device=device)
    given, scale = (query, key, value, lists, number, first, first), shape.dim**-0.5
    dense = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)

    def check() -> float:
        expected = block_sparse_prefill_reference(*given, scale=scale)
        return relative_rms(block_sparse_prefill(*given, scale=scale), expected)

    run = partial(block_sparse_prefill, *given, scale=scale)
    floor = costs.block_sparse_prefill(shape).floor_us
    name = f"prompt of {shape.context}, {shape.kept} kept"
    return Case(name, run, partial(dense, enable_gqa=True), "SDPA", check, BFLOAT16_RMS, floor)


def cases(device: str) -> list[Case]:
    """Return the case of this op: prompts come one at a time."""
    return [make_case(shapes(device)[0], device)]


if __name__ == "__main__":
    main(cases)
