"""A drafter's predictions inside known texts: what training and distillation compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dspark_hf.drafting.block.model import teacher_forced

if TYPE_CHECKING:
    from dspark_hf.drafting.block.model import BlockModel
    from dspark_hf.drafting.block.spec import BlockSpec
    from dspark_hf.drafting.block.vocabulary import Vocabulary


@dataclass(frozen=True)
class Batch:
    """One step's input.

    Attributes:
        ids: Texts, int64 of shape (B, L), padded on the right.
        features: Of shape (B, L, m * d).
        top_ids: Draft ids of the target's likeliest tokens, (B, L, K); -1 outside.
        top_probs: Their probabilities.
        anchors: Positions, (B, A).
        lengths: Real tokens per text, (B,).
    """

    ids: torch.Tensor
    features: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    anchors: torch.Tensor
    lengths: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Real tokens of the batch."""
        return int(self.lengths.sum())


class TeacherForcing(nn.Module):
    """The drafter as one forward over known texts: what Accelerate wraps."""

    def __init__(self, drafter: BlockModel) -> None:
        """Wrap a drafter."""
        super().__init__()
        self.drafter = drafter

    def forward(
        self,
        embed: torch.Tensor,  # [V, d]
        head: torch.Tensor,  # [V_draft, d]
        features: torch.Tensor,  # [B, L, m * d]
        ids: torch.Tensor,  # [B, L]
        anchors: torch.Tensor,  # [B, A]
        previous: torch.Tensor,  # [B, A, N]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits (M, N, V_draft) and confidence logits (M, N)."""
        drafter = self.drafter
        hidden = teacher_forced(drafter, embed, features, ids, anchors).flatten(0, 1)
        previous = previous.flatten(0, 1)
        token = states = None
        if drafter.markov_head is not None:
            # One product with [head ; W2] in place of two and a sum over the vocabulary.
            token = drafter.markov_head.markov_w1(previous)
            codes = drafter.markov_head.codes(token, hidden)
            states = torch.cat([hidden, codes], dim=-1)
            head = torch.cat([head, drafter.markov_head.markov_w2.weight], dim=-1)
        logits = nn.functional.linear(hidden if states is None else states, head)
        if drafter.confidence_head is None:
            return logits, None
        return logits, drafter.confidence_head(hidden, token)


def predict(
    module: nn.Module, spec: BlockSpec, vocabulary: Vocabulary, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Predict the drafts of a batch's blocks from the texts themselves.

    Args:
        module: A `TeacherForcing`, or what Accelerate made of it.
        spec: Of its drafter.
        vocabulary: Of its drafter.
        batch: Texts, features and anchors.

    Returns:
        tuple[torch.Tensor, torch.Tensor | None]: Logits (B * A, N, V_draft) of the N drafts behind
        each anchor, and confidence logits (B * A, N).
    """
    first = 0 if spec.reads_anchor else 1
    # Row k predicts the token k + 1 - first behind the anchor, from the one before it.
    offsets = torch.arange(spec.block_size, device=batch.ids.device) - first
    previous = gather(batch.ids, batch.anchors[..., None] + offsets.clamp_min(0))
    embed = vocabulary.embedding().detach()
    if spec.scales_embedding:
        embed = embed.float() * spec.hidden_size**0.5
    logits, confidence = module(
        embed,
        vocabulary.head().detach().float(),
        batch.features.float(),
        batch.ids,
        batch.anchors,
        previous,
    )
    return logits[:, first:], None if confidence is None else confidence[:, first:]


def gather(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Pick values at places; places beyond the end give the last value.

    Args:
        values: Of shape (B, L, ...).
        places: int64 of shape (B, A, N).

    Returns:
        torch.Tensor: Of shape (B, A, N, ...).
    """
    rows = torch.arange(len(values), device=values.device)[:, None, None]
    return values[rows, places.clamp_max(values.shape[1] - 1)]
