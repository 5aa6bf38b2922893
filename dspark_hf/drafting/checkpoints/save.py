"""Saving a block drafter in one of the two layouts that can hold all parts of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from dspark_hf.drafting.checkpoints import deepspec, speculators
from dspark_hf.drafting.checkpoints.base import EMBED, HEAD, BlockCheckpoint, check_tensors
from dspark_hf.drafting.checkpoints.load import read_spec
from dspark_hf.drafting.checkpoints.source import CALIBRATION, CONFIG, WEIGHTS
from dspark_hf.drafting.checkpoints.vocabulary import kept_mask
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

LAYOUTS = ("deepspec", "speculators")
NO_VERIFIER: Mapping[str, Any] = {"architectures": [], "name_or_path": None}
"""What the speculators layout says where the target is not known."""


def save_checkpoint(
    checkpoint: BlockCheckpoint,
    folder: str | Path,
    *,
    layout: str,
    include_embed: bool,
    include_head: bool,
    verifier: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json, model.safetensors and, if there is one, calibration.json.

    In the layout the checkpoint came in, config.json is kept as it was, with fields this package
    does not know; in the other one it is written anew.

    Args:
        checkpoint: What to write.
        folder: Where; made if it does not exist, and its files of these names are replaced.
        layout: One of `LAYOUTS`.
        include_embed: Whether to write the embedding.
        include_head: Whether to write the output head.
        verifier: name_or_path and architectures of the target, for the speculators layout; those
            of the checkpoint if None.

    Returns:
        Path: The folder.

    Raises:
        CheckpointError: If the layout cannot express the drafter, or a part it needs is missing.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout must be one of {list(LAYOUTS)}; got {layout!r}.")
    check_tensors(checkpoint.spec, checkpoint.tensors)
    config = _config(checkpoint, layout, verifier)
    tensors = _weights(checkpoint, layout, include_embed=include_embed, include_head=include_head)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_other_weights(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, config)
    (folder / CALIBRATION).unlink(missing_ok=True)
    if checkpoint.calibration is not None:
        _write_json(folder / CALIBRATION, checkpoint.calibration)
    return folder


def _config(
    checkpoint: BlockCheckpoint, layout: str, verifier: Mapping[str, Any] | None
) -> dict[str, Any]:
    spec, config = checkpoint.spec, checkpoint.config
    if config and checkpoint.kind.startswith(layout):
        before = read_spec(config, kind=checkpoint.kind)
        if before == spec:
            return dict(config)
        if before == replace(spec, num_target_layers=None):
            return {**config, "num_target_layers": spec.num_target_layers}
    carried = config.get("transformer_layer_config") or config
    dtype = str(checkpoint.tensors["fc.weight"].dtype).removeprefix("torch.")
    anchors = config.get("num_anchors", config.get("max_anchors"))
    if layout == "deepspec":
        return deepspec.write_config(spec, carried=carried, dtype=dtype, num_anchors=anchors)
    saved = (config.get("speculators_config") or {}).get("verifier")
    return speculators.write_config(
        spec,
        carried=carried,
        dtype=dtype,
        verifier=verifier or saved or NO_VERIFIER,
        num_anchors=anchors,
    )


def _weights(
    checkpoint: BlockCheckpoint, layout: str, *, include_embed: bool, include_head: bool
) -> dict[str, torch.Tensor]:
    tensors = dict(checkpoint.tensors)
    for name, tensor, is_included in (
        (EMBED, checkpoint.embed, include_embed),
        (HEAD, checkpoint.head, include_head),
    ):
        if layout == "deepspec" and not (is_included and tensor is not None):
            raise CheckpointError(
                f"a DeepSpec checkpoint must hold {name!r}, a copy of the target's; got none. Give "
                "the target to copy it from."
            )
        if is_included and tensor is None:
            raise CheckpointError(
                f"{name!r} must be given to be written; got none. Give the target to copy it from."
            )
        if is_included and tensor is not None:
            tensors[name] = tensor
    if checkpoint.d2t is not None:
        tensors["d2t"] = checkpoint.d2t
        tensors["t2d"] = kept_mask(checkpoint.d2t, checkpoint.spec.vocab_size)
    # A file holds every tensor on its own; tied or sliced ones share memory here.
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _refuse_other_weights(folder: Path) -> None:
    others = [
        path.name
        for pattern in ("*.safetensors", "*.safetensors.index.json")
        for path in sorted(folder.glob(pattern))
        if path.name != WEIGHTS
    ]
    if others:
        raise CheckpointError(
            f"the folder of a checkpoint must hold no other weights; got {others} in "
            f"{str(folder)!r}. Choose another folder."
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
