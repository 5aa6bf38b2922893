"""From which context on reading pages is quicker than reading everything, measured here."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import CALM
from dspark_hf.attention.sparse import SparseRow, SparseStats, attend_pages
from dspark_kernels.ragged_attention.op import packed_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from dspark_hf.attention.policy import SparsePolicy

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Contexts that are tried, in tokens."""
REPEATS = 5
MIN_GAIN = 1.05
"""Reading pages must be this many times as quick: it is not exact, and times are noisy."""
COPIES = 4
"""Slots that are read in turn, so that keys come from memory as they do between other layers."""


@torch.no_grad()
def measure_crossover(
    policy: SparsePolicy,
    *,
    num_heads: int,
    num_kv: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Time one layer's attention both ways over random keys; by mass, with all that may be read.

    Args:
        policy: What would be read.
        num_heads: Query heads.
        num_kv: Key heads.
        dim: Width of a head.
        dtype: Of the cache.
        device: Where.

    Returns:
        int: Tokens of the shortest context tried from which on reading pages was quicker at all
        longer ones too; twice the longest if at none. Never less than twice the budget.

    Cost: about a second on a CPU.
    """
    generator = torch.Generator().manual_seed(0)
    least = 2 * policy.tokens
    found = 2 * LENGTHS[-1]
    # How often steps read more differs by text: no text shall be read more slowly than densely.
    timed = policy if policy.mass is None else policy.replace(mass=1.0)
    query = torch.randn(num_heads, 1, dim, generator=generator).to(device, dtype)
    for length in reversed([n for n in LENGTHS if n >= least]):
        shape = (COPIES, num_kv, length + PAGE - length % PAGE, dim)
        keys = torch.randn(shape, generator=generator).to(device, dtype)
        values = torch.randn(shape, generator=generator).to(device, dtype)
        row = SparseRow(timed, SparseStats(), 0, CALM)
        summaries = PageSummaries()

        def dense(
            slot: int, keys: torch.Tensor = keys, values: torch.Tensor = values, n: int = length
        ) -> object:
            held = keys[slot : slot + 1, :, :n], values[slot : slot + 1, :, :n]
            return packed_attention(query[None], *held, None, scale=dim**-0.5)

        def sparse(
            slot: int,
            keys: torch.Tensor = keys,
            values: torch.Tensor = values,
            n: int = length,
            row: SparseRow = row,
            summaries: PageSummaries = summaries,
        ) -> object:
            return attend_pages(
                query, keys, values, summaries, row,
                slot=slot, past=n - 1, layer=0, scale=dim**-0.5,
            )  # fmt: skip

        if _seconds(dense, device) < MIN_GAIN * _seconds(sparse, device):
            return found
        found = length
    return max(found, least)


def _seconds(call: Callable[[int], object], device: torch.device) -> float:
    times = []
    for repeat in range(REPEATS + 1):
        for slot in range(COPIES):
            begin = perf_counter()
            call(slot)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            if repeat:
                times.append(perf_counter() - begin)
    return median(times)
