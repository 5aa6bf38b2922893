"""The live view of replicas and of a router's groups: a line each, and one of all together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dspark_hf.serving.watch import number_text, percent_text, seconds_text, size_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

STATE_STYLES = {"ready": "green", "open": "green", "loading": "yellow", "dead": "red",
                "closed": "red"}  # fmt: skip
COLUMNS = ("requests", "rows", "waiting", "tokens/s", "accepted", "hits", "KV", "p95/token")
"""Of a queue; accepted is the length, hits the rate, the last the time per token."""


@dataclass(frozen=True)
class Line:
    """What a queue does, for a line of a table; None where it is not known.

    Attributes:
        requests: That are there.
        rows: That run.
        waiting: Requests that wait.
        tokens_per_s: New tokens per second of steps.
        accepted_length: Tokens per round.
        hit_rate: Accepted / drafted.
        kv_bytes: Keys and values on the device.
        token_s: p95 of the time per token.
    """

    requests: int | None = None
    rows: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    accepted_length: float | None = None
    hit_rate: float | None = None
    kv_bytes: int | None = None
    token_s: float | None = None

    def cells(self) -> list[str]:
        """Return the texts of COLUMNS."""
        return [
            number_text(self.requests, 0),
            number_text(self.rows, 0),
            number_text(self.waiting, 0),
            number_text(self.tokens_per_s, 1),
            number_text(self.accepted_length),
            percent_text(self.hit_rate),
            size_text(self.kv_bytes),
            seconds_text(self.token_s),
        ]


def render_replicas(metrics: Mapping[str, Any]) -> RenderableType:
    """Return a picture of replicas.

    Args:
        metrics: Of `ReplicaQueue.metrics()`.

    Returns:
        RenderableType: A line per replica and one of all, and how requests ended.
    """
    table = _table("replica")
    table.add_column("restarts", justify="right")
    for replica in metrics["replicas"]:
        name, state = str(replica["place"]), replica["state"]
        table.add_row(name, _state(state), *_of_replica(replica).cells(), str(replica["restarts"]))
    restarts = sum(replica["restarts"] for replica in metrics["replicas"])
    table.add_row("all", _ready(metrics), *_of_all(metrics).cells(), str(restarts), style="bold")
    return Group(table, Text(f"ended  {_ended(metrics)}; {metrics['moves']} moves"))


def render_groups(metrics: Mapping[str, Any]) -> RenderableType:
    """Return a picture of a router.

    Args:
        metrics: Of `Router.metrics()`.

    Returns:
        RenderableType: A line per group, with its replicas below, and how requests ended.
    """
    table = _table("group")
    for name in ("delay", "taken"):
        table.add_column(name, justify="right")
    ended = []
    for name, group in metrics["groups"].items():
        taken = sum(metrics["decisions"].get(name, {}).values())
        delay = metrics["expected_delay_s"][name]
        line = _of_group(group)
        table.add_row(
            name, _group_state(metrics, name), *line.cells(), seconds_text(delay), str(taken)
        )
        for replica in group.get("replicas", ()):
            place, state = f"{name}/{replica['place']}", replica["state"]
            table.add_row(place, _state(state), *_of_replica(replica).cells(), style="dim")
        if "ended" in group:
            ended.append(f"{name}: {_ended(group)}")
    return Group(table, Text("ended  " + "; ".join(ended)))


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first)
    table.add_column("state")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _of_queue(metrics: Mapping[str, Any]) -> Line:
    requests, speculation = metrics["requests"], metrics["speculation"]
    return Line(
        requests["waiting"] + requests["running"],
        metrics["batch"]["rows"],
        requests["waiting"],
        metrics["speed"]["new_tokens_per_s"],
        speculation["accepted_length"],
        speculation["hit_rate"],
        metrics["kv"]["bytes"]["device"],
        metrics["delay_s"]["per_token"]["p95"],
    )


def _of_replica(replica: Mapping[str, Any]) -> Line:
    """Return a replica's line; what its queue does is not known where it did not answer."""
    queue = replica["queue"]
    return Line(replica["num_requests"]) if queue is None else _of_queue(queue)


def _of_all(metrics: Mapping[str, Any]) -> Line:
    """Return the line of replicas together: what adds up, as far as they answered."""
    lines = [_of_replica(replica) for replica in metrics["replicas"]]
    speeds = [line.tokens_per_s for line in lines]
    return Line(
        metrics["requests"],
        sum(line.rows or 0 for line in lines),
        sum(line.waiting or 0 for line in lines),
        None if speeds.count(None) == len(speeds) else sum(speed or 0.0 for speed in speeds),
        kv_bytes=sum(line.kv_bytes or 0 for line in lines),
    )


def _of_group(metrics: Mapping[str, Any]) -> Line:
    """Return a group's line; of a queue of another kind nothing is known."""
    if "replicas" in metrics:
        return _of_all(metrics)
    return _of_queue(metrics) if "batch" in metrics else Line()


def _state(state: str, more: Sequence[str] = ()) -> Text:
    text = Text(state, STATE_STYLES.get(state, ""))
    for word in more:
        text.append(f", {word}", "red")
    return text


def _ready(metrics: Mapping[str, Any]) -> str:
    replicas = metrics["replicas"]
    num_ready = sum(replica["state"] == "ready" for replica in replicas)
    return f"{num_ready} of {len(replicas)} ready"


def _group_state(metrics: Mapping[str, Any], name: str) -> Text:
    """Return whether a group takes requests, and why it may not get them."""
    more = ["left"] if name in metrics["left"] else []
    if metrics["breakers"][name] != "closed":
        more.append(f"breaker {metrics['breakers'][name]}")
    return _state("open" if metrics["open"][name] else "closed", more)


def _ended(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} {name}" for name, n in metrics["ended"].items() if n) or "none"
