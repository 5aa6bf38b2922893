"""How requests outlive their replicas, with replicas that only pretend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dspark_hf import QueueConfig
from dspark_hf.errors import DeadlineError, QueueClosedError, QueueError
from dspark_hf.serving.dispatch import Dispatcher
from dspark_hf.serving.replica_settings import ReplicaConfig
from dspark_hf.serving.wire import Failure, Moved, NotLoaded, Ready, Token
from replica_pretenders import ANSWER, WAIT_S, Pretender, Team, check_whole, teams


@pytest.fixture
def team() -> Iterator[Callable[..., Team]]:
    with teams() as make:
        yield make


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
