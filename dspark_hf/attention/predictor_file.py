"""The file of a trained page predictor: safetensors, and what they belong to as metadata.

Tensors are named `layers.3.query`, `layers.3.page` and `layers.3.offset`, float32. The metadata
names the layers that have them, so that a file with a part missing is told from a smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dspark_hf.attention.pages import PAGE
from dspark_hf.errors import CheckpointError
from dspark_hf.files import written_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

FORMAT, VERSION = "dspark_hf.page_predictor", 1
SHAPE = ("num_layers", "num_heads", "num_kv", "dim")
NUMBERS = (*SHAPE, "rank", "page_tokens")
"""What a file says of itself in whole numbers."""
PARTS = ("query", "page", "offset")
"""Tensors of a layer."""
MAX_DIGITS = 9


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
    metadata = {"format": FORMAT, "format_version": str(VERSION), "alpha": repr(held.alpha)}
    metadata |= {name: str(held.numbers[name]) for name in NUMBERS}
    metadata["layers"] = " ".join(map(str, sorted(held.parts)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        save_file(tensors, partial, metadata=metadata)


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
            facts = _Facts(path.name, file.metadata() or {})
            facts.check_kind()
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
    metadata: Mapping[str, str]

    def check_kind(self) -> None:
        """Refuse files of another kind or version."""
        kind, version = (self.metadata.get(name) for name in ("format", "format_version"))
        if kind != FORMAT or version != str(VERSION):
            raise CheckpointError(
                f"{self.file} must be a page predictor, format {FORMAT!r} version {VERSION}; got "
                f"format {kind!r} version {version!r}. Train one: dspark-hf train predictor."
            )

    def number(self, name: str) -> int:
        """Return a whole number above 0."""
        text = self.metadata.get(name, "")
        if not _is_number(text) or not int(text):
            raise self._wrong(name, "a whole number above 0")
        return int(text)

    def alpha(self) -> float:
        """Return the bound's alpha."""
        try:
            value = float(self.metadata.get("alpha", ""))
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise self._wrong("alpha", "a number from 0 to 1")
        return value

    def layers(self) -> list[int]:
        """Return the layers that have tensors."""
        words = self.metadata.get("layers", "none").split()
        if not all(map(_is_number, words)):
            raise self._wrong("layers", "numbers of layers")
        return [int(word) for word in words]

    def _wrong(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file} must give {name} as {wanted} in its metadata; got "
            f"{self.metadata.get(name)!r}. Get the file again."
        )


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS
