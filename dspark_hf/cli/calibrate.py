"""`dspark-hf calibrate`: a scaling of a drafter's confidences, kept beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspark_hf.cli.options import (  # noqa: TC001 - typer reads annotations
    DraftedTokens,
    Dtype,
    Limit,
    Target,
    Temperatures,
)
from dspark_hf.cli.progress import counting
from dspark_hf.cli.render import plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from dspark_hf.evaluation import Calibration


def calibrate(
    model: Target,
    drafter: Annotated[str, typer.Option(help="Folder or hub id of a block drafter.")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts. Default: the 120 shipped for it.")
    ] = None,
    limit: Limit = None,
    max_new_tokens: DraftedTokens = 128,
    temperature: Temperatures = None,
    dtype: Dtype = "bfloat16",
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: calibration.json in the drafter's folder."),
    ] = None,
) -> None:
    """Fit a drafter's confidences to what the target accepts, by sequential temperature scaling."""
    from dspark_hf.cli import session
    from dspark_hf.drafting.checkpoints.source import CALIBRATION
    from dspark_hf.errors import ConfigError
    from dspark_hf.evaluation import calibrate_drafter
    from dspark_hf.evaluation.calibrate import TEMPERATURES
    from dspark_hf.evaluation.prompts import calibration_prompts, read_prompts
    from dspark_hf.training.finish import write_card

    console = Console(highlight=False)
    if out is None and not Path(drafter).is_dir():
        raise ConfigError(
            f"--out must name a file where --drafter is no local folder; got drafter {drafter!r}."
        )
    path = Path(drafter) / CALIBRATION if out is None else out
    path.parent.mkdir(parents=True, exist_ok=True)
    chosen = calibration_prompts(limit) if prompts is None else read_prompts(prompts, limit)
    wrapped, tokenizer = session.load(model, drafter, dtype)
    temperatures = tuple(temperature or TEMPERATURES)
    with counting(Console(stderr=True), "prompts", len(chosen) * len(temperatures)) as tell:
        found = calibrate_drafter(
            wrapped,
            tokenizer,
            chosen,
            max_new_tokens=max_new_tokens,
            temperatures=temperatures,
            observer=tell,
        )
    path.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
    console.print(calibration_table(found))
    console.print(f"Written to {path}; drafters loaded from its folder use it.", soft_wrap=True)
    if path.name == CALIBRATION and write_card(path.parent):
        console.print("Its model card tells of it.")


def calibration_table(found: Calibration) -> Table:
    """Return a line per way of decoding and draft position."""
    table = plain_table(
        "decoding", "position", "temperature", "shift", "error before", "error after", "AUC"
    )
    table.caption = "errors of prompts that were not fitted on"
    modes = {"greedy": found.greedy, "sampled": found.sampled}
    for name, mode in modes.items():
        columns = zip(
            mode.scaling.temperatures, mode.scaling.shifts, mode.ece_before, mode.ece_after,
            mode.auc, strict=True,
        )  # fmt: skip
        for place, (temperature, shift, before, after, auc) in enumerate(columns, start=1):
            table.add_row(
                name, str(place), f"{temperature:.2f}", f"{shift:+.2f}", f"{before:.2%}",
                f"{after:.2%}", "-" if auc is None else f"{auc:.3f}",
            )  # fmt: skip
    return table
