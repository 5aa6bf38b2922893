"""Replicas that only pretend, and a dispatcher over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dspark_hf import QueueConfig
from dspark_hf.serving.dispatch import Dispatcher
from dspark_hf.serving.handle import RequestHandle, RequestResult, RequestStats
from dspark_hf.serving.job import Job
from dspark_hf.serving.liveness import Heart
from dspark_hf.serving.replica_settings import ReplicaConfig
from dspark_hf.serving.wire import Accepted, Begin, Done, Failure, Moved, Ready, Token

WAIT_S = 60
ANSWER = list(range(10, 40))
"""What every request comes to."""


class Pretender:
    """A replica without a process: keeps what it was sent and says what the test tells it to."""

    def __init__(self, place: int, inbox: Any, *, loads: bool = True, accepts: bool = True) -> None:
        self.place, self.inbox, self.accepts = place, inbox, accepts
        self.jobs: dict[int, Job] = {}
        self.is_ready, self.is_killed, self.token_s = False, False, 0.5
        self.failure: Failure | None = None
        self.metrics: Any = None
        self.heart = Heart(1e9, 1.0)
        self.why: str | None = None
        self.sent: list[Any] = []
        self.post, self.pid, self.ending = self, 1, "it pretends"
        if loads:
            self.say(Ready(QueueConfig(max_rows=2)))

    def put(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Begin) and self.accepts:
            self.say(Accepted(message.run))

    def say(self, *messages: Any) -> None:
        self.inbox.put((self, list(messages)))

    def die(self) -> None:
        self.inbox.put((self, None))

    def why_dead(self, now: float) -> str | None:
        return self.why

    def kill(self) -> None:
        self.is_killed = True

    def leave(self) -> None:
        self.is_killed = True

    def join(self, timeout: float) -> None:
        assert self.is_killed

    def begins(self) -> list[Begin]:
        return [message for message in self.sent if isinstance(message, Begin)]

    def run_of(self, job: Job) -> int:
        return next(run for run, other in self.jobs.items() if other is job)

    def decode(self, job: Job, count: int) -> None:
        """Go on from what the request has."""
        run, made = self.run_of(job), len(job.committed[0]) if job.committed else 0
        tokens = ANSWER[made : made + count]
        self.say(Moved(run, "starting"), *(Token(run, 0, token) for token in tokens))

    def finish(self, job: Job) -> None:
        result = RequestResult(torch.tensor([ANSWER]), list(ANSWER), None, RequestStats())
        self.decode(job, len(ANSWER))
        self.say(Done(self.run_of(job), result))


class Team:
    """A dispatcher over pretenders."""

    def __init__(self, num: int = 2, config: QueueConfig | None = None, **settings: Any) -> None:
        self.all: list[Pretender] = []
        self.make: dict[str, Any] = {}
        self.dispatcher = Dispatcher(
            self.start, num, config or QueueConfig(max_rows=2), ReplicaConfig(**settings)
        )
        self.dispatcher.start()

    def start(self, place: int, inbox: Any, seed: int) -> Any:
        pretender = Pretender(place, inbox, **self.make)
        self.all.append(pretender)
        return pretender

    def submit(self, max_new_tokens: int = 30, *, text_by: Any = None, **order: Any) -> Job:
        handle = RequestHandle(lambda _: self.dispatcher.cancel(job))
        kwargs = {"max_new_tokens": max_new_tokens}
        job = Job(torch.ones(1, 4).long(), kwargs, handle, seed=0, text_by=text_by, **order)
        assert self.dispatcher.put(job, blocks=True)
        return job

    def until(self, holds: Callable[[], Any]) -> None:
        """Wait for what the dispatcher's thread will do."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def on(self, place: int) -> Any:
        """The replica in a place now."""
        return self.dispatcher.crew.members[place]


@contextmanager
def teams() -> Iterator[Callable[..., Team]]:
    """Make teams; all are closed and their replicas killed in the end."""
    made: list[Team] = []

    def make(*args: Any, **kwargs: Any) -> Team:
        made.append(Team(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        assert one.dispatcher.close(drains=False, timeout=WAIT_S)
        assert all(pretender.is_killed for pretender in one.all)


def check_whole(job: Job) -> None:
    assert job.handle.result(WAIT_S).ids == ANSWER
    assert job.handle.pieces == ANSWER
