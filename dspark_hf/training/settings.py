"""TrainSettings: everything that decides a training run's result, frozen and checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dspark_hf.errors import ConfigError


@dataclass(frozen=True)
class DrafterShape:
    """What is trained; sizes left at None are the target's.

    Attributes:
        num_layers: Layers of the backbone.
        block_size: Drafts per block.
        target_layers: Tapped target blocks; empty for three spread over the depth.
        markov_rank: Rank of the sequential head; 0 for none.
        head: "vanilla", "gated" or "rnn".
        confidence: Whether there is a confidence head.
        intermediate_size: Width of the MLP.
        draft_vocab_size: Ids that can be proposed; None for all of the target's.
        mask_token_id: None picks a token that the texts do not use.
        reads_anchor: True for DSpark's readout (block_size drafts), False for DFlash's.
    """

    num_layers: int = 2
    block_size: int = 7
    target_layers: tuple[int, ...] = ()
    markov_rank: int = 64
    head: str = "vanilla"
    confidence: bool = True
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None
    reads_anchor: bool = True


@dataclass(frozen=True)
class TrainSettings:
    """How it is trained.

    Attributes:
        steps: Optimiser steps in all.
        batch_size: Texts per step and process.
        anchors: Blocks per text and step.
        learning_rate: Peak, after `warmup_steps`, falling to a tenth by a cosine.
        warmup_steps: Steps of linear rise.
        weight_decay: Of AdamW, on matrices.
        clip_norm: Largest gradient norm.
        max_tokens: Longer texts are cut.
        top_k: Target probabilities kept per position.
        validation_share: Of the texts, held out.
        validate_every: Steps between validations.
        save_every: Steps between checkpoints.
        from_target: Whether to start from the target's last blocks.
        only_answers: Whether anchors lie in answers only.
        precision: "bf16" or "no", of the drafter's matrix products.
        seed: Of everything random.
        cross_entropy: Share of the cross entropy in the loss.
        distance: Share of the L1 distance.
        confidence: Share of the confidence head's loss.
        decay: Of the weights over positions, in positions.
        teacher: Path or hub id of a block drafter to learn from as well; None for none.
        distillation: Share of the L1 distance to the teacher's distributions.
        from_bigrams: Whether the sequential head starts from which token follows which in the
            texts, see `start.start_from_bigrams`.
        from_drafter: Path or hub id of a block drafter of this target to go on from, in place of
            `from_target` and `from_bigrams`; None for none. Its shape and draft ids are kept.
    """

    steps: int = 1000
    batch_size: int = 8
    anchors: int = 64
    learning_rate: float = 6e-4
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    max_tokens: int = 512
    top_k: int = 32
    validation_share: float = 0.02
    validate_every: int = 100
    save_every: int = 100
    from_target: bool = True
    only_answers: bool = True
    precision: str = "no"
    seed: int = 0
    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    teacher: str | None = None
    distillation: float = 0.5
    from_bigrams: bool = False
    from_drafter: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the parameter."""
        for name in ("steps", "batch_size", "anchors", "top_k", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.precision not in ("no", "bf16"):
            raise ConfigError(f"precision must be 'no' or 'bf16'; got {self.precision!r}.")
        if not 0 < self.validation_share < 1:
            raise ConfigError(
                f"validation_share must lie between 0 and 1; got {self.validation_share}."
            )
        if self.from_drafter is not None and self.from_bigrams:
            raise ConfigError(
                "from_bigrams would replace what from_drafter brings; got both. Choose one."
            )
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be positive; got {self.learning_rate}.")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)
