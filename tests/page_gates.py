"""What the tests of learned page predictors share: shapes, random gates, queries and summaries."""

from __future__ import annotations

import torch

from dspark_hf.attention.learned import AttentionShape, PageGate
from dspark_hf.attention.pages import PAGE, PageSummaries

DIM, PAGES, RANK, SCALE = 24, 11, 5, 0.2


def shape_of(heads: tuple[int, int], layers: int = 3) -> AttentionShape:
    """Return the shape of a model of (query, key) heads."""
    return AttentionShape(layers, *heads, DIM)


def random_gate(shape: AttentionShape, seed: int = 0) -> PageGate:
    """Return a gate that has learned something, whatever it is."""
    stream = torch.Generator().manual_seed(seed)
    sizes = PageGate.sizes(shape, RANK)
    return PageGate(**{name: torch.randn(size, generator=stream) for name, size in sizes.items()})


def inputs(
    shape: AttentionShape, tokens: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries (Hkv, G x tokens, D) and summaries (Hkv, P, 2 D)."""
    stream = torch.Generator().manual_seed(1)
    query = torch.randn(shape.num_kv, shape.group * tokens, DIM, generator=stream)
    keys = torch.randn(1, shape.num_kv, 192, DIM, generator=stream)
    summary = PageSummaries().refresh(keys, 0, PAGES * PAGE)
    return query.to(dtype), summary.to(dtype)
