"""The file of a trained page predictor: safetensors, and what they belong to as metadata.

Tensors are named `layers.3.query`, `layers.3.page` and `layers.3.offset`, float32. The metadata is
one JSON object; it names the layers that have them, so that a file with a part missing is told from
a smaller one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dspark_hf.attention.pages import PAGE
from dspark_hf.errors import CheckpointError
from dspark_hf.files import written_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

KEY, VERSION = "dspark_hf.page_predictor", 1
SHAPE = ("num_layers", "num_heads", "num_kv", "dim")
NUMBERS = (*SHAPE, "rank", "page_tokens")
"""What a file says of itself in whole numbers."""
PARTS = ("query", "page", "offset")
"""Tensors of a layer."""


@dataclass(frozen=True)
class PredictorFile:
    """What a file holds.

    Attributes:
        numbers: By name, those of `NUMBERS`.
        alpha: Of the bound.
        parts: Tensors by layer and name.
    """

    numbers: Mapping[str, int]
    alpha: float
    parts: Mapping[int, Mapping[str, torch.Tensor]]


def tensor_name(layer: int, part: str) -> str:
    """Return the name of a layer's tensor."""
    return f"layers.{layer}.{part}"


def write_predictor(path: Path, held: PredictorFile) -> None:
    """Write a file, whole or not at all; its folder is made."""
    tensors = {
        tensor_name(layer, part): tensor.detach().float().cpu().contiguous()
        for layer, parts in held.parts.items()
        for part, tensor in parts.items()
    }
    facts = {"version": VERSION, "alpha": held.alpha, "layers": sorted(held.parts)}
    facts |= {name: held.numbers[name] for name in NUMBERS}
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        # In one entry: several would be written in an order that changes from run to run.
        save_file(tensors, partial, metadata={KEY: json.dumps(facts)})


def read_predictor(path: Path) -> PredictorFile:
    """Read what `write_predictor` wrote.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it is no such file, of another version, or a tensor is missing or
            unexpected. Shapes are not looked at.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = _Facts.of(path.name, (file.metadata() or {}).get(KEY))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"a page predictor must be a whole safetensors file; reading {str(path)!r} failed: "
            f"{error}. Get the file again."
        ) from error
    numbers = {name: facts.number(name) for name in NUMBERS}
    if numbers["page_tokens"] != PAGE or numbers["num_heads"] % numbers["num_kv"]:
        raise CheckpointError(
            f"{path.name} must score pages of {PAGE} tokens with query heads in equal groups; got "
            f"pages of {numbers['page_tokens']} and {numbers['num_heads']} query heads for "
            f"{numbers['num_kv']} key heads. Train the predictor again."
        )
    layers = facts.layers()
    names = {tensor_name(layer, part) for layer in layers for part in PARTS}
    for problem, found in (("lacks", names - set(tensors)), ("has", set(tensors) - names)):
        if found:
            raise CheckpointError(
                f"{path.name} must hold the tensors of its layers {layers}, and no others; it "
                f"{problem} {min(found)!r}. Get the file again."
            )
    parts = {layer: {part: tensors[tensor_name(layer, part)] for part in PARTS} for layer in layers}
    return PredictorFile(numbers, facts.alpha(), parts)


@dataclass(frozen=True)
class _Facts:
    """What a file says of itself."""

    file: str
    held: Mapping[str, Any]

    @classmethod
    def of(cls, file: str, text: str | None) -> _Facts:
        """Read the metadata; refuse files of another kind or version."""
        try:
            held = json.loads(text or "null")
        except ValueError:
            held = None
        if not isinstance(held, dict) or held.get("version") != VERSION:
            raise CheckpointError(
                f"{file} must have the metadata of a page predictor, {KEY!r} of version {VERSION}; "
                f"got {text!r}. Train one: dspark-hf train predictor."
            )
        return cls(file, held)

    def number(self, name: str) -> int:
        """Return a whole number above 0."""
        value = self.held.get(name)
        if type(value) is not int or value < 1:
            raise self._wrong(name, "a whole number above 0")
        return value

    def alpha(self) -> float:
        """Return the bound's alpha."""
        value = self.held.get("alpha")
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._wrong("alpha", "a number from 0 to 1")
        return float(value)

    def layers(self) -> list[int]:
        """Return the layers that have tensors."""
        value = self.held.get("layers")
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            raise self._wrong("layers", "a list of layers")
        return value

    def _wrong(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file} must give {name} as {wanted} in its metadata; got "
            f"{self.held.get(name)!r}. Get the file again."
        )
