"""What the tests of sparse attention share: policies, bounds, and rows of a FlatTarget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dspark_hf.attention.policy import SparsePolicy, SparsePrefill
from dspark_hf.attention.sparse import SparseReading, SparseStats
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.values import Feed

EXACT = 1e-5
"""Relative RMS between two orders of summing the same float32 products; seen: 1e-6."""
ROUNDING = 1e-4
"""The same between forwards over one and several rows, through all layers; seen: 1.1e-5. A token
seen or missed in error moves logits by more than 0.01."""
ALL = SparsePolicy(tokens=4096, min_context=0)
"""Reads every page."""
LEAST = SparsePolicy(tokens=48, recent_pages=2, min_context=0)
"""Reads the first page and the newest two, whatever they hold."""
SOME = LEAST.replace(prefill=SparsePrefill(tokens=96, min_context=0))
"""Blocks of prompts read those before them, and three pages that promise most attention."""


def wholly(block: int = 64) -> SparsePolicy:
    """Return a policy that reads every page, block by block."""
    return ALL.replace(prefill=SparsePrefill(tokens=4096, block=block, min_context=0))


def sparse_target(model: Any, policy: SparsePolicy) -> tuple[FlatTarget, SparseStats]:
    """Return an empty target that reads every row by a policy, and what it counts."""
    target, stats = FlatTarget(model, 32), SparseStats()
    target.read_all_sparsely(SparseReading(policy, stats, policy.min_context or 0))
    return target, stats


@torch.no_grad()
def feed(target: FlatTarget, ids: Sequence[int], row: int = 0, keep: int = 0) -> torch.Tensor:
    """Append tokens to a row; logits of all unless `keep` says how many."""
    return target.forward([Feed(row, list(ids), keep or len(ids), is_prompt=keep > 0)])[0]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative RMS difference."""
    return float((found - wanted).norm() / wanted.norm())
