"""Crew: the replicas by place; starts them, starts them again, ends them, shares work out."""

from __future__ import annotations

import atexit
import logging
import time
from typing import TYPE_CHECKING

from dspark_hf.errors import QueueClosedError
from dspark_hf.serving.liveness import RestartLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dspark_hf.serving.job import Job
    from dspark_hf.serving.replica import Replica
    from dspark_hf.serving.replica_settings import ReplicaConfig

logger = logging.getLogger(__name__)

LEAVE_S = 5.0
"""Seconds that replicas get to end by themselves when they are told to."""


class Crew:
    """Replicas by place; None in the place of one that is dead for good.

    Attributes:
        members: The replicas.
        limits: Of each place, how often it may still be started again.
    """

    def __init__(
        self, start: Callable[[int], Replica], num_replicas: int, settings: ReplicaConfig
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            start: Starts the replica of a place.
            num_replicas: Places.
            settings: How often replicas may be started again.
        """
        self._start = start
        self._is_over = False
        self.members: list[Replica | None] = [None] * num_replicas
        self.limits = [
            RestartLimit(settings.max_restarts, settings.restart_window_s)
            for _ in range(num_replicas)
        ]

    @property
    def present(self) -> list[Replica]:
        """Those that are loading or ready."""
        return [replica for replica in self.members if replica is not None]

    @property
    def ready(self) -> list[Replica]:
        """Those that have loaded their models."""
        return [replica for replica in self.present if replica.is_ready]

    @property
    def is_complete(self) -> bool:
        """Whether every place is ready."""
        return len(self.ready) == len(self.members)

    def start(self) -> None:
        """Start every replica."""
        # Processes that hang would keep this one from ending.
        atexit.register(self.kill)
        for place in range(len(self.members)):
            self.members[place] = self._start(place)

    def remove(self, replica: Replica) -> None:
        """Let go of a replica, and make sure that it is dead."""
        replica.kill()
        self.members[replica.place] = None

    def start_again(self, place: int) -> bool:
        """Start a replica in an empty place, if it may; tell whether there is one now."""
        if self._is_over or not self.limits[place].take(time.monotonic()):
            return False
        try:
            self.members[place] = self._start(place)
        except OSError as error:
            logger.error("Replica %d cannot be started again: %s", place, error)
            return False
        return True

    def end(self, *, at_once: bool) -> None:
        """End every process: those that load at once, the others within seconds."""
        for replica in self.present:
            if replica.is_ready and not at_once:
                replica.leave()
            else:
                replica.kill()
        until = time.monotonic() + LEAVE_S
        for replica in self.present:
            replica.join(max(until - time.monotonic(), 0.0))
        self.kill()

    def kill(self) -> None:
        """End every process now, for good."""
        atexit.unregister(self.kill)
        present, self.members = self.present, [None] * len(self.members)
        self._is_over = True
        for replica in present:
            replica.kill()


def reason_of(replica: Replica, why: str, *, is_new: bool) -> BaseException:
    """Return what to tell those who can no longer be served.

    Args:
        replica: The last one that died.
        why: How.
        is_new: Whether replicas are started for the first time.
    """
    if replica.failure is not None:
        return replica.failure.error()
    hint = "Its own output says more."
    if is_new:
        hint += (
            ' Is the program\'s start under if __name__ == "__main__"? A process that is spawned '
            "needs that."
        )
    return QueueClosedError(f"replica {replica.place} is dead: {why}. {hint}")


def work_of(replica: Replica, typical: float) -> float:
    """Return the expected remaining work of a replica, in new tokens.

    Args:
        replica: With its jobs.
        typical: Expected new tokens of a row.
    """
    return sum(job.remaining(typical) for job in replica.jobs.values())


def idlest(replicas: Sequence[Replica], typical: float) -> Replica:
    """Return the replica with the least work; of equal ones the first.

    Args:
        replicas: That are ready.
        typical: Expected new tokens of a row.
    """
    return min(replicas, key=lambda replica: work_of(replica, typical))


def next_move(
    replicas: Sequence[Replica], max_rows: int, typical: float
) -> tuple[Job, Replica] | None:
    """Find a job that waits in one replica while another has a row free.

    A move makes the greater of the two loads smaller, so that moves come to an end.

    Args:
        replicas: That are ready.
        max_rows: Rows that a replica decodes together.
        typical: Expected new tokens of a row.

    Returns:
        tuple: The job, the last that came of those that may move, and where it should go; None if
        everything is well where it is.
    """
    free = [replica for replica in replicas if len(replica.jobs) < max_rows]
    full = [replica for replica in replicas if len(replica.jobs) > max_rows]
    if not free or not full:
        return None
    least = idlest(free, typical)
    most = max(full, key=lambda replica: work_of(replica, typical))
    gap = work_of(most, typical) - work_of(least, typical)
    for job in reversed(most.jobs.values()):
        if not job.has_started and job.remaining(typical) < gap:
            return job, least
    return None
