"""Who goes first, how much work is expected, how many rows run; and how long anybody waits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_hf import QueueConfig
from dspark_hf.serving.handle import RequestHandle
from dspark_hf.serving.order import (
    HISTORY,
    MIN_HISTORY,
    PRESSURE,
    SHORTER,
    BatchSize,
    Lengths,
    Order,
    Ticket,
)
from dspark_hf.serving.places import Places

PATIENCE = 10.0


def order(**settings: Any) -> Order:
    return Order(QueueConfig(patience_s=PATIENCE, **settings))


def sequence(rule: Order, tickets: Sequence[Ticket], now: float, token_s: float = 0.0) -> list[int]:
    """Return the places of tickets in the order they go."""
    return sorted(range(len(tickets)), key=lambda i: rule.key(tickets[i], now, token_s))


def test_the_shortest_goes_first_and_ties_go_by_arrival() -> None:
    tickets = [Ticket(0, 0, 50), Ticket(1, 0, 5), Ticket(3, 0, 20), Ticket(2, 0, 20)]
    assert sequence(order(), tickets, now=4) == [1, 3, 2, 0]


def test_fifo_goes_by_arrival() -> None:
    tickets = [Ticket(2, 0, 1), Ticket(0, 0, 50), Ticket(1, 0, 5)]
    assert sequence(order(order="fifo"), tickets, now=4) == [1, 2, 0]


@pytest.mark.parametrize("kind", ["shortest", "fifo"])
def test_priority_goes_before_length_and_arrival(kind: str) -> None:
    tickets = [Ticket(0, 0, 1), Ticket(1, 2, 90), Ticket(2, 1, 40), Ticket(3, 2, 95)]
    assert sequence(order(order=kind), tickets, now=4) == [1, 3, 2, 0]


def test_who_lost_patience_goes_first_by_arrival_whatever_the_rest() -> None:
    tickets = [Ticket(3.9, 5, 1), Ticket(0.5, 0, 99), Ticket(0.0, 0, 100), Ticket(3.0, 9, 1, 14.0)]
    assert sequence(order(), tickets, now=10.5, token_s=1.0) == [2, 1, 3, 0]


def test_a_deadline_presses_when_its_slack_is_no_longer_enough() -> None:
    """10 tokens at half a second each take 5 s; from 1.5 times that it goes before priorities."""
    rule, late, high = order(), Ticket(0, 0, 10, deadline=9.0), Ticket(1, 9, 1)
    slack = PRESSURE * 10 * 0.5
    assert sequence(rule, [late, high], now=9.0 - slack - 0.1, token_s=0.5) == [1, 0]
    assert sequence(rule, [late, high], now=9.0 - slack + 0.1, token_s=0.5) == [0, 1]
    # Before any step was timed nobody knows.
    assert sequence(rule, [late, high], now=8.9) == [1, 0]


def test_of_two_pressed_ones_the_earlier_deadline_goes_first() -> None:
    tickets = [Ticket(0, 0, 10, deadline=3.0), Ticket(1, 0, 5, deadline=2.0)]
    assert sequence(order(), tickets, now=1.0, token_s=1.0) == [1, 0]


REPLACES: dict[str, tuple[Ticket, Ticket, bool]] = {
    "a higher priority": (Ticket(1, 1, 90), Ticket(0, 0, 5), True),
    "a lower priority": (Ticket(1, 0, 1), Ticket(0, 1, 90), False),
    "much shorter": (Ticket(1, 0, 9), Ticket(0, 0, 20), True),
    "not much shorter": (Ticket(1, 0, 11), Ticket(0, 0, 20), False),
    "half as long is not enough": (Ticket(1, 0, SHORTER * 20), Ticket(0, 0, 20), False),
    "longer": (Ticket(1, 0, 30), Ticket(0, 0, 20), False),
    "impatient, whatever it has to do": (Ticket(-10, 0, 90), Ticket(0, 0, 5), True),
    "impatient, against a higher priority": (Ticket(-10, 0, 1), Ticket(0, 1, 90), False),
    "anybody against an impatient one": (Ticket(1, 9, 1), Ticket(-10, 0, 90), False),
    "pressed, against none": (Ticket(1, 0, 9, 3.0), Ticket(0, 0, 9), True),
    "pressed, against another deadline": (Ticket(1, 0, 9, 3.0), Ticket(0, 0, 9, 80.0), False),
    "pressed, against a higher priority": (Ticket(1, 0, 9, 3.0), Ticket(0, 1, 9), False),
    "not pressed": (Ticket(1, 0, 19, 80.0), Ticket(0, 0, 20), False),
}


@pytest.mark.parametrize("case", REPLACES)
def test_who_may_take_a_running_ones_place(case: str) -> None:
    waiting, running, may = REPLACES[case]
    assert order().may_replace(waiting, running, now=2.0, token_s=1.0) is may
    assert not order(preempt=False).may_replace(waiting, running, now=2.0, token_s=1.0)


def test_within_a_priority_fifo_parks_only_for_the_impatient() -> None:
    rule = order(order="fifo")
    assert not rule.may_replace(Ticket(1, 0, 1), Ticket(0, 0, 90), 2.0, 0.0)
    assert rule.may_replace(Ticket(-10, 0, 90), Ticket(0, 0, 90), 2.0, 0.0)


def test_two_requests_never_take_each_others_place() -> None:
    stream, rule = random.Random(1), order()  # noqa: S311
    for _ in range(5000):
        one, other = (
            Ticket(
                stream.uniform(-15, 2),
                stream.randint(0, 2),
                stream.randint(1, 60),
                stream.choice([None, stream.uniform(0, 40)]),
            )
            for _ in range(2)
        )
        now, token_s = stream.uniform(2, 6), stream.choice([0.0, 0.5])
        both = (
            rule.may_replace(one, other, now, token_s),
            rule.may_replace(other, one, now, token_s),
        )
        assert not all(both)


def test_expected_lengths_follow_from_rows_that_ended() -> None:
    lengths, stream, ended = Lengths(), random.Random(2), []  # noqa: S311
    for count in range(HISTORY + 50):
        if count < MIN_HISTORY:
            assert lengths.remaining(3, 40) == 37.0
        for made, most in ((0, 40), (3, 40), (20, 64), (60, 64)):
            longer = [n for n in ended[-HISTORY:] if n > made]
            if count >= MIN_HISTORY and longer:
                wanted = max(min(sum(longer) / len(longer), most) - made, 1.0)
                assert lengths.remaining(made, most) == pytest.approx(wanted)
            else:
                assert lengths.remaining(made, most) == most - made
        ended.append(stream.randint(1, 50))
        lengths.add(ended[-1])


def test_the_batch_shrinks_when_tokens_are_late_and_grows_while_others_wait() -> None:
    size = BatchSize(QueueConfig(min_rows=2, max_rows=10, target_latency_ms=100))
    assert size.limit == 10
    for _ in range(20):
        size.observe(1.0, [1] * size.limit, waiting=5)
    assert size.limit == 2
    for _ in range(40):
        size.observe(0.01, [1] * size.limit, waiting=0)
    assert size.limit == 2
    for expected in range(3, 11):
        size.observe(0.01, [1] * size.limit, waiting=1)
        assert size.limit == expected
    size.observe(0.01, [1] * size.limit, waiting=1)
    assert size.limit == 10


@pytest.mark.parametrize("settings", [{"dynamic": False, "target_latency_ms": 1}, {}])
def test_without_a_latency_to_keep_all_rows_may_run(settings: dict[str, Any]) -> None:
    size = BatchSize(QueueConfig(max_rows=7, **settings))
    size.observe(9.0, [1, 1], waiting=3)
    assert size.limit == 7


def test_seconds_per_token_count_accepted_drafts() -> None:
    size = BatchSize(QueueConfig())
    size.observe(1.0, [], waiting=0)
    assert size.token_s == 0.0
    size.observe(1.0, [4, 1, 3, 2], waiting=0)
    assert size.token_s == pytest.approx(0.4)


def test_an_idle_queue_waits_for_its_least_rows_but_not_for_ever() -> None:
    size = BatchSize(QueueConfig(min_rows=4, max_wait_ms=50))
    assert size.patience_s(3, 0.01) == pytest.approx(0.04)
    assert size.patience_s(4, 0.0) == 0.0
    assert size.patience_s(1, 0.06) == 0.0


# How long anybody waits: the real admission, over requests that only count.


@dataclass(eq=False)
class Job:
    """A request of one row that needs so many steps."""

    name: int
    arrival: float
    steps: int
    priority: int = 0
    started: float | None = None
    ended: float | None = None
    parkings: list[float] = field(default_factory=list)
    error: None = None

    @property
    def rows(self) -> list[Any]:
        return [SimpleNamespace(ids=[1], row_id=self.name)]

    active_rows = rows

    @property
    def handle(self) -> RequestHandle:
        return RequestHandle(lambda _: None)

    def ticket(self, _: Any) -> Ticket:
        return Ticket(self.arrival, self.priority, self.steps)

    def most_tokens(self, _: Any) -> int:
        return 1


class Counting(Places):
    """Places whose requests have nothing to decode."""

    def __init__(self, settings: QueueConfig) -> None:
        self.settings, self.now, self._most_rows = settings, 0.0, None
        self.waiting, self.running = [], []
        self.order, self.lengths, self.size = Order(settings), Lengths(), BatchSize(settings)
        self.budget = SimpleNamespace(fits=lambda lengths: True)

    def park(self, request: Any) -> None:
        request.parkings.append(self.now)
        self.running.remove(request)
        self.waiting.append(request)

    def _resume(self, request: Any) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        if request.started is None:
            request.started = self.now


def simulate(settings: QueueConfig, jobs: Sequence[Job]) -> Counting:
    """Run jobs; each step takes a second and brings every running one a step on."""
    places, coming = Counting(settings), sorted(jobs, key=lambda job: job.arrival)
    while coming or places.waiting or places.running:
        while coming and coming[0].arrival <= places.now:
            places.waiting.append(coming.pop(0))
        places.admit(places.now)
        assert len(places.running) <= settings.max_rows
        assert len(places.running) == settings.max_rows or not places.waiting
        places.now += 1
        for job in list(places.running):
            job.steps -= 1
            if not job.steps:
                job.ended = places.now
                places.running.remove(job)
    return places


def bound_of(job: Job, others: Sequence[Job], work: dict[int, int]) -> float:
    """Return the documented latest start: patience, then what came before and what ran.

    With one row; several share that work, and are done with it no later.
    """
    impatient = job.arrival + PATIENCE
    before = [o for o in others if o.arrival <= job.arrival and o.ended and o.ended > impatient]
    ran = [
        o
        for o in others
        if o not in before and o.started is not None and o.started < impatient
        and o.ended and o.ended > impatient
    ]  # fmt: skip
    return impatient + 1 + sum(work[o.name] for o in [*before, *ran])


def steady(stream: random.Random, kind: str) -> list[Job]:
    """Return a load that never lets up for 300 seconds, of one kind, with a few others in it."""
    jobs = [Job(0, 1.0, 60, priority=0)]
    for second in range(300):
        for _ in range(stream.randint(0, 2)):
            steps, priority = (2, 0) if kind == "short" else (6, 3)
            if stream.random() < 0.05:
                steps, priority = stream.randint(5, 50), stream.randint(0, 3)
            jobs.append(Job(len(jobs), second, steps, priority))
    return jobs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("kind", ["short", "high"])
@pytest.mark.parametrize("rule", ["shortest", "fifo"])
def test_nobody_waits_longer_than_the_documented_bound(
    rule: str, kind: str, max_rows: int, seed: int
) -> None:
    jobs = steady(random.Random(seed), kind)  # noqa: S311
    work = {job.name: job.steps for job in jobs}
    settings = QueueConfig(max_rows=max_rows, order=rule, patience_s=PATIENCE)
    simulate(settings, jobs)
    for job in jobs:
        assert job.started is not None
        others = [other for other in jobs if other is not job]
        assert job.started <= bound_of(job, others, work)
        # Once it has lost patience nobody takes its place any more.
        assert all(when < job.arrival + PATIENCE for when in job.parkings)


def test_without_ageing_the_long_one_would_have_waited_for_all_the_others() -> None:
    """The load is one under which the bound means something."""
    jobs = steady(random.Random(0), "short")  # noqa: S311
    simulate(QueueConfig(max_rows=1, patience_s=10**6), jobs)
    assert jobs[0].ended is not None
    assert jobs[0].ended > 300


def test_fifty_short_ones_of_high_priority_do_not_starve_one_of_low_priority() -> None:
    low = Job(0, 0.0, 30)
    jobs = [low, *(Job(n, 0.0 if n == 1 else float(n), 1, priority=5) for n in range(1, 51))]
    simulate(QueueConfig(max_rows=1, patience_s=PATIENCE), jobs)
    assert low.ended is not None
    # It loses patience at 10 s and is not parked any more; 30 steps of work, some of them before.
    assert low.ended <= PATIENCE + 1 + 30
    assert low.parkings


def test_who_is_submitted_while_others_are_admitted_waits_for_the_next_step() -> None:
    """Other threads append at any moment."""
    places, late = Counting(QueueConfig(max_rows=9)), Job(1, 0.0, 5)

    class First(Job):
        def ticket(self, lengths: Any) -> Ticket:
            if late not in places.waiting:
                places.waiting.append(late)
            return super().ticket(lengths)

    first = First(0, 0.0, 5)
    places.waiting.append(first)
    places.admit(0.0)
    assert (places.running, places.waiting) == ([first], [late])
    places.admit(0.0)
    assert places.running == [first, late]


def test_nothing_is_parked_for_one_that_would_still_not_fit() -> None:
    """It needs both places, and only one of those who have them would yield."""
    places = Counting(QueueConfig(max_rows=2, patience_s=PATIENCE))
    firm, soft = Job(0, 0.0, 50, priority=5), Job(1, 0.0, 50)
    wide = Job(2, 1.0, 5, priority=3)
    for job in (firm, soft):
        places.waiting.append(job)
    places.admit(0.0)
    wide_rows = property(lambda self: [SimpleNamespace(ids=[1], row_id=n) for n in (8, 9)])
    wide.__class__ = type("Wide", (Job,), {"rows": wide_rows, "active_rows": wide_rows})
    places.waiting.append(wide)
    places.admit(2.0)
    assert places.running == [firm, soft]
    places.running.remove(firm)
    places.admit(2.0)
    assert places.running == [wide]
    assert soft.parkings
