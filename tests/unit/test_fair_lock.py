"""A lock that is handed over in the order it was asked for, and may be taken again by its owner."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dspark_hf.fair_lock import FairLock

WAIT_S = 30


def until(is_met: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    pause = threading.Event()
    for _ in range(WAIT_S * 1000):
        if is_met():
            return
        pause.wait(0.001)
    raise TimeoutError


def test_threads_get_it_in_the_order_they_asked() -> None:
    lock, order, threads = FairLock(), [], []

    def take(name: int) -> None:
        with lock:
            order.append(name)

    with lock:
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,), daemon=True))
            threads[-1].start()
            until(lambda: len(lock._waiting) == len(threads))
    for thread in threads:
        thread.join(WAIT_S)
    assert order == [0, 1, 2, 3, 4]


def test_who_takes_it_again_and_again_lets_others_in_between() -> None:
    lock, order = FairLock(), []
    lock.__enter__()

    def other() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    until(lambda: len(lock._waiting) == 1)
    lock.__exit__(None, None, None)
    with lock:
        order.append("again")
    thread.join(WAIT_S)
    assert order == ["other", "again"]


def test_its_owner_may_take_it_again() -> None:
    lock = FairLock()
    free = threading.Event()

    def other() -> None:
        with lock:
            free.set()

    with lock:
        with lock:
            threading.Thread(target=other, daemon=True).start()
            until(lambda: len(lock._waiting) == 1)
        assert not free.is_set()
    assert free.wait(WAIT_S)


def test_an_error_inside_frees_it() -> None:
    lock = FairLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert lock._owner is None


def test_an_interrupted_wait_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FairLock()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(WAIT_S)

    class Interrupted:
        """A turn that a signal breaks off."""

        def __init__(self) -> None:
            self.calls = 0

        def acquire(self) -> None:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr("dspark_hf.fair_lock.threading.Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
    assert not lock._waiting
    over.set()
    thread.join(WAIT_S)
    with lock:
        pass
