"""What a soak says: what was wrong, a table, a record, and the sentence that documents quote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark_hf.benchmarks import environment
from dspark_hf.files import written_whole
from soak.run import Soak
from soak.samples import MIB, Sample, slope_per_hour

MOST_GROWTH_BYTES = 24 * MIB
"""Growth after the warm-up that counts as a leak: above what an allocator's fragments come to."""
EVERY_FAULT_MINUTES = 10.0
"""A soak of this length must have met every kind of fault."""
FAULTS = (
    "no memory in a forward", "a cache lost in parking", "a drafter raised", "a drafter was slow",
    "a drafter answered nonsense", "a drafter did not take features", "a file of the disk tier",
    "a request fails",
)  # fmt: skip
MOST_LINES = 16


def growth_bytes(soak: Soak) -> int | None:
    """Return how much memory grew from the warm-up's end to the last sample; None if too short."""
    warm = soak.warm
    return warm[-1].rss_bytes - warm[0].rss_bytes if len(warm) > 1 else None


def problems(soak: Soak) -> list[str]:
    """Return all that is wrong; nothing for a soak that went well."""
    found = [*soak.tally.told, *soak.left]
    untold = sum(soak.tally.wrong.as_dict().values()) - len(soak.tally.told)
    if untold:
        found.append(f"{untold} more of these: {soak.tally.wrong.as_dict()}")
    if not soak.samples or not soak.samples[-1].done:
        found.append("no request was done")
    found += _not_back(soak)
    growth = growth_bytes(soak)
    if growth is not None and growth > MOST_GROWTH_BYTES:
        found.append(f"memory grew by {growth / MIB:.1f} MiB after the warm-up")
    if soak.settings.minutes >= EVERY_FAULT_MINUTES:
        met = soak.tally.faults.as_dict()
        found += [
            f"never happened: {fault}"
            for fault in FAULTS
            if not any(name.startswith(fault) for name in met)
        ]
    return found


def _not_back(soak: Soak) -> list[str]:
    """Return what is more at the end than it was before the queue."""
    if soak.after is None:
        return ["the soak did not come to its end"]
    return [
        f"{name}: {getattr(soak.before, name)} before the queue, {getattr(soak.after, name)} after"
        for name in ("threads", "descriptors")
        if getattr(soak.after, name) > getattr(soak.before, name)
    ]


def record(soak: Soak, command: str) -> dict[str, Any]:
    """Return a soak as JSON.

    Args:
        soak: That has ended.
        command: How it was started.
    """
    growth, warm = growth_bytes(soak), soak.warm
    return {
        "machine": environment.machine(),
        "model": environment.describe_model(soak.subject.plain, soak.subject.name),
        **environment.conditions(command),
        "load_average": environment.load_average(),
        "settings": {**asdict(soak.settings), "model": soak.subject.name},
        "drafter": soak.subject.drafter.name,
        "requests": soak.tally.outcomes.as_dict(),
        "distinct": soak.known,
        "wrong": soak.tally.wrong.as_dict(),
        "longest_s": soak.tally.longest_s,
        "late": soak.tally.late,
        "faults": soak.tally.faults.as_dict(),
        "memory": {
            "warm_bytes": warm[0].rss_bytes if warm else None,
            "end_bytes": warm[-1].rss_bytes if warm else None,
            "growth_bytes": growth,
            "slope_bytes_per_hour": slope_per_hour(warm),
            "second_half_bytes_per_hour": slope_per_hour(soak.second_half),
        },
        "before": asdict(soak.before),
        "after": None if soak.after is None else asdict(soak.after),
        "queue": {
            name: soak.metrics.get(name)
            for name in ("ended", "alone", "preemptions", "prefix", "total", "breakers")
        },
        "damaged_files_found": soak.metrics.get("kv", {}).get("damaged_files"),
        "problems": problems(soak),
        "samples": [asdict(sample) for sample in soak.samples],
    }  # fmt: skip


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a record: samples, counts, and what was wrong."""
    console.print(_table(result["samples"]))
    for name in ("requests", "faults", "queue"):
        parts = [f"{key}: {value}" for key, value in result[name].items()]
        console.print(f"[bold]{name}[/bold]  " + "; ".join(parts), highlight=False)
    console.print(sentence(result), highlight=False)
    for late in result["late"]:
        console.print("late ", late, markup=False, highlight=False)
    for problem in result["problems"]:
        console.print("wrong ", problem, style="red", markup=False, highlight=False)


def _table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """Return some of the samples, the first and the last among them."""
    step = -(-len(samples) // MOST_LINES) or 1
    chosen = list(samples[::step])
    if samples and chosen[-1] is not samples[-1]:
        chosen.append(samples[-1])
    table = Table(
        title="The queue over time; KiB in memory + on disk", box=None, padding=(0, 1, 0, 0)
    )
    names = ("min", "MiB", "CPU s", "done", "rows", "wait", "slots", "parked", "kept", "files",
             "thr", "fds")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for one in chosen:
        tiers = [
            "+".join(f"{one[key][tier] / 1024:.0f}" for tier in ("host", "disk"))
            for key in ("parked_bytes", "kept_bytes")
        ]
        table.add_row(
            f"{one['minute']:.1f}", f"{one['rss_bytes'] / MIB:.0f}", f"{one['cpu_s']:.0f}",
            *(str(one[name]) for name in ("done", "rows", "waiting", "slots")), *tiers,
            *(str(one[name]) for name in ("files", "threads", "descriptors")),
        )  # fmt: skip
    return table


def line(sample: Sample) -> str:
    """Return a sample as one line, for whoever waits."""
    return (
        f"{sample.minute:6.1f} min  {sample.rss_bytes / MIB:7.1f} MiB  {sample.done} done, "
        f"{sample.rows} rows, {sample.waiting} waiting, {sample.files} files"
    )


def sentence(result: Mapping[str, Any]) -> str:
    """Return what documents quote of a record."""
    memory, requests = result["memory"], result["requests"]
    slopes = [memory["slope_bytes_per_hour"], memory["second_half_bytes_per_hour"]]
    grown = "memory was not watched for long enough"
    if None not in slopes:
        slope, late = (f"{slope / MIB:+.1f}" for slope in slopes)
        grown = (
            f"memory {memory['warm_bytes'] / MIB:.0f} MiB after the warm-up and "
            f"{memory['end_bytes'] / MIB:.0f} MiB at the end, by least squares {slope} MiB per "
            f"hour and {late} in the second half"
        )
    faults = sum(result["faults"].values())
    wrong = sum(result["wrong"].values())
    return (
        f"{result['settings']['minutes']:g} minutes of {result['model']['name']}: "
        f"{requests.get('done', 0)} requests done, {requests.get('cancelled', 0)} cancelled, "
        f"{requests.get('expired', 0)} expired, {requests.get('failed as injected', 0)} failed as "
        f"injected, the longest took {result['longest_s']:.0f} s; {faults} faults, "
        f"{result['queue']['preemptions']} preemptions; {wrong} wrong; {grown}."
    )
