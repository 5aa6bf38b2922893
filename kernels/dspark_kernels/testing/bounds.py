"""Comparison with a reference, and memory around tensors that shows stray writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT32_RMS = 2e-5
"""Sums of up to a few thousand terms in float32, in another order than the reference's."""
BFLOAT16_RMS = 1.5e-2
"""Two roundings to 8 bits of mantissa (weights before the second product, the output); the
interpreter truncates where a GPU rounds to nearest, which doubles the error."""
FLOAT16_RMS = 2e-3
"""As bfloat16, with 11 bits of mantissa."""
RELATIVE_RMS = {
    torch.float32: FLOAT32_RMS,
    torch.bfloat16: BFLOAT16_RMS,
    torch.float16: FLOAT16_RMS,
}
GUARD = 256
"""Elements before and after a guarded tensor."""
SENTINEL = -77.0
"""What guards hold: representable in every type used."""


def relative_rms(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the RMS of the difference over the RMS of the expected values.

    Args:
        ours: Result under test.
        expected: Reference; equal infinities count as equal.

    Returns:
        float: NaN if anything in the result is NaN, so that no bound accepts it.
    """
    left, right = ours.detach().double().cpu(), expected.detach().double().cpu()
    same = left == right
    difference = torch.where(same, 0.0, left - right)
    scale = torch.where(right.isfinite(), right, 0.0).norm()
    return float(difference.norm() / scale.clamp(min=1e-30))


def assert_close(
    ours: torch.Tensor, expected: torch.Tensor, bound: float, what: str = "result"
) -> None:
    """Fail unless shape and values agree within a relative RMS bound.

    Raises:
        AssertionError: With the measured error.
    """
    if ours.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(ours.shape)}, not {tuple(expected.shape)}")
    error = relative_rms(ours, expected)
    if not error <= bound:
        raise AssertionError(f"{what}: relative RMS error {error:.3g} exceeds {bound:.3g}")


@dataclass
class Guarded:
    """A tensor with sentinels around it in memory: an out-of-bounds store cannot go unseen.

    Attributes:
        tensor: The view to hand to a kernel.
        memory: The whole allocation.
    """

    tensor: torch.Tensor
    memory: torch.Tensor

    def assert_intact(self) -> None:
        """Fail if a sentinel was overwritten.

        Raises:
            AssertionError: If memory around the tensor changed.
        """
        edges = torch.cat([self.memory[:GUARD], self.memory[-GUARD:]])
        if not bool((edges == SENTINEL).all()):
            raise AssertionError("memory around the tensor was overwritten")


def guarded(values: torch.Tensor) -> Guarded:
    """Copy a tensor into the middle of a larger allocation filled with sentinels.

    Args:
        values: What the tensor holds.

    Returns:
        Guarded: The contiguous copy and its surroundings.
    """
    memory = torch.full(
        (values.numel() + 2 * GUARD,), SENTINEL, dtype=values.dtype, device=values.device
    )
    tensor = memory[GUARD : GUARD + values.numel()].view(values.shape)
    tensor.copy_(values)
    return Guarded(tensor, memory)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Guarded:
    """Return a guarded tensor of NaN (or an absurd integer): what a kernel leaves unwritten shows.

    Args:
        shape: Shape of the tensor.
        dtype: Its type.
        device: Where it lies.

    Returns:
        Guarded: The tensor and its surroundings.
    """
    fill = torch.nan if dtype.is_floating_point else -(2**20)
    return guarded(torch.full(shape, fill, dtype=dtype, device=device))
