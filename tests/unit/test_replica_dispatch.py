"""How requests are shared out among replicas and outlive them, with replicas that only pretend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dspark_hf import QueueConfig
from dspark_hf.errors import (
    ConfigError,
    DeadlineError,
    QueueClosedError,
    QueueError,
    RequestCancelledError,
)
from dspark_hf.serving.dispatch import Dispatcher
from dspark_hf.serving.handle import RequestHandle, RequestResult, RequestStats
from dspark_hf.serving.job import Job
from dspark_hf.serving.liveness import Heart, RestartLimit
from dspark_hf.serving.replica_settings import ReplicaConfig
from dspark_hf.serving.wire import (
    Accepted,
    Begin,
    Done,
    Drop,
    Failed,
    Failure,
    Moved,
    NotLoaded,
    Ready,
    Refused,
    Token,
)
from harness import toy_tokenizer

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


@pytest.fixture
def team() -> Iterator[Callable[..., Team]]:
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


def test_requests_go_to_the_replica_with_the_least_work(team: Any) -> None:
    ours = team(2)
    jobs = [ours.submit(n) for n in (100, 20, 30, 40)]
    assert [job.replica.place for job in jobs] == [0, 1, 1, 1]
    ours.on(1).decode(jobs[1], 15)
    ours.until(lambda: len(jobs[1].handle.pieces) == 15)
    assert ours.submit(1).replica.place == 1


def test_a_dead_replicas_requests_go_on_from_their_tokens(team: Any) -> None:
    ours = team(2)
    dead, jobs = ours.on(0), [ours.submit() for _ in range(4)]
    mine = [job for job in jobs if job.replica is dead]
    for made, job in enumerate(mine):
        dead.decode(job, 7 * made)
    ours.until(lambda: len(mine[1].handle.pieces) == 7)
    late = Token(dead.run_of(mine[1]), 0, 99)
    ours.make = {"loads": False}
    dead.die()
    ours.until(lambda: all(job.replica is ours.on(1) for job in jobs))
    dead.say(late)
    sent = {begin.run: begin.committed for begin in ours.on(1).begins()}
    assert [sent[job.run] for job in mine] == [[], [ANSWER[:7]]]
    for job in jobs:
        ours.on(1).finish(job)
    for job in jobs:
        check_whole(job)
    assert [job.handle.stats.moves for job in mine] == [1, 1]
    assert dead.is_killed
    assert ours.on(0) is not dead
    assert ours.dispatcher.moves == 2


def test_a_replica_that_is_silent_is_killed_and_replaced(team: Any) -> None:
    ours = team(2)
    silent, job = ours.on(0), ours.submit()
    ours.make = {"loads": False}
    silent.why = "it was silent"
    ours.until(lambda: job.replica is ours.on(1))
    assert silent.is_killed
    ours.on(1).finish(job)
    check_whole(job)


def test_requests_wait_while_no_replica_is_there(team: Any) -> None:
    ours = team(1)
    ours.make = {"loads": False}
    job = ours.submit()
    ours.on(0).decode(job, 3)
    ours.until(lambda: job.handle.pieces)
    ours.on(0).die()
    ours.until(lambda: job.handle.status == "waiting" and len(ours.all) == 2)
    assert ours.dispatcher.expected_delay_s() == float("inf")
    with ThreadPoolExecutor() as pool:
        other = pool.submit(ours.submit)
        hopeless = pool.submit(ours.submit, deadline_s=0.05)
        with pytest.raises(DeadlineError, match="deadline_s passed"):
            hopeless.result(WAIT_S)
        ours.on(0).say(Ready(QueueConfig()))
        for each in (job, other.result(WAIT_S)):
            ours.on(0).finish(each)
            check_whole(each)


def test_when_none_is_left_everyone_is_told_at_once(team: Any) -> None:
    ours = team(2, max_restarts=1)
    jobs = [ours.submit() for _ in range(3)]
    for pretender in (ours.all[0], ours.all[1]):
        pretender.die()
    ours.until(lambda: len(ours.all) == 4)
    ours.on(1).die()
    ours.until(lambda: ours.on(1) is None)
    assert not any(job.handle.is_ended for job in jobs)
    ours.on(0).die()
    for job in jobs:
        with pytest.raises(QueueClosedError, match="replica 0 is dead: it pretends"):
            job.handle.result(WAIT_S)
    with pytest.raises(QueueClosedError, match="the queue ended"):
        ours.submit()
    assert not ours.dispatcher.is_open


def test_a_request_that_kills_its_replicas_fails_and_the_others_live(team: Any) -> None:
    ours = team(1, max_restarts=9, max_deaths=1)
    lethal, waiting = ours.submit(), ours.submit()
    lucky = ours.submit()
    for death in range(3):
        replica = ours.on(0)
        ours.until(lambda replica=replica: set(replica.jobs.values()) >= {waiting, lucky})
        if death < 2:
            replica.say(Moved(replica.run_of(lethal), "starting"))
        replica.decode(lucky, 2)
        ours.until(lambda death=death: len(lucky.handle.pieces) == 2 * (death + 1))
        replica.die()
        ours.until(lambda replica=replica: ours.on(0) is not replica)
    with pytest.raises(QueueError, match="2 replicas died, one after another"):
        lethal.handle.result(WAIT_S)
    ours.until(lambda: len(ours.on(0).jobs) == 2)
    for job in (waiting, lucky):
        ours.on(0).finish(job)
        check_whole(job)


def test_what_preparing_raises_reaches_the_submitter(team: Any) -> None:
    ours = team(1)
    ours.on(0).accepts = False
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ours.submit)
        ours.until(lambda: ours.on(0).begins())
        run = ours.on(0).begins()[0].run
        ours.on(0).say(Refused(run, Failure.of(ConfigError("temperature must be above 0."))))
        with pytest.raises(ConfigError, match="temperature must be above 0") as found:
            asked.result(WAIT_S)
    assert "ConfigError: temperature" in str(found.value.__cause__)
    assert not ours.dispatcher.jobs


def test_what_a_replica_says_of_an_earlier_sending_is_not_heard(team: Any) -> None:
    ours = team(2, config=QueueConfig(max_rows=1))
    first, second = ours.on(0), ours.on(1)
    running, other, moved = ours.submit(50), ours.submit(50), ours.submit(30)
    assert moved.replica is first
    old = moved.run
    second.decode(other, 1)
    second.finish(other)
    # The other replica has a row free: it takes what waits.
    ours.until(lambda: moved.replica is second)
    assert Drop(old) in first.sent
    ours.make = {"loads": False}
    second.die()
    ours.until(lambda: moved.replica is first and moved.run != old)
    cancelled = Failure.of(RequestCancelledError("the request was cancelled."))
    first.say(Token(old, 0, 99), Failed(old, cancelled))
    first.finish(running)
    first.finish(moved)
    check_whole(moved)


def test_a_replica_that_comes_back_takes_its_part_of_what_waits(team: Any) -> None:
    ours = team(2)
    ours.make = {"loads": False}
    ours.on(1).die()
    ours.until(lambda: len(ours.all) == 3)
    jobs = [ours.submit() for _ in range(6)]
    for job in jobs[:2]:
        ours.on(0).decode(job, 1)
    ours.until(lambda: jobs[1].handle.pieces)
    ours.on(1).say(Ready(QueueConfig()))
    ours.until(lambda: len(ours.on(1).jobs) == 2)
    assert [job.replica.place for job in jobs] == [0, 0, 0, 0, 1, 1]
    # When one has ended, what still waits moves on.
    ours.on(1).finish(jobs[5])
    ours.until(lambda: jobs[3].replica is ours.on(1))
    assert jobs[2].replica is ours.on(0)


def test_no_more_wait_than_may(team: Any) -> None:
    ours = team(1, config=QueueConfig(max_rows=1, max_pending=1))
    jobs = [ours.submit(), ours.submit()]
    extra = Job(torch.ones(1, 4).long(), {}, RequestHandle(lambda _: None), seed=0)
    assert not ours.dispatcher.put(extra, blocks=False)
    with ThreadPoolExecutor() as pool:
        blocked = pool.submit(ours.submit)
        assert not blocked.done()
        jobs[1].handle.cancel()
        job = blocked.result(WAIT_S)
    assert Drop(1) in ours.on(0).sent
    assert jobs[1].handle.status == "cancelled"
    assert job in ours.dispatcher.jobs


def test_a_tokenizer_that_raises_fails_its_request_alone(team: Any) -> None:
    class Broken:
        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise RuntimeError("no such token")

    ours = team(1)
    bad, good = ours.submit(text_by=Broken()), ours.submit()
    text = ours.submit(text_by=toy_tokenizer())
    ours.on(0).decode(bad, 1)
    with pytest.raises(RuntimeError, match="no such token"):
        bad.handle.result(WAIT_S)
    for job in (good, text):
        ours.on(0).finish(job)
    check_whole(good)
    assert text.handle.result(WAIT_S).text == toy_tokenizer().decode(ANSWER)
    assert "".join(text.handle.pieces) == toy_tokenizer().decode(ANSWER)


def test_closing_waits_for_what_was_submitted_or_cancels_it(team: Any) -> None:
    ours = team(2)
    job = ours.submit()
    assert not ours.dispatcher.close(drains=True, timeout=0.05)
    with pytest.raises(QueueClosedError, match="is closed"):
        ours.submit()
    ours.on(0).finish(job)
    assert ours.dispatcher.close(drains=True, timeout=WAIT_S)
    check_whole(job)
    other = team(2)
    job = other.submit()
    assert other.dispatcher.close(drains=False, timeout=WAIT_S)
    assert job.handle.status == "cancelled"


def test_a_replica_that_cannot_load_says_why() -> None:
    made: list[Pretender] = []

    def start(place: int, inbox: Any, seed: int) -> Any:
        made.append(Pretender(place, inbox, loads=place == 0))
        if place:
            made[-1].say(NotLoaded(Failure.of(FileNotFoundError("no such model"))))
            made[-1].die()
        return made[-1]

    dispatcher = Dispatcher(start, 2, None, ReplicaConfig())
    with pytest.raises(FileNotFoundError, match="no such model"):
        dispatcher.start()
    assert all(pretender.is_killed for pretender in made)


def test_silence_counts_only_while_the_observer_is_awake() -> None:
    heart = Heart(limit_s=1.0, tick_s=0.1)
    assert not heart.is_silent(0.0)
    # The observer itself slept for a minute.
    assert not heart.is_silent(60.0)
    assert heart.silent_s == pytest.approx(0.2)
    assert not heart.is_silent(60.15)
    heart.beat()
    assert not heart.is_silent(60.25)
    times = [60.25 + 0.1 * i for i in range(1, 13)]
    assert [heart.is_silent(now) for now in times] == [False] * 10 + [True] * 2


def test_restarts_are_limited_within_a_window() -> None:
    limit = RestartLimit(most=2, window_s=10.0)
    assert [limit.take(now) for now in (0.0, 1.0, 9.0, 10.5, 10.6, 11.5)] == [
        True, True, False, True, False, True,
    ]  # fmt: skip
    assert limit.total == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"heartbeat_s": 0}, "heartbeat_s must be seconds above 0; got 0"),
        ({"silence_s": 0.1}, "silence_s must be at least two beats, 0.2 s; got 0.1"),
        ({"max_restarts": -1}, "max_restarts must be an integer of at least 0; got -1"),
        ({"num_threads": 0}, "num_threads must be an integer of at least 1; got 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ReplicaConfig(**settings)
