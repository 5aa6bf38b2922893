"""Clocks, and the order in which contenders take their turns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


@dataclass(frozen=True)
class Clock:
    """Where seconds come from; tests bring their own.

    Attributes:
        wall: Elapsed time.
        cpu: CPU time of this process, all threads together.
    """

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


@dataclass(frozen=True)
class Timed:
    """What a call returned and what it took, in seconds."""

    result: Any
    wall_s: float
    cpu_s: float


def timed(call: Callable[[], Any], clock: Clock) -> Timed:
    """Run a call under a clock.

    Args:
        call: What to run.
        clock: Where seconds come from.

    Returns:
        Timed: Its result with wall and CPU seconds.
    """
    wall, cpu = clock.wall(), clock.cpu()
    result = call()
    return Timed(result, clock.wall() - wall, clock.cpu() - cpu)


def rotated(entries: Sequence[T], turn: int) -> list[T]:
    """Return the entries starting with another one each turn, so that none always goes first.

    Args:
        entries: In their usual order.
        turn: Number of the turn, from 0.

    Returns:
        list[T]: The same entries; over len(entries) turns each takes every place once.
    """
    shift = turn % len(entries) if entries else 0
    return [*entries[shift:], *entries[:shift]]
