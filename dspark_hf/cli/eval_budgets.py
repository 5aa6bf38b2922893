"""`dspark-hf eval budgets`: which layers of a model need how much of a sparse policy's budget."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads annotations when it runs
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspark_hf.cli.options import Dtype  # noqa: TC001 - typer reads annotations
from dspark_hf.cli.progress import counting, show_table

if TYPE_CHECKING:
    from dspark_hf.evaluation.budgets import LayerBudgets


def budgets(
    model: Annotated[str, typer.Argument(help="Path or hub id of the model.")],
    out: Annotated[Path, typer.Option(help="File for the factors, as JSON.")],
    data: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text file. Default: Python's reference."),
    ] = None,
    policy: Annotated[str, typer.Option(help="quality or fast.")] = "quality",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens read per key head. Default: the policy's.")
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 8192,
    queries: Annotated[int, typer.Option(min=1, help="Tokens whose attention is measured.")] = 64,
    least: Annotated[str, typer.Option(help="error of the output, or attention missed.")] = "error",
    bos: Annotated[
        str,
        typer.Option(
            help="Windows that begin with BOS: every, none, or auto: every if the tokenizer adds "
            "it by itself."
        ),
    ] = "auto",
    dtype: Dtype = "bfloat16",
) -> None:
    """Share a policy's budget out among layers, where it saves most.

    `dspark-hf eval perplexity --budgets FILE` measures what the factors are worth, best on another
    text than this one.
    """
    from dspark_hf.attention.policy import resolve_policy
    from dspark_hf.cli import session
    from dspark_hf.errors import ConfigError
    from dspark_hf.evaluation.budgets import calibrate_budgets

    chosen = resolve_policy(policy)
    if chosen is None:
        raise ConfigError("--policy must be quality or fast.")
    if tokens is not None:
        chosen = chosen.replace(tokens=tokens)
    wrapped, tokenizer = session.load(model, "none", dtype)
    console = Console(stderr=True)
    with counting(console, "queries", queries) as tell:
        found = calibrate_budgets(
            wrapped, tokenizer, data, chosen,
            context=context, queries=queries, least=least, bos=bos, observer=tell,
        )  # fmt: skip
    _show(found)
    found.save(out)
    console.print(f"wrote {out}", soft_wrap=True)


def _show(found: LayerBudgets) -> None:
    from dspark_hf.benchmarks.markers import Table

    rows = [
        [str(layer), f"{factor:.3f}", str(round(factor * found.tokens))]
        for layer, factor in enumerate(found.factors)
    ]
    note = (
        f"By {found.queries} tokens of this text, with {found.tokens} tokens a head in every layer "
        f"and shared out by least {found.least}: squared error of the output "
        f"{found.error_flat:.4f} and {found.error:.4f}, attention missed {found.missed_flat:.2%} "
        f"and {found.missed:.2%}."
    )
    show_table(Table("Budgets by layer", ["layer", "factor", "tokens a head"], rows, note))
