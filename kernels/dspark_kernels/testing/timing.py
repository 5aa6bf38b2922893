"""Benchmark cases: one protocol for the `bench_<op>.py` files and `check_gpu.py`."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_kernels.costs import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

FLUSH_BYTES = 256 * 2**20
"""Written between runs, more than any GPU's L2 cache holds, so that each run reads memory."""
WARM_UP, REPEATS = 5, 30
"""Runs before and during a measurement."""
TINY = Shape(1, 2, 4, 2, 16, 96, 48, 260, 16)
"""A shape small enough to run every case on a CPU: proof that the benchmarks themselves work."""


@dataclass(frozen=True)
class Case:
    """One measured configuration of an op.

    Attributes:
        name: Regime, as in "1 token".
        run: Calls the op.
        baseline: Does the same (or the dense equivalent) with PyTorch.
        baseline_name: What that is.
        check: Returns the error of the op against its reference.
        bound: Largest error allowed.
        floor_us: Microseconds the GPU needs at least, by `costs`.
    """

    name: str
    run: Callable[[], Any]
    baseline: Callable[[], Any]
    baseline_name: str
    check: Callable[[], float]
    bound: float
    floor_us: float


@dataclass(frozen=True)
class Timing:
    """Microseconds of one run: median, 20th and 80th percentile."""

    median_us: float
    low_us: float
    high_us: float


def measure(run: Callable[[], Any], device: torch.device | str) -> Timing:
    """Time a function with a cold L2 cache.

    Args:
        run: Function without arguments.
        device: Where it computes; on a GPU the device's own events are used.

    Returns:
        Timing: Of `REPEATS` runs; three on a CPU.
    """
    device = torch.device(device)
    times: list[float] = []
    if device.type == "cpu":
        for _ in range(3):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
    else:
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        for _ in range(WARM_UP):
            run()
        for _ in range(REPEATS):
            flush.zero_()
            start_event = torch.cuda.Event(enable_timing=True)
            end_event = torch.cuda.Event(enable_timing=True)
            start_event.record()
            run()
            end_event.record()
            torch.cuda.synchronize(device)
            times.append(start_event.elapsed_time(end_event) * 1e3)
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return Timing(statistics.median(times), fifths[0], fifths[3])


def shapes(device: torch.device | str) -> list[Shape]:
    """Return the shapes to measure: decoding and verifying, alone and in a batch of 8."""
    if torch.device(device).type == "cpu":
        return [TINY]
    return [Shape(rows=rows, tokens=tokens) for rows in (1, 8) for tokens in (1, 8)]


def title(shape: Shape) -> str:
    """Name a shape's regime."""
    return f"{shape.rows} x {shape.tokens} tokens at {shape.context}"


def main(cases: Callable[[str], list[Case]]) -> None:
    """Measure an op's cases on the GPU, or at a tiny shape on the CPU, and print a table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case in cases(device):
        ours, base = measure(case.run, device), measure(case.baseline, device)
        sys.stdout.write(
            f"{case.name:32} {ours.median_us:10.1f} us  [{ours.low_us:.1f}, {ours.high_us:.1f}]  "
            f"{case.baseline_name} {base.median_us:.1f} us  floor {case.floor_us:.1f} us  "
            f"error {case.check():.2g} (bound {case.bound:.2g})\n"
        )
