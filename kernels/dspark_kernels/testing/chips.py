"""The chips kernels are compiled for, and what one program may use on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Limits of one architecture.

    Attributes:
        name: As in reports.
        backend: Triton's name of the back end.
        arch: Triton's name of the architecture.
        warp_size: Threads per warp.
        shared_bytes: Most shared memory per program.
        registers: Most registers per thread.
        source: Where the limits are from.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    registers: int
    source: str


_KNOWN = "generally known; neither read from a manual here nor from a device"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", "cuda", 80, 32, 166_912, 255, _KNOWN),
        Chip("sm_90", "cuda", 90, 32, 232_448, 255, _KNOWN),
        Chip("sm_100", "cuda", 100, 32, 232_448, 255, _KNOWN),
        Chip("gfx942", "hip", "gfx942", 64, 65_536, 512, _KNOWN),
    )
}
"""A100, H100 and H200, B200, MI300."""
