"""How commands show that something goes on, and wide tables of results."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dspark_hf.benchmarks.markers import Table


@contextmanager
def counting(console: Console, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar that fills up.

    Args:
        console: Where.
        what: What is counted.
        total: How many there will be; None if that is not known.

    Yields:
        Callable[[int], None]: To be told how many more are done.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, refresh_per_second=1) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def show_table(shown: Table) -> None:
    """Print a table of results, its first two columns on the left."""
    rich_table = RichTable(title=shown.title, caption=shown.note)
    for i, title in enumerate(shown.header):
        rich_table.add_column(title, justify="left" if i < 2 else "right", no_wrap=i < 2)
    for row in shown.rows:
        rich_table.add_row(*row)
    # Rich takes a file or pipe for 80 columns wide, too few for these tables.
    Console(width=None if sys.stdout.isatty() else 160).print(rich_table)
