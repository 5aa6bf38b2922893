"""Tile sizes and launch options; plain Python, so that nothing here needs Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAGE_SIZE = 16
"""Tokens per page of the key-value cache: finer than 32 at equal budget."""
MIN_DOT = 16
"""Smallest side of a matrix product on tensor cores."""
LOG2_E = 1.4426950408889634
"""Kernels use exp2 and log2, which are single instructions."""
LN_2 = 0.6931471805599453

MAX_TILE = {2: 16_384, 4: 4_096}
"""Query rows times value width of one accumulator, by bytes per element: more spills registers.
Exact float32 products run on the ordinary cores and hold their operands in registers."""


def power_of_two(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `least`.

    Args:
        size: Size to cover.
        least: Lower bound, itself a power of two.

    Returns:
        int: The power of two.
    """
    return max(least, 1 << max(0, size - 1).bit_length())


def ceil_div(size: int, part: int) -> int:
    """Return how many parts cover `size`."""
    return -(-size // part)


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled: chosen from tables, never measured, never by batch size.

    Attributes:
        block: Keys, pages or vocabulary entries per step, as the kernel says.
        num_warps: Warps per program.
        num_stages: Software pipelining depth.
    """

    block: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Build:
    """One variant of a kernel that is compiled ahead of time and held to the chips' limits.

    Attributes:
        name: Says the regime, as in "bf16 D128 1 token".
        kernel: The jitted function.
        pointers: Element type of every pointer argument, as in {"p_q": "bf16"}.
        constants: Compile-time arguments.
        launch: The launcher's own choice for this regime.
        floats: Names of scalar float arguments.
        has_dot: Whether the kernel multiplies matrices.
    """

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    launch: Launch
    floats: tuple[str, ...] = ()
    has_dot: bool = True
