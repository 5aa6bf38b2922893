"""Loading a block drafter, whatever its layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.drafting.checkpoints import deepspec, dflash, speculators
from dspark_hf.drafting.checkpoints.base import (
    EMBED,
    HEAD,
    BlockCheckpoint,
    check_against_target,
    check_shape,
    check_tensors,
)
from dspark_hf.drafting.checkpoints.detect import KINDS, detect_kind
from dspark_hf.drafting.checkpoints.fields import Fields, refuse_quantized
from dspark_hf.drafting.checkpoints.source import (
    CALIBRATION,
    CONFIG,
    fetch,
    read_config,
    read_json,
    read_tensors,
)
from dspark_hf.drafting.checkpoints.vocabulary import checked_table
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dspark_hf.drafting.block.spec import BlockSpec

__all__ = ["check_against_target", "load_checkpoint", "read_config", "read_spec"]


def load_checkpoint(
    source: str | Path, *, revision: str | None = None, vocab_size: int | None = None
) -> BlockCheckpoint:
    """Load a block drafter.

    Args:
        source: Folder, or id of a repository on the hub.
        revision: Of the hub repository.
        vocab_size: Rows of the target's embedding; needed for Transformers' DFlash assistants only,
            whose config.json does not say it.

    Returns:
        BlockCheckpoint: Tensors on the CPU, in the type they are stored in.

    Raises:
        CheckpointError: If it is no block drafter, or anything in it is missing, unexpected or
            malformed.
    """
    folder = fetch(source, revision=revision)
    config = read_json(folder / CONFIG)
    kind = detect_kind(config)
    if kind is None:
        raise CheckpointError(
            f"a block drafter must be one of {list(KINDS)}; got an ordinary config.json with "
            f"architectures {config.get('architectures')} in {str(source)!r}. Load it as a model."
        )
    spec = read_spec(config, kind=kind, vocab_size=vocab_size)
    tensors = read_tensors(folder)
    if kind == "hf-dflash":
        tensors = {dflash.HF_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
    if kind.startswith("speculators"):
        tensors = {k: v for k, v in tensors.items() if k not in speculators.TRAINING_ONLY}
    embed, head = tensors.pop(EMBED, None), tensors.pop(HEAD, None)
    if embed is not None:
        check_shape(EMBED, embed, (spec.vocab_size, spec.hidden_size))
    if head is not None:
        check_shape(HEAD, head, (spec.draft_vocab_size, spec.hidden_size))
    d2t = checked_table(
        tensors.pop("d2t", None),
        tensors.pop("t2d", None),
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.draft_vocab_size,
    )
    check_tensors(spec, tensors)
    calibration = folder / CALIBRATION
    return BlockCheckpoint(
        spec=spec,
        tensors=tensors,
        embed=embed,
        head=head,
        d2t=d2t,
        kind=kind,
        config=config,
        calibration=read_json(calibration) if calibration.is_file() else None,
    )


def read_spec(config: Mapping[str, Any], *, kind: str, vocab_size: int | None = None) -> BlockSpec:
    """Translate a config.json of a known layout.

    Args:
        config: Content of config.json.
        kind: One of `detect.KINDS`.
        vocab_size: Rows of the target's embedding, where the layout does not say it.

    Returns:
        BlockSpec: What the drafter is.

    Raises:
        CheckpointError: If a field is missing, malformed or not supported, or layer ids do not fit
            the number of target blocks that config.json says.
    """
    refuse_quantized(Fields(config))
    if kind.startswith("deepspec"):
        spec = deepspec.read_spec(config)
    elif kind.startswith("speculators"):
        spec = speculators.read_spec(config)
    elif kind == "zlab-dflash":
        spec = dflash.read_zlab_spec(config)
    else:
        spec = dflash.read_hf_spec(config, vocab_size=vocab_size)
    blocks, last = spec.num_target_layers, max(spec.target_layers)
    if blocks is not None and last >= blocks:
        raise CheckpointError(
            f"target_layer_ids must be below num_target_layers {blocks}; got {last}. Repair the "
            "drafter's config.json."
        )
    return spec
