"""Runs a soak: makes the queue, lets things go wrong in it, looks at it, and ends it."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_hf import GenerationQueue, QueueConfig
from dspark_hf.serving.memory import kv_token_bytes
from queues import assert_nothing_is_left
from soak.asking import Library
from soak.clients import OTHERWISE, Client, Tally
from soak.faults import MOODS, damage_a_file
from soak.samples import Sample, process_sample, sample
from soak.subject import Subject, subject_of
from storms import ScarceMemory, lost_caches

NUM_CLIENTS, FIRST_KNOWN = 3, 16
KV_TOKENS, HOST_TOKENS, DISK_TOKENS = 640, 300, 4000
"""Room for keys and values, in tokens: six rows that are short, and fewer that are not."""
NO_MEMORY, LOST, DAMAGE, MOOD = 0.003, 0.05, 0.1, 0.1
"""Chances: of a forward, of a parked row, and of a tick, to damage a file or change the mood."""
TICK_S = 0.2
LONGEST_BETWEEN_S = 60.0
LEAST_SAMPLES = 20
WARM_UP = 0.1
"""Share of the run after which memory should not grow any more."""
LEAVE_S = 600.0


@dataclass(frozen=True)
class SoakSettings:
    """How long, and what.

    Attributes:
        minutes: Of the queue's life.
        model: Path or hub id of a checkpoint; None for a tiny random one.
        seed: Of everything that is drawn.
        bound_s: Seconds within which every request must have ended.
        faults: How many times as often as usual things go wrong.
    """

    minutes: float = 30.0
    model: str | None = None
    seed: int = 1
    bound_s: float = 120.0
    faults: float = 1.0


@dataclass
class Soak:
    """What a soak came to.

    Attributes:
        settings: How it was run.
        subject: What was soaked.
        tally: What became of requests.
        before: The process before there was a queue.
        samples: While the queue ran, first to last.
        after: The process when the queue had ended.
        left: What it left that it should not have.
        known: Requests whose runs alone were made.
        metrics: Of the queue, at its end.
    """

    settings: SoakSettings
    subject: Subject
    tally: Tally
    before: Sample
    samples: list[Sample] = field(default_factory=list)
    after: Sample | None = None
    left: list[str] = field(default_factory=list)
    known: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def warm(self) -> list[Sample]:
        """Samples after the warm-up."""
        return [one for one in self.samples if one.minute >= WARM_UP * self.settings.minutes]

    @property
    def second_half(self) -> list[Sample]:
        """Samples of the run's second half."""
        return [one for one in self.samples if one.minute >= self.settings.minutes / 2]


def soak(settings: SoakSettings, on_sample: Callable[[Sample], None] = lambda _: None) -> Soak:
    """Run one queue for long and see what is wrong with it.

    Args:
        settings: How long, and what.
        on_sample: Told of each sample.
    """
    subject = subject_of(settings.model)
    library, tally = Library(subject, settings.seed), Tally()
    # What is made once in a process should not count as left behind by the queue.
    library.learn(FIRST_KNOWN)
    found = Soak(settings, subject, tally, process_sample())
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        queue = GenerationQueue(subject.model, subject.tokenizer, queue_settings(subject, folder))
        clients = [
            Client(queue, library, tally, 10 * settings.seed + n, settings.bound_s)
            for n in range(NUM_CLIENTS)
        ]
        try:
            with going_wrong(queue, subject, tally, settings):
                for client in clients:
                    client.start()
                watch(found, queue, folder, on_sample)
        finally:
            end(found, queue, folder, clients)
    found.known = library.num_runs
    found.after = process_sample(found.samples[-1].minute if found.samples else 0.0)
    return found


def queue_settings(subject: Subject, folder: Path) -> QueueConfig:
    """Return settings with little room everywhere, so that rows are parked and files written."""
    token = kv_token_bytes(subject.model)
    return QueueConfig(
        max_rows=6, min_rows=2, max_wait_ms=2.0, target_latency_ms=500.0, patience_s=2.0,
        prefill_tokens=24, kv_budget=KV_TOKENS * token, host_cache=HOST_TOKENS * token,
        disk_cache=DISK_TOKENS * token, disk_folder=str(folder), max_pending=18,
        drafter_retry_s=1.0, drafter_slow_factor=10.0,
    )  # fmt: skip


@contextmanager
def going_wrong(
    queue: GenerationQueue, subject: Subject, tally: Tally, settings: SoakSettings
) -> Iterator[None]:
    """Let memory run out, caches be lost and drafters fail in the queue's thread."""
    engine, note = queue._engine, tally.faults.note
    streams = [random.Random(100 * settings.seed + n) for n in range(3)]  # noqa: S311
    subject.drafter.mislead(engine, streams[0], tally.faults)
    memory = ScarceMemory(
        subject.model, engine, streams[1], NO_MEMORY * settings.faults,
        thread=engine._thread, note=note,
    )  # fmt: skip
    try:
        with lost_caches(streams[2], LOST * settings.faults, note):
            yield
    finally:
        memory.end()
        subject.drafter.mood = MOODS[0]


def watch(
    found: Soak, queue: GenerationQueue, folder: Path, on_sample: Callable[[Sample], None]
) -> None:
    """Damage files and change moods until the time is over; look at the queue now and then."""
    stream, tally = random.Random(-found.settings.seed), found.tally  # noqa: S311
    seconds = 60 * found.settings.minutes
    between = min(seconds / LEAST_SAMPLES, LONGEST_BETWEEN_S)
    begin = time.monotonic()
    while (elapsed := time.monotonic() - begin) < seconds and queue.is_open:
        if elapsed >= len(found.samples) * between:
            found.samples.append(sample(queue, folder, tally, elapsed / 60))
            on_sample(found.samples[-1])
        if stream.random() < DAMAGE * found.settings.faults:
            how = damage_a_file(folder, stream)
            if how is not None:
                tally.faults.note(f"a file of the disk tier: {how}")
        if stream.random() < MOOD * found.settings.faults:
            found.subject.drafter.mood = stream.choice(MOODS)
        time.sleep(min(TICK_S, between / 4))
    if not queue.is_open:
        tally.complain(OTHERWISE, f"the queue ended by itself: {queue._engine.fatal!r}")


def end(found: Soak, queue: GenerationQueue, folder: Path, clients: list[Client]) -> None:
    """Let clients and the queue come to their ends; note what is left."""
    bound_s = found.settings.bound_s
    for client in clients:
        client.stopping.set()
    for client in clients:
        if client.ident is None:
            # Something went wrong before it was started.
            continue
        client.join(2 * bound_s)
        if client.is_alive():
            found.left.append(f"{client.name} does not end")
    found.samples.append(sample(queue, folder, found.tally, found.settings.minutes))
    found.metrics = queue.metrics()
    if not queue.close(timeout=LEAVE_S):
        found.left.append(f"the queue's thread runs {LEAVE_S:.0f} s after close()")
        return
    try:
        assert_nothing_is_left(queue)
    except AssertionError as error:
        found.left.append(f"rows are held: {error}")
    found.left += left_on_disk(queue, folder)


def left_on_disk(queue: GenerationQueue, folder: Path) -> list[str]:
    """Return files that no store knows, and what is above its budget: beginnings may stay."""
    store = queue._engine.places.keeper.store
    known = {store._path(key).name for key in store._files}
    strange = sorted(path.name for path in folder.iterdir() if path.name not in known)
    left = [f"a file nobody knows: {name}" for name in strange]
    left += [f"the file of a parked row: {name}" for name in known if name.startswith("row-")]
    for tier, most in ((store.host, store.host_bytes), (store.disk, store.disk_bytes)):
        if tier.num_bytes > most:
            left.append(f"{tier.num_bytes} bytes kept where {most} are allowed")
    if store.host.num_bytes:
        left.append(f"{store.host.num_bytes} bytes in host memory after the end")
    return left
