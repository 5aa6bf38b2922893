"""Lessons for a page predictor: what one window's samples teach, and how well scores know it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dspark_hf.attention.pages import PAGE
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.attention.predictors import BoundPredictor, page_weights
from dspark_hf.attention.sparse import best_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.attention.learned import PageGate
    from dspark_hf.training.page_samples import PageSamples

POLICY = SparsePolicy()
"""Whose sink and recent pages are always read."""
ALPHA = 0.5
UNSEEN = -1e30
"""Log mass of what is not there: finite, so that 0 times it is 0."""


@dataclass(frozen=True)
class Quality:
    """How well pages are scored.

    Attributes:
        loss: Kullback-Leibler divergence of estimated from true masses, in nats.
        captured: Share of attention on the pages that would be read.
        error: Estimated less true log mass of all pages that may be left, the mean, in nats.
    """

    loss: float
    captured: float
    error: float


@dataclass(frozen=True)
class Lesson:
    """Samples and what is to be learned from them.

    Attributes:
        samples: Queries and summaries.
        free: Pages that may be left, bool of shape (Q, P).
        kept: Log mass of all others together, of shape (Hkv, G, Q, 1).
        truth: Shares of attention, of the others together and of each page, (Hkv, G, Q, 1 + P).
    """

    samples: PageSamples
    free: torch.Tensor
    kept: torch.Tensor
    truth: torch.Tensor

    @classmethod
    def of(cls, samples: PageSamples) -> Lesson:
        """Prepare samples."""
        free = samples.free(POLICY)
        kept = samples.log_mass.masked_fill(free, UNSEEN).logsumexp(dim=-1, keepdim=True)
        free_mass = samples.log_mass.masked_fill(~free, UNSEEN)
        return cls(samples, free, kept, torch.cat([kept, free_mass], dim=-1).softmax(dim=-1))

    def scores(self, gate: PageGate | None) -> torch.Tensor:
        """Return a gate's scores, or the bound's, of shape (Hkv, G, Q, P)."""
        query, samples = self.samples.query.flatten(1, 2), self.samples
        if gate is None:
            scores = BoundPredictor(ALPHA).scores(query, samples.summary, 0, samples.scale)
        else:
            scores = gate.scores(query, samples.summary, ALPHA, samples.scale)
        return scores.view_as(samples.log_mass)

    def loss(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the divergence of estimated from true masses, the mean over heads and queries."""
        estimate = (scores + math.log(PAGE)).masked_fill(~self.free, UNSEEN)
        guess = torch.cat([self.kept, estimate], dim=-1).log_softmax(dim=-1)
        divergence = self.truth * (self.truth.clamp_min(1e-30).log() - guess)
        return divergence.sum(dim=-1).mean()

    def captured(self, scores: torch.Tensor, budget: int) -> float:
        """Return the share of attention on the pages that a step would read by these scores.

        Args:
            scores: Of shape (Hkv, G, Q, P).
            budget: Pages per key head, on average over them.
        """
        num_kv, total = len(scores), 0.0
        for i, pages in enumerate(self.samples.pages.tolist()):
            mass = page_weights(self.samples.log_mass[:, :, i, :pages])
            order = best_pages(
                page_weights(scores[:, :, i, :pages]),
                budget * num_kv,
                POLICY.sink_pages,
                POLICY.recent_pages,
            )
            total += float(mass.flatten()[order].sum()) / num_kv
        return total / len(self.samples.pages)

    def errors(self, scores: torch.Tensor) -> torch.Tensor:
        """Return how far the estimated log mass of the free pages is off, in nats, (Hkv, G, Q)."""
        estimate = (scores + math.log(PAGE)).masked_fill(~self.free, UNSEEN).logsumexp(dim=-1)
        return estimate - self.samples.log_mass.masked_fill(~self.free, UNSEEN).logsumexp(dim=-1)


@torch.no_grad()
def mean_loss(gate: PageGate | None, lessons: Sequence[Lesson]) -> float:
    """Return the mean loss of a gate, or of the bound, on some windows."""
    return sum(float(each.loss(each.scores(gate))) for each in lessons) / len(lessons)


@torch.no_grad()
def measure(gate: PageGate | None, lessons: Sequence[Lesson], budget: int) -> Quality:
    """Return how well a gate, or the bound, scores the pages of some windows.

    Args:
        gate: None for the bound.
        lessons: The windows.
        budget: Pages per key head that are read.
    """
    scored = [(each, each.scores(gate)) for each in lessons]
    count = len(lessons)
    return Quality(
        loss=sum(float(each.loss(scores)) for each, scores in scored) / count,
        captured=sum(each.captured(scores, budget) for each, scores in scored) / count,
        error=sum(float(each.errors(scores).mean()) for each, scores in scored) / count,
    )
