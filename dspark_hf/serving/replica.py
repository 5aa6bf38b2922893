"""Replica: the front's hold of one process that decodes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.serving.liveness import Heart
from dspark_hf.serving.replica_process import run
from dspark_hf.serving.wire import Leave, Post, Setup, receive

if TYPE_CHECKING:
    from collections.abc import Sequence
    from queue import SimpleQueue
    from typing import TypeAlias

    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.serving.job import Job
    from dspark_hf.serving.replica_settings import ReplicaConfig
    from dspark_hf.serving.wire import Failure

    Inbox: TypeAlias = "SimpleQueue[tuple[Replica, list[Any] | None] | None]"

REAP_S = 1.0
"""Seconds in which a process that was killed is gone, and in which its last messages are read."""


class Replica:
    """A process, what was sent to it, and whether it lives.

    Attributes:
        place: Which of the replicas it is; one that is started again keeps its place.
        jobs: What it decodes or lets wait, by the number it was sent under.
        is_ready: Whether its model is loaded.
        failure: Why it could not be loaded; None otherwise.
        token_s: Seconds that a token takes a row there.
        metrics: What its queue told when it was asked last; None before that.
    """

    def __init__(self, place: int, setup: Setup, inbox: Inbox, settings: ReplicaConfig) -> None:
        """Start the process.

        Args:
            place: Its place.
            setup: What it loads.
            inbox: Where pairs of this and its messages go; None for messages says that it ended.
            settings: How it is watched.
        """
        self.place, self.settings = place, settings
        self.jobs: dict[int, Job] = {}
        self.is_ready = False
        self.failure: Failure | None = None
        self.token_s = 0.0
        self.metrics: dict[str, Any] | None = None
        self.started = time.monotonic()
        self.ended: float | None = None
        self.heart = Heart(settings.silence_s, settings.heartbeat_s)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=run, args=(theirs,), name=f"dspark-replica-{place}", daemon=True
        )
        self.process.start()
        theirs.close()
        self._inbox = inbox
        self.post = Post(self._connection)
        self.post.put(setup)
        threading.Thread(target=self._read, name="dspark-replica-reader", daemon=True).start()

    def why_dead(self, now: float) -> str | None:
        """Say why the process cannot be waited for any longer; None if it can.

        Args:
            now: On the clock of time.monotonic().
        """
        if not self.process.is_alive():
            self.ended = now if self.ended is None else self.ended
            # Its reader says so as well, once it has read what came before.
            return self.ending if now - self.ended > REAP_S else None
        if self.is_ready:
            if self.heart.is_silent(now):
                return f"it was silent for {self.heart.silent_s:.1f} s"
        elif now - self.started > self.settings.load_timeout_s:
            return f"it had not loaded its model after {self.settings.load_timeout_s:g} s"
        return None

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self.process.pid

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        self.process.join(REAP_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"its process was ended by signal {-code}"
        return f"its process ended with code {code}"

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join(REAP_S)

    def join(self, timeout: float) -> None:
        """Wait until the process has ended, for so many seconds at most."""
        self.process.join(timeout)

    def leave(self) -> None:
        """Ask the process to end."""
        self.post.put(Leave())

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put((self, receive(self._connection)))
        except (EOFError, OSError):
            self._inbox.put((self, None))
        except Exception:  # noqa: BLE001 - what cannot be read is as good as an end
            self._inbox.put((self, None))
        finally:
            # The sender must be done first: a closed number may soon be another file's.
            self.post.close()
            self._connection.close()


@dataclass(frozen=True)
class Starter:
    """Starts the replicas of a queue.

    Attributes:
        loads: Packed; what makes each one's model.
        tokenizer: Packed.
        config: Settings of the queue; None for the model's.
        settings: How replicas are watched.
    """

    loads: Sequence[bytes]
    tokenizer: bytes
    config: QueueConfig | None
    settings: ReplicaConfig

    def __call__(self, place: int, inbox: Inbox, seed: int) -> Replica:
        """Start a replica.

        Args:
            place: Its place.
            inbox: Where its messages go.
            seed: Of its random numbers.
        """
        num_replicas = len(self.loads)
        threads = self.settings.num_threads or max(torch.get_num_threads() // num_replicas, 1)
        setup = Setup(
            load=self.loads[place],
            tokenizer=self.tokenizer,
            config=self.config,
            seed=seed,
            num_replicas=num_replicas,
            num_threads=threads,
            heartbeat_s=self.settings.heartbeat_s,
        )
        return Replica(place, setup, inbox, self.settings)
