"""What is looked at once a minute, and whether it grows."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dspark_hf import GenerationQueue
from soak.clients import DONE, Tally

MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """A process and its queue at one time.

    Attributes:
        minute: Since the soak began.
        rss_bytes: Memory of the process.
        threads: Of the process, of Python and below.
        descriptors: Open files and sockets.
        cpu_s: Seconds that the process was run by all cores.
        steps: That the queue has made.
        done: Requests that came to their result so far.
        rows: That run.
        waiting: Requests that wait, parked ones included.
        slots: Rows whose keys and values the target holds.
        allocated_tokens: Slots times positions that it has room for.
        parked_bytes: Keys and values of parked rows, by tier.
        kept_bytes: All that is kept, by tier: parked rows and prompt beginnings.
        files: In the disk tier's folder.
    """

    minute: float
    rss_bytes: int
    threads: int
    descriptors: int
    cpu_s: float = 0.0
    steps: int = 0
    done: int = 0
    rows: int = 0
    waiting: int = 0
    slots: int = 0
    allocated_tokens: int = 0
    parked_bytes: dict[str, int] | None = None
    kept_bytes: dict[str, int] | None = None
    files: int = 0


def process_sample(minute: float = 0.0) -> Sample:
    """Look at the process alone, once it has given back what nobody holds."""
    gc.collect()
    give_back()
    process = psutil.Process()
    with process.oneshot():
        rss, threads = process.memory_info().rss, process.num_threads()
        return Sample(minute, rss, threads, process.num_fds(), time.process_time())


def give_back() -> None:
    """Let the C library return free memory, where it can: fragments would look like a leak."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def sample(queue: GenerationQueue, folder: Path, tally: Tally, minute: float) -> Sample:
    """Look at the process and the queue.

    Args:
        queue: That is soaked.
        folder: Of its disk tier.
        tally: Of its requests.
        minute: Since the soak began.
    """
    process, metrics = process_sample(minute), queue.metrics()
    places = queue._engine.places
    slots, allocated = target_slots(places)
    tiers = metrics["kv"]["bytes"]
    return Sample(
        minute, process.rss_bytes, process.threads, process.descriptors, process.cpu_s,
        metrics["total"]["steps"], tally.outcomes[DONE],
        metrics["batch"]["rows"], metrics["requests"]["waiting"], slots, allocated,
        parked_bytes(places.keeper.store),
        {tier: tiers[tier] for tier in ("host", "disk")},
        sum(1 for _ in folder.iterdir()),
    )  # fmt: skip


def target_slots(places: Any) -> tuple[int, int]:
    """Return the slots that rows hold, and the tokens that all slots have room for."""
    decoder = places._decoder
    if decoder is None or decoder.target.path != "flat":
        return 0, 0
    cache = decoder.target.cache
    return len(cache.slots), cache.num_slots * cache.num_positions


def parked_bytes(store: Any) -> dict[str, int]:
    """Return the bytes of parked rows by tier."""
    with store._lock:
        pinned = set(store._pinned)
        host = sum(
            tensor.nbytes
            for key in pinned & set(store._held)
            for tensor in store._held[key].values()
        )
        return {"host": host, "disk": sum(store._files[key] for key in pinned & set(store._files))}


def slope_per_hour(samples: Sequence[Sample]) -> float | None:
    """Return by how many bytes an hour the memory grows: least squares over samples.

    Args:
        samples: After the warm-up; None for fewer than three.
    """
    if len(samples) < 3:
        return None
    hours = [sample.minute / 60 for sample in samples]
    return float(np.polyfit(hours, [sample.rss_bytes for sample in samples], 1)[0])
