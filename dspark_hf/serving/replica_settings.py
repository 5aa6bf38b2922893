"""ReplicaConfig: how the processes of a ReplicaQueue are watched and started again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dspark_hf.errors import ConfigError


@dataclass(frozen=True)
class ReplicaConfig:
    """How replicas are watched and started again.

    A process that ends is noticed at once. One that hangs is noticed after `silence_s`, plus at
    most one `heartbeat_s`: 0.9 s as set here. Beats come from a thread of their own, so what a
    replica computes does not delay them for longer than one call holds Python's interpreter lock.
    PyTorch gives the lock up inside its operations, so a forward may take minutes; a compiled
    extension that keeps it for longer than `silence_s` would be taken for dead. So would a process
    that a crowded machine does not run at all for so long: give it more there.

    Attributes:
        heartbeat_s: Seconds between two beats of a replica.
        silence_s: A loaded replica that was silent for longer is dead, and is killed.
        load_timeout_s: A replica that has not loaded its model after so long is dead.
        max_restarts: Times that one replica may be started again within `restart_window_s`.
        restart_window_s: Restarts longer ago are forgotten.
        max_deaths: Replicas that may die, one after another, under a request that gets no new
            token from them; one more, and the request fails rather than kill them all.
        num_threads: PyTorch threads of each replica; None shares this process's evenly.
    """

    heartbeat_s: float = 0.1
    silence_s: float = 0.8
    load_timeout_s: float = 600.0
    max_restarts: int = 3
    restart_window_s: float = 600.0
    max_deaths: int = 2
    num_threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the parameter."""
        for name in ("heartbeat_s", "silence_s", "load_timeout_s", "restart_window_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} must be seconds above 0; got {value!r}.")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"silence_s must be at least two beats, {2 * self.heartbeat_s} s; got "
                f"{self.silence_s}. Raise it, or lower heartbeat_s."
            )
        for name in ("max_restarts", "max_deaths"):
            _whole(name, getattr(self, name), least=0)
        if self.num_threads is not None:
            _whole("num_threads", self.num_threads, least=1)


def _whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}; got {value!r}.")
