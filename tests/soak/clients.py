"""The callers of a soak: threads that submit, cancel, wait, and compare what comes back."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_hf import GenerationQueue
from dspark_hf.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InputError,
    QueueFullError,
    RequestCancelledError,
)
from dspark_hf.serving.handle import RequestHandle, RequestResult
from own_code import OWN_CODE
from queues import Asked
from soak.asking import Library, Question, new_tokens
from soak.faults import Counts
from storms import OF_A_STORM

MOST_IN_FLIGHT = 8
"""Requests that a client has in the queue at most; sometimes it has none."""
LOAD_S = 5.0
"""Seconds, on average, after which a client changes how many it has."""
PAUSE_S, FULL_S = 0.01, 0.2
"""Seconds between two looks, and after the queue was found full."""
MOST_AWAKE_S = 0.25
"""Of a gap between two looks, counted as waiting: looks are quicker where a client is run."""
MOST_TOLD = 20
"""Things that went wrong which are told in full; the others are counted."""
CHANCES = {"cancel": 0.12, "deadline": 0.1, "wrong": 0.03, "raises": 0.04, "generate": 0.005}
DONE, CANCELLED, EXPIRED, REFUSED = "done", "cancelled", "expired", "refused: queue full"
AS_INJECTED, AT_SUBMIT, BESIDE = "failed as injected", "refused at submit", "generate() beside"
WRONG, OTHERWISE, HANGING = "wrong text", "ended otherwise", "hanging"

WRONG_AT_SUBMIT: list[tuple[Any, dict[str, Any], type[Exception]]] = [
    ([], {}, InputError),
    ([1, -1], {}, InputError),
    ([1, 2], {"max_new_tokens": 10**9}, CapacityError),
    ([1, 2], {"num_return_sequences": 2}, ValueError),
    ([1, 2], {"num_beams": -1}, ConfigError),
    ([1, 2], {"input_ids": torch.ones(1, 1)}, ConfigError),
]
"""What is submitted, and how it must be refused in the caller's thread."""


class Tally:
    """What became of all requests, and what was wrong.

    Attributes:
        outcomes: How many requests came to what.
        faults: How often what went wrong.
        wrong: How often happened what must not.
        told: That, in full.
        longest_s: The longest that a request took.
        late: Where the queue's thread was when a request had taken longer than the bound.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.outcomes, self.faults = Counts(), Counts()
        self.wrong = Counts()
        self.told: list[str] = []
        self.longest_s = 0.0
        self.late: list[str] = []

    def complain(self, kind: str, what: str) -> None:
        """Note something that must not happen.

        Args:
            kind: WRONG, OTHERWISE or HANGING.
            what: In full.
        """
        self.wrong.note(kind)
        if len(self.told) < MOST_TOLD:
            self.told.append(f"{kind}: {what}")


@dataclass
class Flight:
    """A request that was submitted.

    Attributes:
        question: The request; None for one that must fail.
        handle: Of the queue.
        fails_with: What it must fail with; None if it must not.
        deadline_s: As submitted.
        cancel_at: When it will be cancelled, on time.monotonic(); None for never.
        was_cancelled: Whether it was.
        awake_s: Seconds that its client has waited for it, being awake.
        is_late: Whether it has been noted as late.
    """

    question: Question | None
    handle: RequestHandle
    fails_with: type[Exception] | None = None
    deadline_s: float | None = None
    cancel_at: float | None = None
    was_cancelled: bool = False
    awake_s: float = 0.0
    is_late: bool = False


def check(flight: Flight) -> tuple[str, str | None]:
    """Return what became of a request that has ended, and what is wrong with that, if anything."""
    try:
        result = flight.handle.result(0)
    except RequestCancelledError:
        is_right = flight.was_cancelled and begins_as_alone(flight)
        return CANCELLED, None if is_right else f"{told(flight)} was cancelled"
    except DeadlineError as error:
        ended = flight.handle.stats.ended or 0.0
        is_right = flight.deadline_s is not None and ended >= flight.deadline_s
        return EXPIRED, None if is_right and begins_as_alone(flight) else f"{told(flight)}: {error}"
    except Exception as error:  # noqa: BLE001 - judged here
        is_right = is_injected(flight, error) and begins_as_alone(flight)
        return AS_INJECTED, None if is_right else f"{told(flight)}: {error!r}"
    if flight.fails_with is not None or flight.question is None:
        return DONE, f"a request that must fail with {flight.fails_with} came to {result}"
    return DONE, difference(flight.question, flight.handle, result)


def is_injected(flight: Flight, error: Exception) -> bool:
    """Tell whether a request failed as it had to, or may."""
    if flight.fails_with is not None:
        return type(error) is flight.fails_with
    # The model's own loop is not begun again when memory runs out in it.
    may_fail = flight.question is not None and flight.question.runs_alone
    cause = error.__cause__
    is_ours = isinstance(cause, torch.OutOfMemoryError) and str(cause) == OF_A_STORM
    return may_fail and isinstance(error, CapacityError) and is_ours


def begins_as_alone(flight: Flight) -> bool:
    """Tell whether the pieces of a request that was broken off are the beginning of its answer."""
    if flight.question is None:
        return True
    said = flight.handle.pieces
    if said and isinstance(said[0], str):
        return flight.question.text.startswith("".join(said))
    return bool(flight.question.rows[0, : len(said)].tolist() == said)


def difference(question: Question, handle: RequestHandle, result: RequestResult) -> str | None:
    """Return how a result differs from the request's run alone; None if it does not.

    Args:
        question: With what it comes to alone.
        handle: Whose pieces must join to the result.
        result: Of the queue.
    """
    rows = result.output if isinstance(result.output, torch.Tensor) else result.output.sequences
    found = new_tokens(result.output, rows.shape[1] - question.rows.shape[1])
    name = f"request {question.number}"
    if not torch.equal(found, question.rows):
        return f"{name} is {found.tolist()}, alone {question.rows.tolist()}"
    if result.ids != question.rows[0, : len(result.ids)].tolist():
        return f"{name}: ids {result.ids}, rows {question.rows.tolist()}"
    pieces: Any = handle.pieces
    wanted: Any = result.ids
    if result.text is not None:
        pieces, wanted = "".join(pieces), result.text
        if result.text != question.text:
            return f"{name}: text {result.text!r}, alone {question.text!r}"
    return None if pieces == wanted else f"{name}: pieces {pieces}, result {wanted}"


def told(flight: Flight) -> str:
    """Name a request."""
    stats, question = flight.handle.stats, flight.question
    number = "of its own code" if question is None else question.number
    return (
        f"request {number} (deadline {flight.deadline_s}, cancelled {flight.was_cancelled}, "
        f"ended {stats.ended}, pieces {flight.handle.pieces})"
    )


def where_is(queue: GenerationQueue) -> str:
    """Return where a queue's thread is, and how many steps it has made."""
    engine = queue._engine
    frame = sys._current_frames().get(engine._thread.ident or 0)
    calls = [] if frame is None else traceback.extract_stack(frame)
    stack = " > ".join(f"{Path(call.filename).stem}.{call.name}:{call.lineno}" for call in calls)
    return f"step {engine.steps} in {stack or 'no thread'}"


class Client(threading.Thread):
    """Has some requests in the queue at any time, until it is told to stop."""

    def __init__(
        self, queue: GenerationQueue, library: Library, tally: Tally, seed: int, bound_s: float
    ) -> None:
        """Prepare.

        Args:
            queue: That is soaked.
            library: Where requests come from.
            tally: Told of everything.
            seed: Of what this client draws.
            bound_s: Seconds within which every request must have ended.
        """
        super().__init__(name=f"soak-client-{seed}", daemon=True)
        self.queue, self.library, self.tally, self.bound_s = queue, library, tally, bound_s
        self.stream = random.Random(seed)  # noqa: S311
        self.stopping = threading.Event()
        self.flights: list[Flight] = []
        self.load, self.load_until = MOST_IN_FLIGHT, 0.0
        self.looked = time.monotonic()

    def run(self) -> None:
        """Submit until told to stop, then wait for what is left."""
        try:
            while not self.stopping.is_set():
                if len(self.flights) < self._wanted():
                    self.ask()
                else:
                    time.sleep(PAUSE_S)
                self.look()
            while self.flights:
                time.sleep(PAUSE_S)
                self.look()
        except BaseException as error:  # noqa: BLE001 - the soak tells of it
            self.tally.complain(OTHERWISE, f"a client ended by {error!r}")

    def look(self) -> None:
        """Compare what has ended, cancel what should be, complain of what hangs.

        Where the system does not run this process for a while, it does not run the queue either:
        of a gap between two looks only so much counts.
        """
        now, left = time.monotonic(), []
        awake_s, self.looked = min(now - self.looked, MOST_AWAKE_S), now
        for flight in self.flights:
            flight.awake_s += awake_s
            if flight.cancel_at is not None and now >= flight.cancel_at:
                flight.was_cancelled, flight.cancel_at = flight.handle.cancel(), None
            if flight.handle.is_ended:
                self._land(flight)
            elif flight.awake_s > self.bound_s:
                where = where_is(self.queue)
                self.tally.complain(HANGING, f"{told(flight)}, {flight.handle.status}: {where}")
            else:
                self._note_late(flight)
                left.append(flight)
        self.flights = left

    def _land(self, flight: Flight) -> None:
        outcome, wrong = check(flight)
        self.tally.outcomes.note(outcome)
        self.tally.longest_s = max(self.tally.longest_s, flight.handle.stats.ended or 0.0)
        if wrong is not None:
            self.tally.complain(WRONG if outcome == DONE else OTHERWISE, wrong)

    def _note_late(self, flight: Flight) -> None:
        if flight.is_late or flight.handle.stats.since_submitted() <= self.bound_s:
            return
        flight.is_late = True
        if len(self.tally.late) < MOST_TOLD:
            self.tally.late.append(f"{flight.handle.status}, {where_is(self.queue)}")

    def ask(self) -> None:
        """Make one request of any kind."""
        ways: dict[str, Callable[[], None]] = {
            "wrong": self._ask_wrongly, "raises": self._ask_what_raises, "generate": self._beside,
        }  # fmt: skip
        for name, way in ways.items():
            if self.stream.random() < CHANCES[name]:
                way()
                return
        question = self.library.draw(self.stream)
        deadline_s = cancel_at = None
        if self.stream.random() < CHANCES["deadline"]:
            deadline_s = self.stream.uniform(0.02, 4.0)
        if self.stream.random() < CHANCES["cancel"]:
            cancel_at = time.monotonic() + self.stream.uniform(0.0, 0.5)
        handle = self._submit(question.asked, deadline_s)
        if handle is not None:
            flight = Flight(question, handle, deadline_s=deadline_s, cancel_at=cancel_at)
            self.flights.append(flight)

    def _submit(self, asked: Asked, deadline_s: float | None = None) -> RequestHandle | None:
        order = {"priority": self.stream.randint(0, 2), "deadline_s": deadline_s}
        try:
            return asked.submit(self.queue, **order)
        except QueueFullError:
            self.tally.outcomes.note(REFUSED)
            time.sleep(FULL_S)
            return None

    def _ask_what_raises(self) -> None:
        """Submit a request whose own code raises."""
        case = self.stream.choice(list(OWN_CODE))
        kind = InputError if "scores" in case else ArithmeticError
        ids = self.library.subject.words(self.stream.randint(1, 40), self.stream.randint(1, 99))
        options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
        if "scores" in case:
            del options["min_new_tokens"]
        handle = self._submit(Asked(ids, lambda: {**options, **OWN_CODE[case]()}))
        if handle is not None:
            self.tally.faults.note(f"a request fails: {case}")
            self.flights.append(Flight(None, handle, kind))

    def _ask_wrongly(self) -> None:
        """Submit what must be refused at once."""
        inputs, options, kind = self.stream.choice(WRONG_AT_SUBMIT)
        try:
            self.queue.submit(inputs, **{"max_new_tokens": 4, "do_sample": False, **options})
        except kind:
            self.tally.outcomes.note(AT_SUBMIT)
        except QueueFullError:
            # What there is no room for is not looked at.
            self.tally.outcomes.note(REFUSED)
            time.sleep(FULL_S)
        else:
            self.tally.complain(OTHERWISE, f"{inputs} with {options} was not refused")

    def _beside(self) -> None:
        """Call generate() on the model, which takes turns with the queue."""
        question = self.library.draw(self.stream)
        if question.asked.ids is not None or question.runs_alone:
            return
        ids = torch.tensor([question.asked.inputs])
        options = {"attention_mask": torch.ones_like(ids), **question.asked.options()}
        output = self.library.subject.model.generate(ids, **options)
        self.tally.outcomes.note(BESIDE)
        if not torch.equal(new_tokens(output, ids.shape[1]), question.rows):
            self.tally.complain(WRONG, f"generate() beside the queue, request {question.number}")

    def _wanted(self) -> int:
        """Return how many requests there should be: it changes, and is none at times."""
        now = time.monotonic()
        if now >= self.load_until:
            self.load = self.stream.choice((0, 1, 3, MOST_IN_FLIGHT, MOST_IN_FLIGHT))
            self.load_until = now + self.stream.expovariate(1 / LOAD_S)
        return self.load
