"""The live view of a queue: its metrics as a picture, drawn a few times a second."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import RenderableType

MOST_ROWS = 24
"""Rows shown; the others are counted below them."""
STATUS_STYLES = {"running": "green", "starting": "yellow", "parked": "dim"}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PERCENTILES = ("p50", "p95", "p99")


@contextmanager
def watching(
    metrics: Callable[[], Mapping[str, Any]],
    console: Console | None,
    refresh_per_s: float,
    draw: Callable[[Mapping[str, Any]], RenderableType] | None = None,
) -> Iterator[None]:
    """Draw metrics inside the context; nothing where the console is no terminal.

    Args:
        metrics: Returns them.
        console: Where; standard error when None.
        refresh_per_s: Pictures per second.
        draw: Makes a picture of them; None for one of a single queue.
    """
    picture = draw or render
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with Live(
        console=console,
        get_renderable=lambda: picture(metrics()),
        refresh_per_second=refresh_per_s,
        transient=True,
    ):
        yield


def render(metrics: Mapping[str, Any]) -> RenderableType:
    """Return a picture of a queue.

    Args:
        metrics: Of `GenerationQueue.metrics()`.

    Returns:
        RenderableType: Lines on batch, queue, speed and memory; delays; one line per row.
    """
    return Group(_summary(metrics), _delays(metrics["delay_s"]), _rows(metrics["rows"]))


def _summary(metrics: Mapping[str, Any]) -> Table:
    requests, batch, kv = metrics["requests"], metrics["batch"], metrics["kv"]
    speed, speculation = metrics["speed"], metrics["speculation"]
    bandwidth, prefix = metrics["bandwidth"], metrics["prefix"]
    used, budget = kv["bytes"], kv["budget_bytes"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "batch",
        f"{batch['rows']} rows of {batch['limit']} (at most {batch['max_rows']}), "
        f"utilisation {percent_text(batch['utilisation'])}",
    )
    table.add_row(
        "queue",
        f"{requests['waiting']} waiting, {requests['parked']} of them parked, "
        f"oldest {seconds_text(requests['oldest_s'])}; {metrics['preemptions']} preemptions",
    )
    table.add_row("ended", ", ".join(f"{n} {name}" for name, n in metrics["ended"].items() if n))
    table.add_row(
        "tokens/s",
        f"{number_text(speed['new_tokens_per_s'], 1)} new, "
        f"{number_text(speed['prompt_tokens_per_s'], 1)} of prompts",
    )
    table.add_row(
        "drafts",
        f"accepted length {number_text(speculation['accepted_length'])}, "
        f"hit rate {percent_text(speculation['hit_rate'])}, "
        f"{number_text(speculation['verified_per_row'])} verified per row",
    )
    table.add_row(
        "memory",
        f"{kv['tokens']} tokens, budget {percent_text(kv['use'])} used; "
        + ", ".join(
            f"{tier} {size_text(used[tier])} of {size_text(budget[tier])}" for tier in used
        ),
    )
    table.add_row("prefixes", f"{percent_text(prefix['hit_rate'])} of prompt tokens found")
    table.add_row(
        "bandwidth",
        f"{size_text(bandwidth['bytes_per_s'])}/s read"
        + (
            ""
            if bandwidth["machine_bytes_per_s"] is None
            else f", {percent_text(bandwidth['share'])} of what copying moves"
        ),
    )
    table.add_row("drafters", _breakers(metrics["breakers"]))
    return table


def _breakers(states: Mapping[str, str]) -> Text:
    """Return each drafter; one that is switched off in red, with its breaker's state."""
    text = Text()
    for name, state in states.items():
        is_closed = state == "closed"
        shown = name if is_closed else f"{name} ({state})"
        text.append(shown if not text else f", {shown}", None if is_closed else "red")
    return text or Text("none")


def _delays(delays: Mapping[str, Mapping[str, float | None]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("delay")
    for name in PERCENTILES:
        table.add_column(name, justify="right")
    names = {"queue": "in the queue", "first_token": "first token", "per_token": "per token"}
    for key, name in names.items():
        table.add_row(name, *(seconds_text(delays[key][p]) for p in PERCENTILES))
    return table


def _rows(rows: list[Mapping[str, Any]]) -> Table:
    more = len(rows) - MOST_ROWS
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, caption=f"and {more} more" if more > 0 else None
    )
    table.add_column("row", justify="right")
    table.add_column("status")
    for name in ("priority", "prompt", "tokens", "accepted length", "age"):
        table.add_column(name, justify="right")
    for row in rows[:MOST_ROWS]:
        table.add_row(
            str(row["row"]),
            Text(row["status"], STATUS_STYLES.get(row["status"], "")),
            str(row["priority"]),
            str(row["prompt_tokens"]),
            str(row["new_tokens"]),
            f"{row['accepted_length']:.2f}",
            seconds_text(row["age_s"]),
        )
    return table


def number_text(value: float | None, digits: int = 2) -> str:
    """Return a number, or a dash for one that is not known; so do those below."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent_text(value: float | None) -> str:
    """Return a share in per cent."""
    return "-" if value is None else f"{value:.0%}"


def seconds_text(value: float | None) -> str:
    """Return a time in milliseconds or seconds."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def size_text(value: float | None) -> str:
    """Return a number of bytes in the unit that fits it."""
    if value is None:
        return "-"
    for unit in UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {UNITS[-1]}"
