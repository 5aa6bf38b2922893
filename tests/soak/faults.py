"""What goes wrong in a soak beside memory and lost caches: drafters, files of the disk tier."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dspark_hf.serving.store import SUFFIX
from dspark_hf.values import DraftRequest, Proposal
from storms import OF_A_STORM

WELL, RAISES, SLOW, NONSENSE, DEAF = "well", "raises", "slow", "nonsense", "deaf"
MOODS = (WELL, WELL, WELL, WELL, RAISES, SLOW, NONSENSE, DEAF)
FAULT_CHANCE = {RAISES: 0.5, SLOW: 0.2, NONSENSE: 0.5, DEAF: 0.1}
"""Of a call, while the drafter is in that mood: some runs of failures open its breaker."""
LONGEST_SLEEP_S = 1.0


class Counts:
    """Counts by name, of several threads."""

    def __init__(self) -> None:
        """Start with none."""
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def note(self, name: str) -> None:
        """Count one."""
        with self._lock:
            self._counts[name] += 1

    def __getitem__(self, name: str) -> int:
        """Return a count."""
        return self._counts[name]

    def as_dict(self) -> dict[str, int]:
        """Return all of them, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))


class MisledDrafter:
    """A drafter that fails in moods which somebody sets, in one thread only."""

    def __init__(self, inner: Any) -> None:
        """Pass everything on as long as it is well."""
        self.inner, self.name = inner, inner.name
        if hasattr(inner, "block_size"):
            self.block_size = inner.block_size
        self.mood = WELL
        self._stream = random.Random(0)  # noqa: S311
        self._counts = Counts()
        self._engine: Any = None

    def mislead(self, engine: Any, stream: random.Random, counts: Counts) -> None:
        """Fail from now on, as the mood is, in an engine's thread."""
        self._engine, self._stream, self._counts = engine, stream, counts

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Pass on, or raise, be slow, or answer what is no proposal."""
        answers: list[Any] = self.inner.propose(requests)
        if self._fails(RAISES):
            self._raise("a drafter raised")
        if self._fails(SLOW):
            self._counts.note("a drafter was slow")
            guard = self._engine.places.guard
            time.sleep(
                min(1.5 * guard.settings.drafter_slow_factor * guard.step_s, LONGEST_SLEEP_S)
            )
        if self._fails(NONSENSE):
            self._counts.note("a drafter answered nonsense")
            wrong = [answers[1:], [None] * len(answers), [Proposal([-1])] * len(answers)]
            return self._stream.choice(wrong)
        return answers

    def free(self, row_id: int) -> None:
        """Pass on; raise behind that."""
        self.inner.free(row_id)
        if self._fails(DEAF):
            self._raise("a drafter raised as a row left")

    def _fails(self, mood: str) -> bool:
        if self.mood != mood or threading.current_thread() is not self._engine._thread:
            return False
        return self._stream.random() < FAULT_CHANCE[mood]

    def _raise(self, what: str) -> None:
        self._counts.note(what)
        raise ArithmeticError(OF_A_STORM)


class MisledReader(MisledDrafter):
    """One whose drafter reads the target's features."""

    def __init__(self, inner: Any) -> None:
        """Pass everything on as long as it is well."""
        super().__init__(inner)
        self.target_layers = inner.target_layers

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Pass on, or raise in place of it."""
        if self._fails(DEAF):
            self._raise("a drafter did not take features")
        self.inner.take(row_id, start, features)


def misled(drafter: Any) -> MisledDrafter:
    """Put a drafter under moods."""
    return MisledReader(drafter) if hasattr(drafter, "take") else MisledDrafter(drafter)


def damage_a_file(folder: Path, stream: random.Random) -> str | None:
    """Damage one of a disk tier's files where it lies; return how, None if there is none.

    Args:
        folder: Of the tier.
        stream: Draws which, and how.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        return None
    path, how = stream.choice(paths), stream.choice(("cut", "flipped", "emptied", "gone"))
    try:
        if how == "gone":
            path.unlink()
            return how
        # Not write_bytes: it would make the file anew if the queue has just dropped it.
        with path.open("r+b") as file:
            size = path.stat().st_size
            if how == "flipped":
                file.seek(max(size - 1, 0))
                last = file.read(1)
                file.seek(max(size - 1, 0))
                file.write(bytes([last[0] ^ 1]) if last else b"")
            else:
                file.truncate(0 if how == "emptied" else max(size - 8, 0))
    except FileNotFoundError:
        return None
    return how
