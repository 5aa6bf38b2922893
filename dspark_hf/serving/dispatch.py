"""Dispatcher: the thread that shares requests out among replicas and outlives each of them.

Everything that a replica needs to go on with another one's request is kept here: the call, and the
tokens that were committed. One thread reads what replicas say and decides; it never waits for one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.errors import DeadlineError, QueueClosedError, QueueError, RequestCancelledError
from dspark_hf.serving.crew import Crew, idlest, next_move, reason_of
from dspark_hf.serving.handle import CANCELLED, FAILED, WAITING
from dspark_hf.serving.order import Lengths, expected_delay_s
from dspark_hf.serving.request import UNBOUNDED_TOKENS
from dspark_hf.serving.wire import (
    Accepted,
    Ask,
    Beat,
    Done,
    Drop,
    Failed,
    Moved,
    NotLoaded,
    Ready,
    Refused,
    Token,
    Told,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.serving.job import Job
    from dspark_hf.serving.replica import Inbox, Replica
    from dspark_hf.serving.replica_settings import ReplicaConfig

logger = logging.getLogger(__name__)


class Dispatcher:
    """Shares jobs out among replicas."""

    def __init__(
        self,
        start: Callable[[int, Inbox, int], Replica],
        num_replicas: int,
        config: QueueConfig | None,
        settings: ReplicaConfig,
    ) -> None:
        """Prepare; `start` begins.

        Args:
            start: Starts a replica; takes its place, where its messages go, and a seed.
            num_replicas: How many there are.
            config: Settings of the queue; None for the model's.
            settings: How replicas are watched.
        """
        self.settings = settings
        self.config: Any = config
        self.changed = threading.Condition()
        self.jobs: list[Job] = []
        self._lengths = Lengths()
        self.moves = 0
        self.is_closing = False
        self.fatal: BaseException | None = None
        self._has_begun = False
        self._inbox: Inbox = SimpleQueue()
        self._numbers = itertools.count()
        self._seeds = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
        self.crew = Crew(
            lambda place: start(place, self._inbox, self.draw_seed()), num_replicas, settings
        )
        self._thread = threading.Thread(target=self._run, name="dspark-replicas", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        """Start every replica and wait until each has loaded its model.

        Raises:
            QueueClosedError: If one of them died meanwhile.
            Exception: What loading a model raised.
        """
        try:
            self.crew.start()
            self._thread.start()
            with self.changed:
                self.changed.wait_for(lambda: self._has_begun or self.fatal is not None)
        except BaseException:
            self.close(drains=False, timeout=0)
            self.crew.kill()
            raise
        if self.fatal is not None:
            self._thread.join()
            raise self.fatal

    def draw_seed(self) -> int:
        """Return a seed that no other request gets."""
        with self.changed:
            return int(torch.randint(1 << 62, (), generator=self._seeds))

    def put(self, job: Job, *, blocks: bool) -> bool:
        """Add a job and wait until a replica has found it right.

        Args:
            job: New.
            blocks: Whether to wait while too many wait.

        Returns:
            bool: False if too many wait.

        Raises:
            QueueClosedError: If the queue has ended.
            Exception: What preparing it raised, or that its deadline passed meanwhile.
        """
        with self.changed:
            self.require_open()
            while len(self.jobs) >= self.most_jobs:
                if not blocks:
                    return False
                self.changed.wait()
                self.require_open()
            self.jobs.append(job)
            self._assign(job)
            try:
                self.changed.wait_for(lambda: job.is_accepted or job.handle.is_ended)
            except BaseException:
                self.cancel(job)
                raise
        if not job.is_accepted:
            job.handle.result()
        return True

    @property
    def most_jobs(self) -> int:
        """Requests that may be there: those that run and those that wait."""
        most: int = self.config.max_pending + self.config.max_rows * len(self.crew.members)
        return most

    @property
    def is_open(self) -> bool:
        """Whether work is taken."""
        return self.fatal is None and not self.is_closing

    def require_open(self) -> None:
        """Refuse work once the queue has ended.

        Raises:
            QueueClosedError: Naming what ended it.
        """
        if self.fatal is not None:
            raise QueueClosedError(
                f"the queue ended: {type(self.fatal).__name__}: {self.fatal} Make a new one."
            ) from self.fatal
        if self.is_closing:
            raise QueueClosedError("the queue is closed. Make a new one.")

    def cancel(self, job: Job, why: str = "the request was cancelled.") -> None:
        """End a job at once; its replica frees it after the step that is running."""
        with self.changed:
            job.handle.end(CANCELLED, error=RequestCancelledError(why))
            self._withdraw(job)
            self._forget(job)

    def expected_delay_s(self) -> float:
        """Return how long a request submitted now is expected to wait; infinite without replica."""
        with self.changed:
            delays = [
                expected_delay_s(
                    [job.remaining(self._typical) for job in replica.jobs.values()],
                    self.config.max_rows,
                    replica.token_s,
                )
                for replica in (self.crew.ready if self.is_open else [])
            ]
        return min(delays, default=float("inf"))

    def ask(self, timeout_s: float) -> list[dict[str, Any] | None]:
        """Return each replica's metrics; None where there is no answer in time."""
        with self.changed:
            asked = self.crew.ready
            for replica in asked:
                replica.metrics = None
                replica.post.put(Ask())
            self.changed.wait_for(lambda: all(r.metrics is not None for r in asked), timeout_s)
            return [None if r is None else r.metrics for r in self.crew.members]

    def close(self, *, drains: bool, timeout: float | None) -> bool:
        """Take no more jobs, and end; tell whether everything has ended.

        Args:
            drains: Whether what was submitted is still decoded; otherwise it is cancelled.
            timeout: Most seconds to wait.
        """
        with self.changed:
            self.is_closing = True
            if not drains:
                for job in list(self.jobs):
                    self.cancel(job, "the queue was closed.")
            self.changed.notify_all()
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_over():
                arrived = self._arrivals()
                with self.changed:
                    for replica, messages in arrived:
                        self._take(replica, messages)
                    self._look_after()
                    if arrived:
                        self.changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - everyone who waits must hear of it
            with self.changed:
                self._die(error)
        finally:
            self.crew.end(at_once=self.fatal is not None)

    def _is_over(self) -> bool:
        with self.changed:
            return self.fatal is not None or (self.is_closing and not self.jobs)

    def _arrivals(self) -> list[tuple[Replica, list[Any] | None]]:
        """Wait for messages, for one heartbeat at most; return all that are there."""
        found = []
        try:
            found.append(self._inbox.get(timeout=self.settings.heartbeat_s))
            while True:
                found.append(self._inbox.get_nowait())
        except Empty:
            return [item for item in found if item is not None]

    def _take(self, replica: Replica, messages: list[Any] | None) -> None:
        """Take what a replica said; what an earlier process in its place said is of no interest."""
        if self.crew.members[replica.place] is not replica:
            return
        if messages is None:
            self._bury(replica, replica.ending)
            return
        replica.heart.beat()
        for message in messages:
            if isinstance(message, Beat):
                replica.token_s = message.token_s
            elif isinstance(message, Ready):
                self._welcome(replica, message.config)
            elif isinstance(message, NotLoaded):
                replica.failure = message.failure
            elif isinstance(message, Told):
                replica.metrics = message.metrics
            else:
                job = replica.jobs.get(message.run)
                if job is not None:
                    self._follow(job, message)

    def _follow(self, job: Job, message: Any) -> None:
        """Take what a replica said of a job."""
        try:
            if isinstance(message, Token):
                job.add(message.place, message.token)
            elif isinstance(message, Accepted):
                job.is_accepted = True
            elif isinstance(message, Moved):
                if message.status != WAITING:
                    job.start()
                job.handle.move_to(message.status)
            elif isinstance(message, Done):
                job.finish(message.result)
                for record in message.result.stats.records:
                    self._lengths.add(record.new_tokens)
                self._forget(job)
            elif isinstance(message, Failed | Refused):
                self._fail(job, message.failure.error())
        except Exception as error:  # noqa: BLE001 - a tokenizer's own code runs here
            self._withdraw(job)
            self._fail(job, error)

    def _welcome(self, replica: Replica, config: QueueConfig) -> None:
        """Let a replica that has loaded its model take part."""
        replica.is_ready = True
        self.config = self.config or config
        self._has_begun |= self.crew.is_complete
        for job in self.jobs:
            if job.replica is None:
                self._assign(job)
        self._balance()

    def _look_after(self) -> None:
        """Bury replicas that are dead; end jobs that nobody decodes and whose deadline passed."""
        now = time.monotonic()
        for replica in self.crew.present:
            why = replica.why_dead(now)
            if why is not None:
                self._bury(replica, why)
        for job in list(self.jobs):
            if job.replica is None and job.deadline is not None and now >= job.deadline:
                waited = job.handle.stats.since_submitted()
                self._fail(job, DeadlineError(f"deadline_s passed {waited:.2f} s after submit()."))

    def _bury(self, replica: Replica, why: str) -> None:
        """Let a dead replica's jobs go on elsewhere, and start it again if it may."""
        if self.fatal is not None:
            return
        if not self._has_begun:
            self._die(reason_of(replica, why, is_new=True))
            return
        self.crew.remove(replica)
        jobs = list(replica.jobs.values())
        for job in jobs:
            self._rescue(job, why)
        is_replaced = self.crew.start_again(replica.place)
        logger.warning(
            "Replica %d is dead: %s. %d requests go on elsewhere. It is %sstarted again.",
            replica.place,
            why if replica.failure is None else replica.failure.description,
            len(jobs),
            "" if is_replaced else "not ",
        )
        if not self.crew.present:
            self._die(reason_of(replica, why, is_new=False))

    def _rescue(self, job: Job, why: str) -> None:
        """Let a job whose replica died go on elsewhere, unless it seems to be what kills them."""
        if job.outlives(self.settings.max_deaths):
            job.handle.stats.moves += 1
            self.moves += 1
            job.handle.move_to(WAITING)
            self._assign(job)
            return
        error = QueueError(
            f"{job.num_deaths} replicas died, one after another, while they decoded this request "
            f"and before it got a token: the last one as {why}. It is not tried again; max_deaths "
            "of ReplicaConfig says how often it is."
        )
        self._fail(job, error)

    def _assign(self, job: Job) -> None:
        """Give a job to the replica with the least work; it waits here while there is none."""
        if self.crew.ready:
            job.send_to(idlest(self.crew.ready, self._typical), next(self._numbers))

    def _balance(self) -> None:
        """Let replicas that have a row free take what waits in others."""
        while move := next_move(self.crew.ready, self.config.max_rows, self._typical):
            job, replica = move
            self._withdraw(job)
            job.handle.stats.moves += 1
            self.moves += 1
            job.send_to(replica, next(self._numbers))

    @property
    def _typical(self) -> float:
        """Expected new tokens of a row, before what it may get at most is looked at."""
        return self._lengths.remaining(0, UNBOUNDED_TOKENS)

    def _withdraw(self, job: Job) -> None:
        """Take a job from its replica."""
        if job.replica is not None:
            job.replica.post.put(Drop(job.run))
            job.replica.jobs.pop(job.run, None)
            job.replica = None

    def _forget(self, job: Job) -> None:
        """Let go of a job that has ended."""
        if job.replica is not None:
            job.replica.jobs.pop(job.run, None)
        if job in self.jobs:
            self.jobs.remove(job)
        self._balance()
        self.changed.notify_all()

    def _fail(self, job: Job, error: BaseException) -> None:
        job.handle.end(FAILED, error=error)
        self._forget(job)

    def _die(self, error: BaseException) -> None:
        """Fail everyone who waits: nothing will run any more."""
        logger.error("The queue ends: %s: %s", type(error).__name__, error)
        self.fatal = error
        for job in self.jobs:
            ended = QueueClosedError(f"the queue ended: {type(error).__name__}: {error}")
            ended.__cause__ = error
            job.handle.end(FAILED, error=ended)
        self.jobs.clear()
        self.changed.notify_all()
