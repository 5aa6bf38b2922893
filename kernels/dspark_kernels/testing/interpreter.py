"""Makes Triton's interpreter multiply bfloat16 matrices, which it gets wrong silently."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytest

INTERPRET = "TRITON_INTERPRET"
"""Must be set before Triton is imported: it decides what `triton.jit` returns."""


def is_interpreting() -> bool:
    """Tell whether this process runs kernels in the interpreter."""
    return os.environ.get(INTERPRET) == "1"


def _widened(handle: Any, bfloat16: Any) -> np.ndarray[Any, Any]:
    data: np.ndarray[Any, Any] = handle.data
    if handle.dtype.scalar != bfloat16:
        return data
    return (data.astype(np.uint32) << 16).view(np.float32)


def patch_bfloat16_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's matrix product by one that widens bfloat16 operands.

    The interpreter stores bfloat16 as the bits of an unsigned integer and multiplies the bits.
    Kernels use bfloat16 in load, store and dot only, so this one place is enough. Its conversion
    from float32 truncates; bounds of bfloat16 tests allow for that.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        left, right = _widened(a, tl.bfloat16), _widened(b, tl.bfloat16)
        product = np.matmul(left, right, dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def count_launches(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> list[tuple[Any, ...]]:
    """Record every launch of a kernel, as proof that it and not a fallback ran.

    Args:
        monkeypatch: Undoes the change.
        kernel: A jitted function, interpreted or compiled.

    Returns:
        list[tuple[Any, ...]]: The grids, in order of launch; filled as launches happen.
    """
    grids: list[tuple[Any, ...]] = []
    original = type(kernel).__getitem__

    def recorded(self: Any, grid: Any) -> Any:
        if self is kernel:
            grids.append(grid)
        return original(self, grid)

    monkeypatch.setattr(type(kernel), "__getitem__", recorded)
    return grids
