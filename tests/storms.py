"""Faults of a queue that are drawn by a stream: forwards without memory, and lost caches."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dspark_hf.serving.keeper import Keeper

OF_A_STORM = "storm"
"""What injected errors say, so that nobody takes them for real ones."""


def layers_of(model: Any) -> Any:
    """Return a model's blocks, first to last."""
    return (getattr(model, "backbone", None) or model.model).layers


class ScarceMemory:
    """Lets forwards run out of memory in their middle, by chance.

    Not twice before a step has succeeded, or a request alone would rightly be given up.
    """

    def __init__(
        self,
        model: Any,
        engine: Any,
        stream: random.Random,
        chance: float,
        *,
        thread: threading.Thread | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Begin.

        Args:
            model: The target.
            engine: Of the queue; it counts the steps.
            stream: Draws.
            chance: Of a forward to fail.
            thread: Whose forwards alone may fail; None for all.
            note: Told of each failure.
        """
        self.engine, self.stream, self.chance = engine, stream, chance
        self.thread, self.note = thread, note
        self._steps = -1
        self._hook = layers_of(model)[1].register_forward_pre_hook(self._maybe_fail)

    def end(self) -> None:
        """Let every forward be."""
        self._hook.remove()

    def _maybe_fail(self, *_: Any) -> None:
        if self.thread is not None and threading.current_thread() is not self.thread:
            return
        if self.engine.steps > self._steps and self.stream.random() < self.chance:
            self._steps = self.engine.steps
            self.note("no memory in a forward")
            raise torch.OutOfMemoryError(OF_A_STORM)


@contextmanager
def lost_caches(
    stream: random.Random, chance: float, note: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Let rows' caches be lost, by chance, when they are parked or come back.

    Args:
        stream: Draws.
        chance: Of a row to lose its cache.
        note: Told of each failure.
    """

    def sometimes(real: Any, name: str) -> Any:
        def call(*args: Any) -> Any:
            if stream.random() < chance:
                note(name)
                raise RuntimeError(OF_A_STORM)
            return real(*args)

        return call

    park = sometimes(Keeper.park, "a cache lost in parking")
    resume = sometimes(Keeper.resume, "a cache lost in coming back")
    with patch.object(Keeper, "park", park), patch.object(Keeper, "resume", resume):
        yield
