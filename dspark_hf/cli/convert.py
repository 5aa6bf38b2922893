"""`dspark-hf convert`: a block drafter's checkpoint in another published layout."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

    from dspark_hf.drafting.checkpoints.base import BlockCheckpoint


def convert(
    source: Annotated[str, typer.Argument(help="Folder or hub id of a block drafter.")],
    dest: Annotated[Path, typer.Argument(help="New or empty folder to write.")],
    to: Annotated[str, typer.Option(help="Layout to write: deepspec or speculators.")],
    target: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of its target, to copy embedding and head from."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of the drafter's hub repository.")] = None,
) -> None:
    """Convert a block drafter between the layouts of DeepSpec and speculators.

    Reads DSpark and DFlash drafters of DeepSpec, speculators, z-lab and Transformers. Nothing is
    guessed: a field that is missing or that the other layout cannot express is an error.
    """
    from dspark_hf.drafting.checkpoints.load import load_checkpoint
    from dspark_hf.drafting.checkpoints.save import LAYOUTS, save_checkpoint
    from dspark_hf.drafting.checkpoints.target import read_target, with_target
    from dspark_hf.errors import ConfigError

    console = Console(highlight=False)
    if to not in LAYOUTS:
        raise ConfigError(f"--to must be one of {list(LAYOUTS)}; got {to!r}.")
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError(
            f"DEST must be a new or empty folder; got {str(dest)!r}, which is neither. Choose "
            "another one."
        )
    parts = None if target is None else read_target(target)
    checkpoint = load_checkpoint(
        source, revision=revision, vocab_size=None if parts is None else parts.vocab_size
    )
    console.print(summary_table(source, checkpoint))
    verifier = None
    includes = {"embed": checkpoint.embed is not None, "head": checkpoint.head is not None}
    if parts is not None:
        checkpoint = with_target(checkpoint, parts)
        verifier = {"architectures": list(parts.architectures), "name_or_path": parts.name}
    if to == "deepspec" and parts is not None:
        includes = {"embed": True, "head": True}
    save_checkpoint(
        checkpoint,
        dest,
        layout=to,
        include_embed=includes["embed"],
        include_head=includes["head"],
        verifier=verifier,
    )
    for path in sorted(dest.iterdir()):
        console.print(f"wrote {path} ({path.stat().st_size:,} bytes)", soft_wrap=True)
    console.print(f"[bold green]{to} layout written[/bold green]")


def summary_table(source: str, checkpoint: BlockCheckpoint) -> Table:
    """Say what a checkpoint holds.

    Args:
        source: Where it was loaded from.
        checkpoint: As loaded.

    Returns:
        Table: One line per fact.
    """
    from dspark_hf.cli.render import plain_table

    spec = checkpoint.spec
    taps = ", ".join("embedding" if layer == -1 else str(layer) for layer in spec.target_layers)
    blocks = "" if spec.num_target_layers is None else f" of {spec.num_target_layers}"
    readout = "anchor row read" if spec.reads_anchor else "mask tokens filled in"
    pruned = f"{spec.draft_vocab_size:,} of " if spec.is_pruned else ""
    head = f"{spec.head}, rank {spec.markov_rank}" if spec.markov_rank else "none"
    confidence = "none"
    if spec.has_confidence:
        seen = "hidden state and token" if spec.confidence_sees_token else "hidden state"
        confidence = f"from {seen}"
    borrowed = [
        name
        for name, tensor in (("embedding", checkpoint.embed), ("head", checkpoint.head))
        if tensor is None
    ]
    dtype = str(checkpoint.tensors["fc.weight"].dtype).removeprefix("torch.")
    facts = {
        "kind": checkpoint.kind,
        "layers": f"{spec.num_layers} ({spec.flavour}), width {spec.hidden_size}",
        "target blocks": f"{taps}{blocks}",
        "block": f"{spec.block_size} rows, {spec.num_drafts} drafts ({readout})",
        "vocabulary": f"{pruned}{spec.vocab_size:,}",
        "sequential head": head,
        "confidence head": confidence,
        "parameters": f"{checkpoint.num_parameters:,} ({dtype})",
        "borrowed": " and ".join(borrowed) or "nothing",
        "calibration": "none" if checkpoint.calibration is None else "yes",
    }
    table = plain_table("fact", "value", left=("fact", "value"), title=source)
    for name, value in facts.items():
        table.add_row(name, value)
    return table
