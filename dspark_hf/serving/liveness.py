"""Whether a process is alive, and whether a dead one may be started again. Pure: no processes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class Heart:
    """Counts how long a process has been silent, in time that its observer was awake.

    Attributes:
        limit_s: Silence beyond which the process is dead.
        tick_s: Seconds between two observations, if the observer is not held up.
    """

    limit_s: float
    tick_s: float
    silent_s: float = 0.0
    observed: float | None = None

    def beat(self) -> None:
        """Note a sign of life; silence counts from the next observation."""
        self.silent_s, self.observed = 0.0, None

    def is_silent(self, now: float) -> bool:
        """Count the time since the last observation; tell whether the silence is too long.

        An observer that was itself held up (a suspended machine, a crowded one) has heard nobody
        meanwhile: no more than two ticks of such a gap count.

        Args:
            now: Seconds of a clock that only grows.
        """
        if self.observed is not None:
            self.silent_s += min(now - self.observed, 2 * self.tick_s)
        self.observed = now
        return self.silent_s > self.limit_s


class RestartLimit:
    """Allows so many restarts within a window of time."""

    def __init__(self, most: int, window_s: float) -> None:
        """Start without any.

        Args:
            most: Restarts allowed within the window.
            window_s: Its length, in seconds.
        """
        self.most, self.window_s = most, window_s
        self.total = 0
        self._times: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Use one up; tell whether there was one."""
        while self._times and now - self._times[0] > self.window_s:
            self._times.popleft()
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        self.total += 1
        return True
