"""How requests are shared out among replicas, with replicas that only pretend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dspark_hf import QueueConfig
from dspark_hf.errors import ConfigError, QueueClosedError, RequestCancelledError
from dspark_hf.serving.handle import RequestHandle
from dspark_hf.serving.job import Job
from dspark_hf.serving.wire import Drop, Failed, Failure, Ready, Refused, Token
from harness import toy_tokenizer
from replica_pretenders import ANSWER, WAIT_S, Team, check_whole, teams


@pytest.fixture
def team() -> Iterator[Callable[..., Team]]:
    with teams() as make:
        yield make


def test_requests_go_to_the_replica_with_the_least_work(team: Any) -> None:
    ours = team(2)
    jobs = [ours.submit(n) for n in (100, 20, 30, 40)]
    assert [job.replica.place for job in jobs] == [0, 1, 1, 1]
    ours.on(1).decode(jobs[1], 15)
    ours.until(lambda: len(jobs[1].handle.pieces) == 15)
    assert ours.submit(1).replica.place == 1


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
