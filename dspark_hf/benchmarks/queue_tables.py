"""Tables of the section "queue"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks.drafter_tables import number, percentiles, times
from dspark_hf.benchmarks.markers import Table

if TYPE_CHECKING:
    from collections.abc import Mapping


def queue_tables(run: Mapping[str, Any], note: str) -> dict[str, Table]:
    """Return the section's tables by name.

    Args:
        run: An entry of the result file.
        note: Conditions of the measurement.
    """
    extra, dtype = run["extra"], run["dtype"]
    overhead = extra["overhead"]
    share = (
        f"One request at a time through the queue takes {overhead['ratio']['p50']:.3f} times what "
        f"generate() takes ({percentiles(overhead['ratio'], 3)}, {overhead['calls']} calls each)."
    )
    rows = {
        "queue": (
            ["16 requests", "decoded", "tokens", "tokens/s", "speed", "20-80 %", "same text"],
            [_way(entry) for entry in extra["throughput"]],
            f"{share} {note}",
        ),
        "queue-order": (
            ["order", "mean completion, s", "of the short ones, s", "longest, s", "patience, s"],
            [
                [
                    e["order"], number(e["mean_s"], 2), number(e["short_mean_s"], 2),
                    number(e["longest_s"], 2), number(e["patience_s"], 0),
                ]
                for e in extra["order"]
            ],
            note,
        ),
        "queue-first-token": (
            ["prompt tokens a step", "requests", "median, s", "p95, s"],
            [
                [
                    "all" if e["prefill_tokens"] is None else str(e["prefill_tokens"]),
                    str(e["requests"]), number(e["p50_s"], 2), number(e["p95_s"], 2),
                ]
                for e in extra["first_token"]
            ],
            note,
        ),
        "queue-beginnings": (
            ["beginning shared", "prompt tokens", "of these computed", "seconds", "kept, MB"],
            [
                [
                    "yes" if e["shared"] else "no", f"{e['prompt_tokens']:,}",
                    f"{e['computed_tokens']:,}", number(e["seconds"], 1),
                    number(e["kept_bytes"] / 1e6, 0),
                ]
                for e in extra["beginnings"]
            ],
            note,
        ),
    }  # fmt: skip
    return {
        name: Table(f"{name}, {dtype}", header, cells, text)
        for name, (header, cells, text) in rows.items()
    }


def _way(entry: Mapping[str, Any]) -> list[str]:
    if "excluded" in entry:
        return [entry["mix"], entry["way"], "-", "-", "-", "-", entry["excluded"]]
    return [
        entry["mix"],
        entry["way"],
        str(entry["tokens"]),
        number(entry["tokens_per_s"]["p50"], 1),
        times(entry["ratio"]),
        percentiles(entry["ratio"], 2),
        f"{entry['same_text']}/{entry['requests']}",
    ]
