"""The conditions of a measurement: machine, versions, load, and which weights."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.profiling import cpu_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

PACKAGES = ("dspark-hf", "torch", "transformers", "tokenizers", "numpy")
SAMPLED_VALUES = 16
"""Values per parameter that a fingerprint reads."""


def machine() -> dict[str, Any]:
    """Return what results must have in common to be compared: CPU and cores."""
    return {"cpu": cpu_name(), "cores": usable_cores(), "architecture": platform.machine()}


def usable_cores() -> int:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    """Return the machine's load over the last minute; None where the system tells none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def conditions(command: str) -> dict[str, Any]:
    """Return what belongs to one run: command, date, versions, threads.

    Args:
        command: The command line.

    Returns:
        dict[str, Any]: As JSON.
    """
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": {"python": platform.python_version(), **_package_versions()},
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return the command without what is private to a machine.

    Args:
        arguments: Those behind the program's name.

    Returns:
        str: The command; of absolute paths only the last part is kept.
    """
    shown = []
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        is_path = Path(value).is_absolute()
        shown.append(f"{option}{equals}.../{Path(value).name}" if is_path else argument)
    return " ".join(["dspark-hf", *shown])


def describe_model(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """Return which model this is, whatever folder and dtype it was loaded from and in.

    Args:
        model: The target.
        name: Name for tables.

    Returns:
        dict[str, Any]: As JSON.
    """
    return {
        "name": name,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "fingerprint": fingerprint(model),
    }


def fingerprint(model: PreTrainedModel) -> str:
    """Hash every parameter's name, shape and first values, rounded to bfloat16.

    Rounded, as a float32 checkpoint loaded in bfloat16 is the same model.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        values = parameter.detach().flatten()[:SAMPLED_VALUES].to("cpu", torch.bfloat16)
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def threads_set_to(num_threads: int | None) -> Iterator[None]:
    """Limit torch's threads for a while; None leaves them."""
    saved = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(saved)


def _package_versions() -> Mapping[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
