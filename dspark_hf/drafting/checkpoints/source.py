"""Files of a checkpoint: a local folder or the hub, safetensors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CONFIG, CALIBRATION = "config.json", "calibration.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PATTERNS = [CONFIG, CALIBRATION, "*.safetensors", "*.safetensors.index.json"]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HUB_ERRORS = (HfHubHTTPError, EntryNotFoundError, HFValidationError, OSError)
"""What the hub client raises when there is no such repository, no access or no network."""


def read_config(source: str | Path, *, revision: str | None = None) -> dict[str, Any] | None:
    """Read config.json alone, to see what a source is before anything else is loaded.

    Args:
        source: Folder or hub id.
        revision: Of the hub repository.

    Returns:
        dict[str, Any] | None: Its content; None if there is none or the hub cannot be reached.

    Raises:
        CheckpointError: If it is not a JSON object.
    """
    folder = Path(source)
    if folder.is_dir():
        return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    try:
        return read_json(Path(hf_hub_download(str(source), CONFIG, revision=revision)))
    except HUB_ERRORS:
        return None


def fetch(source: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, downloaded if it is not local.

    Args:
        source: Folder or hub id.
        revision: Of the hub repository.

    Returns:
        Path: A local folder with a config.json.

    Raises:
        CheckpointError: If there is no such folder or repository, or the hub cannot be reached.
    """
    folder = Path(source)
    if not folder.is_dir():
        try:
            folder = Path(
                snapshot_download(str(source), revision=revision, allow_patterns=PATTERNS)
            )
        except HUB_ERRORS as error:
            raise CheckpointError(
                f"a drafter must be a folder or the id of a repository on the hub; {str(source)!r} "
                f"is no folder, and the hub said: {' '.join(str(error).split())[:200]}"
            ) from error
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"a checkpoint must have a {CONFIG}; got none in {str(folder)!r}. Give the folder that "
            "holds it."
        )
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: Of the file.

    Returns:
        dict[str, Any]: The object.

    Raises:
        CheckpointError: If it holds anything else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} must be JSON; reading {str(path)!r} failed: {error}. Get the file again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path.name} must be a JSON object; got a {type(value).__name__} in {str(path)!r}. "
            "Get the file again."
        )
    return value


def read_tensors(
    folder: Path, wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, torch.Tensor]:
    """Read tensors from one safetensors file or from the shards of an index.

    Args:
        folder: Of the checkpoint.
        wanted: Whether a tensor of that name is to be read; by default all are.

    Returns:
        dict[str, torch.Tensor]: By name, on the CPU.

    Raises:
        CheckpointError: If a file is missing or broken, or there are no safetensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                    if wanted(name):
                        tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path.name} must be a whole safetensors file; reading {str(path)!r} failed: "
                f"{error}. Get the file again."
            ) from error
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(
                f"{INDEX} must hold a weight_map; got {shards!r}. Get the file again."
            )
        files = [folder / str(name) for name in sorted(set(map(str, shards.values())))]
        for path in files:
            # A name with a folder in it would lead out of the checkpoint.
            if path.parent != folder or not path.is_file():
                raise CheckpointError(
                    f"all shards of {INDEX} must lie beside it; got no {path.name!r} in "
                    f"{str(folder)!r}. Get the whole checkpoint."
                )
        return files
    found = sorted(folder.glob("*.safetensors"))
    if folder / WEIGHTS in found:
        return [folder / WEIGHTS]
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"several safetensors files must come with {INDEX}; got "
            f"{[path.name for path in found]} without one. Get the whole checkpoint."
        )
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            "weights must be safetensors, as pickled ones can run code when loaded; got "
            f"{pickles}. Convert them where you trust them."
        )
    raise CheckpointError(
        f"a checkpoint must have {WEIGHTS}; got no weights in {str(folder)!r}. Get the whole "
        "checkpoint."
    )
