"""Validation shared by the ops: every message says what must hold, what was got and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Storage types the kernels read; arithmetic is in float32 for each."""
INTEGERS = (torch.int32, torch.int64)
"""Types of slots, positions, lengths and counts."""


def require_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | str]) -> None:
    """Refuse a tensor of another shape.

    Args:
        name: Parameter name, for the message.
        tensor: The argument.
        shape: Sizes that must hold; a letter stands for any size.

    Raises:
        ValueError: If the number of axes or a given size differs.
    """
    got = tuple(tensor.shape)
    wanted = tuple(shape)
    fits = len(got) == len(wanted) and all(
        isinstance(want, str) or size == want for size, want in zip(got, wanted, strict=True)
    )
    if not fits:
        text = ", ".join(str(size) for size in wanted) + "," * (len(wanted) == 1)
        raise ValueError(f"{name} must have shape ({text}); got {got}. Reshape or pad it.")


def require_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Refuse a tensor of a type not in `allowed`.

    Raises:
        ValueError: If the type is another.
    """
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name} must be one of {names}; got {tensor.dtype}. Convert it.")


def require_last_axis_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last axis is strided: the kernels load rows of it as vectors.

    Raises:
        ValueError: If neighbouring elements of the last axis are not neighbours in memory.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous along its last axis; got strides {tensor.stride()}. "
            "Call .contiguous()."
        )


def require_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not contiguous.

    Raises:
        ValueError: If it is strided.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous; got strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}. Call .contiguous()."
        )


def require_same_device(**tensors: torch.Tensor | None) -> torch.device:
    """Return the device all tensors share.

    Raises:
        ValueError: If they lie on different devices.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(present.items()))
    for name, tensor in present.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{name} must be on the device of {first_name}, {first.device}; got "
                f"{tensor.device}. Move it there."
            )
    return first.device


def require_groups(num_heads: int, num_kv_heads: int) -> int:
    """Return the query heads per key head.

    Raises:
        ValueError: If the query heads do not divide evenly.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"the query heads must be a multiple of the key heads, {num_kv_heads}; got "
            f"{num_heads}. Check the axis order: heads come before tokens."
        )
    return num_heads // num_kv_heads


def require_range(name: str, value: float, low: float, high: float | None = None) -> None:
    """Refuse a number outside [low, high].

    Raises:
        ValueError: If it lies outside.
    """
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limits}; got {value}. Change it.")


def runs_triton(device: torch.device) -> bool:
    """Tell whether an op launches its kernel there: CUDA, and ROCm, which has the same name.

    Raises:
        NotImplementedError: If the device is neither a CPU nor a GPU that Triton compiles for.
    """
    if device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(
            f"the device must be a CPU (reference) or a CUDA or ROCm GPU (Triton); got {device}. "
            "Move the tensors."
        )
    return device.type == "cuda"
