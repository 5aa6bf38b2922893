"""`dspark-hf train predictor`: a page predictor for sparse attention, from a model's attention."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dspark_hf.cli.options import Dtype  # noqa: TC001 - typer reads annotations
from dspark_hf.cli.progress import counting, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.training.predictor import LayerReport, PredictorSettings

MAX_ROWS = 20_000
"""Rows of a dataset that are read at most: windows are spread over what is read."""


def predictor(
    target: Annotated[str, typer.Option(help="Model to train for: path or hub id.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="File to write, safetensors.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Text file, JSONL of texts, dataset folder or dataset id, with :SPLIT. Default: "
            "Python's reference."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text to train on.")] = 6,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 4096,
    queries: Annotated[int, typer.Option(help="Tokens looked at per window.")] = 64,
    rank: Annotated[int, typer.Option(help="Of the corrections.")] = 16,
    steps: Annotated[int, typer.Option(help="Per layer, at most.")] = 300,
    learning_rate: Annotated[float, typer.Option(help="Of Adam.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0,
    dtype: Dtype = "bfloat16",
) -> None:
    """Train a page predictor for sparse attention on what the model itself attends to.

    A part of the text is held out: layers for which the trained predictor chooses no better pages
    of it keep the untrained choice, and the figures shown are measured on another part.
    """
    from dspark_hf.cli import session
    from dspark_hf.training.predictor import PredictorSettings, train_predictor

    settings = PredictorSettings(windows, context, queries, rank, steps, learning_rate, seed)
    texts = _texts(data)
    model, tokenizer = session.load(target, "none", dtype)
    trained, layers = train_predictor(
        model, tokenizer, texts, settings, bar=partial(counting, Console(stderr=True))
    )
    path = trained.save(out)
    _show(layers, settings)
    Console(highlight=False).print(
        f"The predictor is in {path} ({path.stat().st_size / 2**20:.1f} MiB); "
        f"{sum(each.steps > 0 for each in layers)} of {len(layers)} layers choose better pages.",
        soft_wrap=True,
    )


def _texts(data: str | None) -> Any:
    """Return what `--data` names, as `evaluation.corpus.read_documents` takes it."""
    from dspark_hf.training.sources import JSON_SUFFIXES, read_records

    if data is None:
        return None
    path = Path(data)
    if path.is_file() and path.suffix not in JSON_SUFFIXES:
        return path
    return [record for _, record in islice(read_records(data), MAX_ROWS)]


def _show(layers: Sequence[LayerReport], settings: PredictorSettings) -> None:
    from dspark_hf.benchmarks.markers import Table

    def row(name: str, shown: Sequence[LayerReport], steps: str) -> list[str]:
        captured = [
            fmean(each.bound.captured for each in shown),
            fmean(each.learned.captured for each in shown),
            fmean(each.best for each in shown),
        ]
        errors = [
            fmean(each.bound.error for each in shown),
            fmean(each.learned.error for each in shown),
        ]
        shares = [f"{share:.2%}" for share in captured]
        return [name, *shares, *(f"{error:+.2f}" for error in errors), steps]

    rows = [row(str(each.layer), [each], str(each.steps or "-")) for each in layers]
    header = ["layer", "bound", "learned", "best", "bound's error", "learned's error", "steps"]
    note = (
        f"Attention captured by {settings.budget} pages per key head in the second half of "
        f"{settings.held_out} held-out windows of {settings.context} tokens, and by how many nats "
        "the mass of pages that may be left is misjudged."
    )
    show_table(
        Table("Page predictor, held-out text", header, [*rows, row("mean", layers, "")], note)
    )
