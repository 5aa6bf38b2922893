"""Made-up timings and result files, for the tests of the benchmark and its tables."""

from __future__ import annotations

from typing import Any

from dspark_hf.benchmarks import results
from dspark_hf.benchmarks.stats import Sample, summarise

COUNTS = {
    "path": "flat", "rounds": 9, "drafted": 40, "verified": 30, "accepted": 10,
    "rechecks": 2, "flips": 1,
}  # fmt: skip
"""What speculation did in a made-up call."""
MACHINE = {"cpu": "Toy CPU", "cores": 2}


def sample(contender: str, repeat: int = 0, wall_s: float = 1.0, **changes: Any) -> Sample:
    """Make up a call of 20 tokens in `wall_s` seconds and twice the CPU time."""
    values: dict[str, Any] = {
        "item": "chat-01", "group": "chat", "place": 0, "cpu_s": 2 * wall_s, "prompt_tokens": 3,
        "new_tokens": 20,
    }  # fmt: skip
    return Sample(contender=contender, repeat=repeat, wall_s=wall_s, **{**values, **changes})


def run_of(samples: list[Sample], section: str = "prompts", **changes: Any) -> dict[str, Any]:
    """Make up an entry of a result file from calls."""
    return {
        "section": section, "dtype": "bfloat16", "command": "dspark-hf bench generate",
        "date": "2031-05-06 07:08:09 +0000", "threads": 2, "load_average": [0.1, None],
        "versions": {"torch": "2.13", "transformers": "5.24"}, "settings": {"repeats": 3},
        "excluded": {}, "extra": {}, "summary": summarise(samples),
        "rows": [s.as_row() for s in samples], **changes,
    }  # fmt: skip


def file_of(**runs: dict[str, Any]) -> dict[str, Any]:
    """Make up a result file; keys have underscores for dashes."""
    held = results.new_results(MACHINE, {"name": "toy", "fingerprint": "aa"})
    return {**held, "runs": {key.replace("_", "-"): run for key, run in runs.items()}}


THREE_CALLS = [
    sample("plain", 0, 1.0), sample("dspark-lookup", 0, 0.5, speculation=COUNTS),
    sample("plain", 1, 4.0), sample("dspark-lookup", 1, 1.0, speculation=COUNTS),
    sample("plain", 2, 2.0), sample("dspark-lookup", 2, 2.0, speculation=COUNTS),
]  # fmt: skip
"""Ratios of 2, 4 and 1, in this order."""
