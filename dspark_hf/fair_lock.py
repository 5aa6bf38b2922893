"""FairLock: a re-entrant lock that goes to whoever has waited longest."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class FairLock:
    """Handed over in the order it was asked for.

    A queue's thread lets go of the model between two steps and takes it again at once. A plain lock
    would be its own again before a waiting thread has woken up, step after step.
    """

    def __init__(self) -> None:
        """Start free."""
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> None:
        """Wait for the lock."""
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner, self._depth = me, self._depth + 1
                return
            turn = (me, threading.Lock())
            turn[1].acquire()
            self._waiting.append(turn)
        try:
            turn[1].acquire()
        except BaseException:
            # Interrupted while waiting: leave the line, or pass on what came meanwhile.
            with self._mutex:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._hand_over()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go; the first who waits has it."""
        with self._mutex:
            self._depth -= 1
            if not self._depth:
                self._hand_over()

    def _hand_over(self) -> None:
        self._owner, self._depth = None, 0
        if self._waiting:
            (self._owner, turn), self._depth = self._waiting.popleft(), 1
            turn.release()
