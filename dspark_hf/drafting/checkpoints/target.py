"""What a layout may copy from the target: its embedding, its output head, its number of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dspark_hf.drafting.checkpoints.base import BlockCheckpoint, check_against_target
from dspark_hf.drafting.checkpoints.fields import Fields
from dspark_hf.drafting.checkpoints.source import CONFIG, fetch, read_json, read_tensors
from dspark_hf.drafting.checkpoints.vocabulary import target_ids
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

EMBED_NAMES = (
    "model.embed_tokens.weight", "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight", "embed_tokens.weight",
)  # fmt: skip
"""Where causal LMs of the supported families keep their embedding."""
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class TargetParts:
    """The parts of a target that a drafter's checkpoint may hold copies of.

    Attributes:
        name: Folder or hub id.
        architectures: From its config.json.
        num_layers: Blocks.
        embed: Of shape (rows, d).
        head: Of shape (rows, d); the embedding itself where they are tied.
    """

    name: str
    architectures: tuple[str, ...]
    num_layers: int
    embed: torch.Tensor
    head: torch.Tensor

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.embed.shape[0])


def read_target(source: str | Path, *, revision: str | None = None) -> TargetParts:
    """Read a target's parts, without building the model.

    Args:
        source: Folder or hub id of a causal LM.
        revision: Of the hub repository.

    Returns:
        TargetParts: Tensors on the CPU.

    Raises:
        CheckpointError: If a part is not where causal LMs have it.
    """
    folder = fetch(source, revision=revision)
    config = read_json(folder / CONFIG)
    text = Fields(config).part("text_config") if "text_config" in config else Fields(config)
    names = {*EMBED_NAMES, *HEAD_NAMES}
    tensors = read_tensors(folder, lambda name: name in names)
    embed = next((tensors[name] for name in EMBED_NAMES if name in tensors), None)
    if embed is None:
        raise CheckpointError(
            f"the target's embedding must be one of {list(EMBED_NAMES)}; got none of them in "
            f"{str(source)!r}. Give a causal LM of another family."
        )
    # Tied weights are saved once, under the embedding's name.
    head = next((tensors[name] for name in HEAD_NAMES if name in tensors), embed)
    return TargetParts(
        name=str(source),
        architectures=tuple(map(str, config.get("architectures") or ())),
        num_layers=text.integer("num_hidden_layers"),
        embed=embed,
        head=head,
    )


def with_target(checkpoint: BlockCheckpoint, target: TargetParts) -> BlockCheckpoint:
    """Fill in what a checkpoint borrows from its target.

    Args:
        checkpoint: A drafter; what it has already is kept.
        target: Its target; rows of a padded vocabulary beyond the drafter's are left out.

    Returns:
        BlockCheckpoint: With embedding, head and number of target blocks.

    Raises:
        CheckpointError: If the drafter was not made for a target like this one.
    """
    spec = checkpoint.spec
    check_against_target(
        checkpoint,
        hidden_size=int(target.embed.shape[1]),
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
    )
    head = target.head[: spec.vocab_size]
    if checkpoint.d2t is not None:
        head = target.head[target_ids(checkpoint.d2t)]
    return replace(
        checkpoint,
        spec=replace(spec, num_target_layers=target.num_layers),
        embed=target.embed[: spec.vocab_size] if checkpoint.embed is None else checkpoint.embed,
        head=head if checkpoint.head is None else checkpoint.head,
    )
