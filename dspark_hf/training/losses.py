"""The published losses of a block drafter, from the target's likeliest tokens only.

Source: DSpark, arXiv:2607.05147, section 5: 0.1 CE + 0.9 L1 + 1.0 BCE, position k weighted by
exp(-(k - 1) / decay).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

EPSILON = 1e-5
"""Keeps the confidence label away from 0 and 1."""


@dataclass(frozen=True)
class LossWeights:
    """Shares of the three losses and the decay over positions, in positions."""

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True)
class BlockLoss:
    """Loss of a batch of blocks and what it is made of.

    Attributes:
        total: Scalar with gradient.
        overlap: Mean probability mass shared with the target per position, (N,): the acceptance of
            sampled drafts given that those before were accepted.
        agreement: Share of positions where both argmaxes agree, (N,): the same for greedy decoding.
        count: Positions counted, (N,).
        parts: Unweighted means of the three losses.
    """

    total: torch.Tensor
    overlap: torch.Tensor
    agreement: torch.Tensor
    count: torch.Tensor
    parts: dict[str, float]


def block_loss(
    logits: torch.Tensor,  # [M, N, V_draft]
    confidence: torch.Tensor | None,  # [M, N] logits
    labels: torch.Tensor,  # [M, N] draft ids of the text, -1 outside the draft vocabulary
    top_ids: torch.Tensor,  # [M, N, K] draft ids of the target's likeliest, -1 outside
    top_probs: torch.Tensor,  # [M, N, K]
    valid: torch.Tensor,  # [M, N] bool
    weights: LossWeights,
) -> BlockLoss:
    """Compute the loss of M blocks of N drafts.

    The L1 distance of two distributions is 2 - 2 * (mass they share), and what the drafter shares
    with the target outside the target's top K is neglected, so K probabilities suffice.

    Args:
        logits: The drafter's.
        confidence: Of its confidence head, or None.
        labels: The tokens that follow in the text.
        top_ids: Likeliest tokens by the target, descending.
        top_probs: Their probabilities.
        valid: Positions inside the text.
        weights: How losses and positions are weighted.

    Returns:
        BlockLoss: Means over valid positions.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, top_ids.clamp_min(0)) - total
    ours = chosen.exp() * (top_ids >= 0)
    overlap = torch.minimum(ours, top_probs).sum(dim=-1)
    scale = position_weights(valid, weights)
    norm = scale.sum().clamp_min(1e-9)
    entropy = total.squeeze(-1) - logits.gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1)
    entropy = entropy * (labels >= 0)
    parts = {
        "ce": (entropy * scale).sum() / norm,
        "l1": ((2 - 2 * overlap) * scale).sum() / norm,
    }
    loss = weights.cross_entropy * parts["ce"] + weights.distance * parts["l1"]
    if confidence is not None:
        truth = overlap.detach().clamp(EPSILON, 1 - EPSILON)
        bce = F.binary_cross_entropy_with_logits(confidence.float(), truth, reduction="none")
        parts["bce"] = (bce * scale).sum() / norm
        loss = loss + weights.confidence * parts["bce"]
    with torch.no_grad():
        count = valid.sum(dim=0)
        agrees = (logits.argmax(dim=-1) == top_ids[..., 0]) & valid
        some = count.clamp_min(1)
    return BlockLoss(
        total=loss,
        overlap=(overlap.detach() * valid).sum(dim=0) / some,
        agreement=agrees.sum(dim=0) / some,
        count=count,
        parts={name: float(value.detach()) for name, value in parts.items()},
    )


def position_weights(valid: torch.Tensor, weights: LossWeights) -> torch.Tensor:
    """Return exp(-(k - 1) / decay) at valid positions of (M, N), and 0 elsewhere."""
    position = torch.arange(valid.shape[1], device=valid.device)
    return torch.exp(-position / weights.decay) * valid


def expected_length(conditional: torch.Tensor) -> float:
    """Return tokens per target forward, bonus included, from conditional acceptance (N,)."""
    return 1.0 + float(conditional.cumprod(dim=0).sum())
