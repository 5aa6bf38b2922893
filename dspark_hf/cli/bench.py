"""`dspark-hf bench`: measure generate() beside plain Transformers, and show what was measured."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark_hf.benchmarks.results import DEFAULT_PATH
from dspark_hf.cli.progress import show_table

bench_app = typer.Typer(
    no_args_is_help=True, help="Measure generate() beside plain Transformers, in one process."
)


@bench_app.command()
def generate(
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="prompts, context, batch, recheck (these by default), scheduling, drafter or "
            "never-slower; may be repeated."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    model: Annotated[
        str | None, typer.Option(help="Path or hub id. Default: SmolLM2-135M-Instruct.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Path or hub id of a drafter to measure as well.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed calls per contender and prompt.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = 128,
    limit: Annotated[int | None, typer.Option(help="Prompts per group. Default: all.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads for torch. Default: its own.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Prompt length for the section context; may be repeated."),
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option(help="Batch size for the section scheduling; may be repeated."),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Result file; other entries are kept.")
    ] = DEFAULT_PATH,
) -> None:
    """Time plain and wrapped models on the same weights, and compare their texts."""
    from transformers.utils import logging as transformers_logging

    from dspark_hf.benchmarks.environment import command_line
    from dspark_hf.benchmarks.results import run_key
    from dspark_hf.benchmarks.run import run_benchmark
    from dspark_hf.benchmarks.settings import CONTEXTS, ROWS, BenchSettings
    from dspark_hf.benchmarks.tables import run_table

    transformers_logging.disable_progress_bar()
    console = Console(stderr=True)
    settings = BenchSettings(
        sections=tuple(section) if section else None,
        dtype=dtype,
        model=model,
        drafter=drafter,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        limit=limit,
        threads=threads,
        contexts=tuple(context) if context else CONTEXTS,
        rows=tuple(rows) if rows else ROWS,
    )
    with _progress(console) as progress:
        results = run_benchmark(
            settings,
            output,
            command=command_line(sys.argv[1:]),
            observer=_Bar(progress),
        )
    for name in settings.chosen:
        show_table(run_table(results["runs"][run_key(name, dtype)], results))
    console.print(f"Results are in {output}; `dspark-hf bench table {output}` prints markdown.")


@bench_app.command()
def table(
    results: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Result file of `bench generate`.")
    ],
    update: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Document whose `<!-- bench:NAME -->` places to fill instead.",
        ),
    ] = None,
) -> None:
    """Print a result file as markdown tables, or write them into a document."""
    from dspark_hf.benchmarks.markers import as_markdown, update_markers
    from dspark_hf.benchmarks.results import load_results
    from dspark_hf.benchmarks.settings import SECTIONS
    from dspark_hf.benchmarks.tables import all_tables

    tables = all_tables(load_results(results))
    if update is not None:
        text, names = update_markers(update.read_text(encoding="utf-8"), tables)
        update.write_text(text, encoding="utf-8")
        Console(stderr=True).print(f"{update}: filled {', '.join(names)}.")
        return
    for name, parts in tables.items():
        # A section's name collects what its dtypes show already.
        if name not in SECTIONS:
            typer.echo(f"## {name}\n\n{as_markdown(parts)}")


@bench_app.command()
def plot(
    results: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Result file of `bench generate`.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the PNG files.")],
) -> None:
    """Draw the sections scheduling (over batch sizes) and sparse (over contexts)."""
    from dspark_hf.benchmarks.plots import draw_runs
    from dspark_hf.benchmarks.results import load_results
    from dspark_hf.evaluation.plots import require_matplotlib

    require_matplotlib()
    for path in draw_runs(load_results(results), out):
        Console(stderr=True).print(f"wrote {path}", soft_wrap=True)


class _Bar:
    """Shows each section as a bar of timed calls."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: Any = None

    def start(self, section: str, num_calls: int) -> None:
        self.task = self.progress.add_task(section, total=num_calls, what="")
        self.begun = 0

    def advance(self, what: str) -> None:
        # Told before each call: the calls before this one are done.
        self.progress.update(self.task, completed=self.begun, what=what)
        self.begun += 1


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
        console=console,
        # Redrawing takes CPU time from what is measured.
        refresh_per_second=1,
    )
