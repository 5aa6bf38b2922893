"""RequestHandle: what a caller holds of a submitted request."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark_hf.errors import QueueError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator

    from dspark_hf.metrics import SpeculationRecord

WAITING, STARTING, RUNNING, PARKED = "waiting", "starting", "running", "parked"
DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
ENDS = frozenset({DONE, FAILED, CANCELLED})


@dataclass
class RequestStats:
    """Times of a request, in seconds since it was submitted; None until it gets there.

    Attributes:
        submitted: On the clock of time.monotonic().
        started: Its first prompt tokens were fed.
        first_token: Its first token was committed.
        ended: It was done, failed or cancelled.
        preemptions: Times it was parked for another request.
        moves: Times it went on in another replica, after its own had died or had more to do.
        group: Of a router's groups, the one that took it.
        num_prompt_tokens: Of its longest row.
        cached_tokens: Prompt tokens that were not computed again.
        records: One per row: drafted, accepted and so on.
    """

    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    preemptions: int = 0
    moves: int = 0
    group: str | None = None
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    records: list[SpeculationRecord] = field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        """Tokens of all its rows."""
        return sum(record.new_tokens for record in self.records)

    def since_submitted(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self.submitted


@dataclass(frozen=True)
class RequestResult:
    """What a request ended with.

    Attributes:
        output: What generate() returns for it alone: ids (B, length), or a dict output.
        ids: New tokens of its first row, the end token included.
        text: They as text without special tokens; None if ids were submitted.
        stats: Times and counts.
    """

    output: Any
    ids: list[int]
    text: str | None
    stats: RequestStats

    def __str__(self) -> str:
        """Return the text, or the ids."""
        return str(self.ids) if self.text is None else self.text


class RequestHandle:
    """A submitted request: wait for it, read it piece by piece, cancel it.

    Iterating gives pieces as they come, from the first one on, and ends when the request does: new
    text if text or a chat was submitted, else token ids; of several rows, the first row's. A
    request that fails raises after its last piece. `await handle` and `async for` do the same
    without blocking an event loop. Any number of threads and tasks may read one handle.
    """

    def __init__(
        self,
        cancel: Callable[[RequestHandle], None],
        on_end: Callable[[RequestHandle, str, BaseException | None], None] | None = None,
    ) -> None:
        """Start waiting.

        Args:
            cancel: Tells the queue to drop the request.
            on_end: Told once how the request ended, and of its error.
        """
        self._on_end = on_end
        self.stats = RequestStats()
        self._cancel = cancel
        self._status = WAITING
        self._changed = threading.Condition()
        self._pieces: list[Any] = []
        self._result: RequestResult | None = None
        self._error: BaseException | None = None
        self._wakers: list[Callable[[], None]] = []
        self._followers: list[Callable[[str], None]] = []

    @property
    def status(self) -> str:
        """Waiting, starting (its prompt is read), running, parked, done, failed or cancelled."""
        return self._status

    @property
    def is_ended(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self._status in ENDS

    @property
    def pieces(self) -> list[Any]:
        """A copy of the pieces so far."""
        with self._changed:
            return list(self._pieces)

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the result.

        Args:
            timeout: Most seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it takes longer; the request goes on, unless it is cancelled.
            RequestCancelledError: If it was cancelled.
            DeadlineError: If its deadline passed.
            QueueClosedError: If the queue ended before it.
            Exception: Whatever its own processors, criteria or streamer raised.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_ended, timeout):
                raise TimeoutError(
                    f"the request is {self._status} after {timeout} s. Wait longer, or cancel() it."
                )
        return self._outcome()

    def cancel(self) -> bool:
        """Drop the request, wherever it is; its row is free after the step that is running.

        Returns:
            bool: Whether it is cancelled; False if it had ended otherwise.
        """
        if not self.is_ended:
            self._cancel(self)
        return self._status == CANCELLED

    def __iter__(self) -> Iterator[Any]:
        """Iterate over pieces; see the class."""
        place = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_ended or len(self._pieces) > place)  # noqa: B023 - called at once
                new, is_ended = self._pieces[place:], self.is_ended
            place += len(new)
            yield from new
            if is_ended and place == len(self._pieces):
                self._outcome()
                return

    def __await__(self) -> Generator[Any, None, RequestResult]:
        """Wait for the result in an event loop."""
        return self._awaited().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over pieces in an event loop."""
        place = 0
        while True:
            for piece in self._pieces[place:]:
                place += 1
                yield piece
            if self.is_ended and place == len(self._pieces):
                self._outcome()
                return
            await self._change(place)

    async def _awaited(self) -> RequestResult:
        while not self.is_ended:
            await self._change(None)
        return self._outcome()

    async def _change(self, place: int | None) -> None:
        """Wait until there are more than `place` pieces, or the request has ended."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # A loop that is closed has nobody left to tell.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if self.is_ended or (place is not None and len(self._pieces) > place):
                return
            self._wakers.append(wake)
        try:
            await event.wait()
        finally:
            with self._changed:
                self._wakers = [waker for waker in self._wakers if waker is not wake]

    def _outcome(self) -> RequestResult:
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise QueueError("the request has not ended. Wait for it by result().")
        return self._result

    # For the queue.

    def move_to(self, status: str) -> None:
        """Note where the request is now."""
        with self._changed:
            if self.is_ended or self._status == status:
                return
            self._status = status
            for call in self._followers:
                call(status)

    def follow(self, call: Callable[[str], None]) -> None:
        """Call back with the present status, and with each one that the request moves to.

        Args:
            call: Must be quick and must not wait for the request.
        """
        with self._changed:
            call(self._status)
            self._followers.append(call)

    def add(self, piece: Any) -> None:
        """Add a piece."""
        with self._changed:
            if not self.is_ended:
                self._pieces.append(piece)
                self._notify()

    def end(
        self,
        status: str,
        *,
        result: RequestResult | None = None,
        error: BaseException | None = None,
    ) -> bool:
        """End the request, once; tell whether this did.

        Args:
            status: DONE with a result, FAILED or CANCELLED with an error.
            result: What it came to.
            error: Why there is none.
        """
        with self._changed:
            if self.is_ended:
                return False
            self.stats.ended = self.stats.since_submitted()
            self._status, self._result, self._error = status, result, error
            if self._on_end is not None:
                self._on_end(self, status, error)
            self._notify()
            for call in self._followers:
                call(status)
            return True

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()
