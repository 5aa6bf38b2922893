"""Distillation: a drafter that exists already as a second source to learn from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dspark_hf.drafting.block.model import BlockModel
from dspark_hf.drafting.block.vocabulary import Vocabulary
from dspark_hf.errors import ConfigError
from dspark_hf.training.forcing import TeacherForcing, predict
from dspark_hf.training.losses import position_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dspark_hf.drafting.block.spec import BlockSpec
    from dspark_hf.drafting.checkpoints.base import BlockCheckpoint
    from dspark_hf.training.forcing import Batch
    from dspark_hf.training.losses import LossWeights


class Teacher:
    """A frozen block drafter of the same target, asked about the same blocks."""

    def __init__(
        self,
        checkpoint: BlockCheckpoint,
        target: PreTrainedModel,
        spec: BlockSpec,
        vocabulary: Vocabulary,
        device: torch.device,
    ) -> None:
        """Prepare a teacher.

        Args:
            checkpoint: The teacher.
            target: The model both draft for.
            spec: Of the drafter that learns.
            vocabulary: Of the drafter that learns.
            device: Where to compute.

        Raises:
            ConfigError: If it drafts fewer tokens or taps blocks that the other does not.
        """
        own = checkpoint.spec
        missing = [layer for layer in own.target_layers if layer not in spec.target_layers]
        if missing:
            raise ConfigError(
                f"taps must include the teacher's {list(own.target_layers)}; got "
                f"{list(spec.target_layers)}. Tap the teacher's blocks too."
            )
        if own.num_drafts < spec.num_drafts:
            raise ConfigError(
                f"the teacher must draft at least {spec.num_drafts} tokens; got one that drafts "
                f"{own.num_drafts}. Lower block_size, or choose another teacher."
            )
        if own.logit_softcap is not None:
            raise NotImplementedError(
                "the teacher must have plain logits; got one with logit_softcap. Train without it."
            )
        model = BlockModel(own)
        model.load_state_dict(checkpoint.tensors)
        self.spec = own
        self.module = TeacherForcing(model.float()).to(device).eval().requires_grad_(False)
        self.vocabulary = Vocabulary(
            own, target, embed=checkpoint.embed, head=checkpoint.head, d2t=checkpoint.d2t
        )
        self.vocabulary.to(device, torch.float32)
        width = own.hidden_size
        places = [spec.target_layers.index(layer) for layer in own.target_layers]
        columns = [torch.arange(i * width, (i + 1) * width) for i in places]
        self.columns = torch.cat(columns).to(device)
        # The teacher's draft id of each of the learner's, -1 where it has none.
        theirs = self.vocabulary.to_target(torch.arange(own.draft_vocab_size))
        ours = vocabulary.to_target(torch.arange(spec.draft_vocab_size))
        table = torch.full((int(max(theirs.max(), ours.max())) + 1,), -1)
        table[theirs] = torch.arange(len(theirs))
        self.ids = table[ours].to(device)

    @torch.no_grad()
    def probs(self, batch: Batch, num_drafts: int) -> torch.Tensor:
        """Return its distributions over the learner's draft vocabulary, (M, N, V_draft).

        Args:
            batch: With the learner's features.
            num_drafts: N.
        """
        batch = replace(batch, features=batch.features[..., self.columns])
        logits, _ = predict(self.module, self.spec, self.vocabulary, batch)
        probs = torch.softmax(logits[:, :num_drafts].float(), dim=-1)
        return probs[..., self.ids.clamp_min(0)] * (self.ids >= 0)


def distribution_distance(
    logits: torch.Tensor, probs: torch.Tensor, valid: torch.Tensor, weights: LossWeights
) -> torch.Tensor:
    """Return the mean L1 distance to a teacher's distributions, with gradient.

    Args:
        logits: The learner's, (M, N, V_draft).
        probs: The teacher's, of the same shape.
        valid: Positions inside the text, (M, N).
        weights: How positions are weighted.

    Returns:
        torch.Tensor: A scalar between 0 and 2: 2 - 2 * (mass both give), as in `block_loss`.
    """
    shared = torch.minimum(torch.softmax(logits.float(), dim=-1), probs).sum(dim=-1)
    scale = position_weights(valid, weights)
    return ((2 - 2 * shared) * scale).sum() / scale.sum().clamp_min(1e-9)
