"""Made-up metrics of queues, replicas and routers, and a reader of their text for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "row": number, "status": "running", "priority": 0, "prompt_tokens": 31, "new_tokens": 12,
        "accepted_length": 1.75, "age_s": 2.5, **changes,
    }  # fmt: skip


def metrics(**changes: Any) -> dict[str, Any]:
    """Return metrics of a queue at work."""
    return {
        "requests": {"waiting": 5, "parked": 2, "running": 3, "oldest_s": 0.25},
        "ended": {"done": 40, "failed": 1, "expired": 0, "cancelled": 2, "refused": 0},
        "alone": 1,
        "rows": [row(7), row(8, status="starting", new_tokens=0, accepted_length=0.0)],
        "batch": {"rows": 2, "max_rows": 16, "limit": 12, "utilisation": 0.625},
        "delay_s": {
            "queue": {"p50": 0.004, "p95": 0.5, "p99": 1.25},
            "first_token": {"p50": 0.1, "p95": 0.9, "p99": 3.0},
            "per_token": {"p50": None, "p95": None, "p99": None},
        },
        "speed": {"new_tokens_per_s": 81.26, "prompt_tokens_per_s": None},
        "speculation": {"accepted_length": 1.9, "hit_rate": 0.4, "verified_per_row": 2.25},
        "bandwidth": {
            "bytes_per_s": 2.0 * 2**30, "weight_bytes": 270_000_000,
            "machine_bytes_per_s": 8.0 * 2**30, "share": 0.25,
        },
        "kv": {
            "tokens": 4096,
            "bytes": {"device": 3 * 2**20, "host": 1536, "disk": 0},
            "budget_bytes": {"device": 2**30, "host": 2**21, "disk": 0},
            "use": 0.75, "damaged_files": 0,
        },
        "prefix": {"asked": 100, "found": 64, "hit_rate": 0.64},
        "preemptions": 3,
        "breakers": {"block": "closed", "lookup": "open"},
        "total": {
            "steps": 9, "seconds": 1.5, "draft_s": 0.25, "verify_s": 1.0, "new_tokens": 120,
            "prompt_tokens": 300, "rounds": 80, "drafted": 60, "verified": 50, "accepted": 20,
        },
        **changes,
    }  # fmt: skip


def of_replicas(**changes: Any) -> dict[str, Any]:
    """Return metrics of three replicas: one at work, one that does not answer, one that is dead."""
    state = {"pid": 7, "num_requests": 4, "restarts": 0}
    return {
        "requests": 9, "moves": 2,
        "ended": {"done": 30, "failed": 1, "expired": 0, "cancelled": 3, "refused": 5},
        "replicas": [
            {**state, "place": 0, "state": "ready", "queue": metrics()},
            {**state, "place": 1, "state": "loading", "restarts": 2, "queue": None},
            {**state, "place": 2, "state": "dead", "pid": None, "num_requests": 0, "queue": None},
        ],
        "alone": 2, "preemptions": 8, "prefix": {"asked": 500, "found": 128},
        "kv": {"damaged_files": 1},
        "total": {name: 10 * count for name, count in metrics()["total"].items()},
        **changes,
    }  # fmt: skip


def of_router(**changes: Any) -> dict[str, Any]:
    """Return metrics of a router over one queue and over replicas."""
    return {
        "decisions": {"flash": {"class": 7, "default": 2}, "pro": {"load": 1}},
        "left": ["flash"],
        "breakers": {"flash": "closed", "pro": "open"},
        "open": {"flash": True, "pro": False},
        "expected_delay_s": {"flash": 2.5, "pro": float("inf")},
        "groups": {"flash": metrics(), "pro": of_replicas()},
        **changes,
    }


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Read an exposition: values by name and the labels' values, in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
