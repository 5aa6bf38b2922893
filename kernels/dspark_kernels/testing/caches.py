"""Inputs of the paged kernels: caches whose unused memory is NaN, page lists, ragged rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark_kernels.tiles import ceil_div


@dataclass(frozen=True)
class Paged:
    """One set of inputs.

    Attributes:
        query: (R, Hq, T, D).
        key: (slots, Hkv, S, D), NaN beyond a row's length and in unused slots.
        value: (slots, Hkv, S, Dv), likewise.
        pages: (R, Hkv, K), ascending; what lies behind `counts` is out of range.
        counts: (R, Hkv).
        slots: (R,).
        lengths: (R,).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor

    def rows(self, rows: slice) -> Paged:
        """Return some of the rows, over the same cache."""
        parts = (self.pages[rows].contiguous(), self.counts[rows].contiguous())
        ends = (self.slots[rows].contiguous(), self.lengths[rows].contiguous())
        return Paged(self.query[rows], self.key, self.value, *parts, *ends)


def make_paged(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    num_queries: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    page_size: int = 16,
    keep: float = 1.0,
    seed: int = 0,
) -> Paged:
    """Draw inputs.

    Args:
        lengths: Cached tokens per row.
        heads: Query heads and key heads.
        num_queries: New tokens per row.
        dims: Key and value width.
        dtype: Type of queries, keys and values.
        device: Where they lie.
        page_size: Tokens per page.
        keep: Share of a row's pages that is listed; the last page always is.
        seed: Of the generator.

    Returns:
        Paged: Rows in reversed slots, with one slot unused.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows, most = len(lengths), max(ceil_div(length, page_size) for length in lengths)
    shape = (num_rows + 1, heads[1], most * page_size + 3)
    key = torch.full((*shape, dims[0]), torch.nan)
    value = torch.full((*shape, dims[1]), torch.nan)
    pages = torch.full((num_rows, heads[1], most), 2**20, dtype=torch.int32)
    counts = torch.zeros(num_rows, heads[1], dtype=torch.int32)
    slots = torch.arange(num_rows, 0, -1)
    for row, length in enumerate(lengths):
        place = (int(slots[row]), slice(None), slice(0, length))
        key[place] = torch.randn(heads[1], length, dims[0], generator=generator)
        value[place] = torch.randn(heads[1], length, dims[1], generator=generator)
        total = ceil_div(length, page_size)
        for head in range(heads[1]):
            kept = torch.rand(total, generator=generator) < keep
            if total:
                kept[-1] = True
            listed = kept.nonzero().flatten().int()
            pages[row, head, : len(listed)] = listed
            counts[row, head] = len(listed)
    query = torch.randn(num_rows, heads[0], num_queries, dims[0], generator=generator)
    return Paged(
        query.to(device, dtype), key.to(device, dtype), value.to(device, dtype),
        pages.to(device), counts.to(device), slots.to(device),
        torch.tensor(lengths, device=device),
    )  # fmt: skip
