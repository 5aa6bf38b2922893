"""`dspark-hf eval`: how well a drafter guesses for a target, as numbers, plots and tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark_hf.cli.eval_budgets import budgets
from dspark_hf.cli.eval_perplexity import perplexity
from dspark_hf.cli.options import (  # noqa: TC001 - typer reads annotations
    DraftedTokens,
    Dtype,
    Limit,
    Target,
    Temperatures,
)
from dspark_hf.cli.progress import counting, show_table

eval_app = typer.Typer(no_args_is_help=True, help="Measure drafters and what they are worth.")
eval_app.command()(perplexity)
eval_app.command()(budgets)


@eval_app.command()
def acceptance(
    model: Target,
    drafter: Annotated[str, typer.Option(help="auto, lookup, or the path or hub id of a drafter.")],
    out: Annotated[Path, typer.Option(help="Folder for acceptance.json and the plots.")],
    against: Annotated[
        list[str] | None,
        typer.Option(help="Another drafter to compare with; may be repeated."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts. Default: the 60 shipped for it.")
    ] = None,
    limit: Limit = None,
    max_new_tokens: DraftedTokens = 128,
    temperature: Temperatures = None,
    dtype: Dtype = "bfloat16",
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw plots.")] = True,
) -> None:
    """Decode held-out prompts with whole blocks and say what was accepted, where, and why.

    One pass gives acceptance by position, calibration of the confidences, and what shorter blocks
    and confidence thresholds would have verified and gained.
    """
    from dspark_hf.benchmarks.environment import command_line
    from dspark_hf.cli import session
    from dspark_hf.evaluation.acceptance import AcceptanceSettings, evaluate_acceptance
    from dspark_hf.evaluation.plots import draw_plots, require_matplotlib
    from dspark_hf.evaluation.prompts import evaluation_prompts, read_prompts
    from dspark_hf.evaluation.tables import all_tables

    if plots:
        require_matplotlib()
    settings = AcceptanceSettings(
        drafter=drafter,
        against=tuple(against or ()),
        max_new_tokens=max_new_tokens,
        temperatures=tuple(temperature or (0.0, 1.0)),
    )
    chosen = evaluation_prompts(limit) if prompts is None else read_prompts(prompts, limit)
    wrapped, tokenizer = session.load(model, drafter, dtype)
    total = len(chosen) * len(settings.temperatures) * (1 + len(settings.against))
    console = Console(stderr=True)
    with counting(console, "prompts", total) as tell:
        results = evaluate_acceptance(
            wrapped,
            tokenizer,
            chosen,
            settings,
            out / "acceptance.json",
            name=Path(model).name,
            command=command_line(sys.argv[1:]),
            observer=tell,
        )
    for name in ("acceptance", "against"):
        for shown in all_tables(results).get(name, []):
            show_table(shown)
    if plots:
        for path in draw_plots(results, out):
            console.print(f"wrote {path}", soft_wrap=True)
    console.print(f"Results are in {out / 'acceptance.json'}.", soft_wrap=True)


@eval_app.command()
def table(
    results: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="Result file of `eval acceptance` or `eval perplexity`.",
        ),
    ],
    update: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Document whose `<!-- eval:NAME -->` places to fill instead.",
        ),
    ] = None,
) -> None:
    """Print a result file as markdown tables, or write them into a document."""
    from dspark_hf.benchmarks.markers import as_markdown, update_markers
    from dspark_hf.evaluation.drift_tables import read_tables

    tables = read_tables(results)
    if update is not None:
        text, names = update_markers(update.read_text(encoding="utf-8"), tables, kind="eval")
        update.write_text(text, encoding="utf-8")
        Console(stderr=True).print(f"{update}: filled {', '.join(names)}.")
        return
    for name, parts in tables.items():
        typer.echo(f"## {name}\n\n{as_markdown(parts)}")
