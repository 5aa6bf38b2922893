"""From a loaded checkpoint to a drafter for one target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_hf import compat
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.drafting.block.model import BlockModel
from dspark_hf.drafting.block.taps import decoder_blocks
from dspark_hf.drafting.block.vocabulary import Vocabulary
from dspark_hf.drafting.checkpoints.base import check_against_target
from dspark_hf.verification.scaling import Scalings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dspark_hf.drafting.checkpoints.base import BlockCheckpoint


def build_block_drafter(
    checkpoint: BlockCheckpoint, target: PreTrainedModel, *, name: str = "block"
) -> BlockDrafter:
    """Make a drafter of a checkpoint, in the target's dtype and where its embedding is.

    Args:
        checkpoint: As loaded.
        target: The model to draft for.
        name: Name in logs and statistics.

    Returns:
        BlockDrafter: Ready to draft.

    Raises:
        CheckpointError: If the checkpoint was made for another target.
    """
    rows, width = target.get_input_embeddings().weight.shape
    check_against_target(
        checkpoint,
        hidden_size=int(width),
        num_layers=len(decoder_blocks(target)),
        vocab_size=int(rows),
    )
    device, dtype = compat.input_device(target), target.dtype
    model = BlockModel(checkpoint.spec)
    model.load_state_dict(checkpoint.tensors)
    model.to(device, dtype).eval().requires_grad_(False)
    vocabulary = Vocabulary(
        checkpoint.spec, target, embed=checkpoint.embed, head=checkpoint.head, d2t=checkpoint.d2t
    )
    vocabulary.to(device, dtype)
    stored = checkpoint.calibration
    scalings = None if stored is None else Scalings.from_dict(stored)
    return BlockDrafter(model, vocabulary, target, scalings=scalings, name=name)
