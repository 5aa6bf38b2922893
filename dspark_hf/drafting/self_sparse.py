"""SelfSparseDrafter: the target drafts for itself, reading few pages of a long context.

The drafted tokens' keys and values, computed while pages were left out, are rolled back; verifying
computes them again over everything. So the text stays the dense model's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.attention.predictors import RecentPredictor
from dspark_hf.attention.sparse import SparseRow, SparseStats
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.values import Feed, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.targets.base import Target
    from dspark_hf.values import DraftRequest

DRAFT_POLICY = SparsePolicy(tokens=1024, predictor=RecentPredictor())
"""Sinks and a window: needs no scores, and drafts nearly as well as selected pages."""
MIN_CONTEXT = 4096
"""Shorter contexts are not drafted for: a step over fewer pages costs what a dense one does."""


@dataclass
class _Draft:
    request: DraftRequest
    ids: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)


class SelfSparseDrafter:
    """Drafts with the target itself, on the rows it is decoding."""

    name = "self-sparse"

    def __init__(
        self, policy: SparsePolicy = DRAFT_POLICY, *, min_context: int = MIN_CONTEXT
    ) -> None:
        """Prepare a drafter.

        Args:
            policy: What draft steps read.
            min_context: Tokens a row must hold to be drafted for.
        """
        self.policy, self.min_context = policy, min_context
        self.stats = SparseStats()
        self._target: FlatTarget | None = None

    def bind(self, target: Target) -> None:
        """Draft on this target from now on.

        Args:
            target: The one that verifies.

        Raises:
            NotImplementedError: If it cannot leave pages unread.
            CheckpointError: See `SparsePolicy.require_fit`.
            ConfigError: As above.
        """
        if not isinstance(target, FlatTarget) or target.cache.gathers:
            raise NotImplementedError(
                "drafter='self-sparse' needs a model that runs on the flat target; this one runs "
                f"on the {target.path} target. Use drafter='lookup'."
            )
        self.policy.require_fit(target.model)
        self._target = target

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Draft token by token for rows with a long context, as the Drafter protocol says."""
        drafts = [_Draft(request) for request in requests]
        growing = [d for d in drafts if len(d.request.ids) > self.min_context]
        target = self._target
        if target is None or not growing:
            return [Proposal() for _ in requests]
        rows = [(draft.request.row_id, len(draft.request.ids) - 1) for draft in growing]
        before = {row_id: target.cache.sparse.get(row_id) for row_id, _ in rows}
        try:
            for row_id, _ in rows:
                target.read_sparsely(row_id, SparseRow(self.policy, self.stats, self.min_context))
            feeds = [Feed(d.request.row_id, [d.request.ids[-1]], 1) for d in growing]
            while growing:
                logits = target.forward(feeds)
                for draft, row in zip(growing, logits, strict=True):
                    _extend(draft, row[-1:])
                growing = [d for d in growing if len(d.ids) < d.request.max_tokens]
                feeds = [Feed(d.request.row_id, d.ids[-1:], 1) for d in growing]
        finally:
            for row_id, length in rows:
                target.rollback(row_id, length)
                target.read_sparsely(row_id, before[row_id])
        return [
            Proposal(
                draft.ids,
                torch.stack(draft.probs) if draft.probs else None,
                confidence=draft.confidence,
            )
            for draft in drafts
        ]

    def free(self, row_id: int) -> None:
        """Keep nothing per row."""


def _extend(draft: _Draft, logits: torch.Tensor) -> None:
    """Add a token to a draft; its confidence is known before it is drawn."""
    warp = draft.request.warp
    probs = torch.softmax(logits, dim=-1)[0] if warp is None else warp(logits)[0]
    draft.confidence.append(min(float(probs.max()), 1.0))
    if warp is None:
        draft.ids.append(int(logits.argmax(dim=-1)))
        return
    probs = probs.cpu()
    draft.ids.append(int(torch.multinomial(probs, 1, generator=draft.request.generator)))
    draft.probs.append(probs)
