"""Handles' pieces on their way to a client: merged, cut at stops, and dropped if it leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from dspark_hf.serving.handle import RequestHandle

    Receive = Callable[[], Awaitable[Any]]
    """Gives the next message of a client, as ASGI says."""

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection: nobody reads what would be sent."""


class StopCutter:
    """Cuts a growing text before the first stop in it, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Begin with an empty text.

        Args:
            stops: Texts to cut at, none of them empty.
        """
        self.stops = list(stops)
        self.is_met = False
        self._held = ""

    def add(self, text: str) -> str:
        """Take the next piece; return what may be shown by now."""
        if self.is_met:
            return ""
        text = self._held + text
        places = [place for place in (text.find(stop) for stop in self.stops) if place >= 0]
        if places:
            self.is_met, self._held = True, ""
            return text[: min(places)]
        kept = self._num_open(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """Return what was held back: no stop came of it."""
        text, self._held = self._held, ""
        return text

    def _num_open(self, text: str) -> int:
        """Return how many last characters may be the beginning of a stop."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0


async def merged(handles: Sequence[RequestHandle]) -> AsyncIterator[tuple[int, Any]]:
    """Yield every handle's pieces as they come, and None at its end.

    Args:
        handles: Read here alone.

    Yields:
        tuple[int, Any]: Which handle, and its next piece or None.

    Raises:
        Exception: What the first handle that failed raised; the others are not awaited.
    """
    events: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue()

    async def read(index: int, handle: RequestHandle) -> None:
        try:
            async for piece in handle:
                events.put_nowait((index, piece, None))
            events.put_nowait((index, None, None))
        except Exception as error:  # noqa: BLE001 - raised below, where it is awaited
            events.put_nowait((index, None, error))

    readers = [asyncio.create_task(read(i, handle)) for i, handle in enumerate(handles)]
    try:
        num_open = len(readers)
        while num_open:
            index, piece, error = await events.get()
            if error is not None:
                raise error
            num_open -= piece is None
            yield index, piece
    finally:
        for reader in readers:
            reader.cancel()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await something, unless the client leaves first.

    Args:
        receive: Gives the client's messages; its request was read.
        work: Cancelled if the client leaves.

    Raises:
        ClientGoneError: If the client leaves first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
