"""`dspark-hf train`: a block drafter for a target, from texts the target writes.

`dspark-hf train predictor` is a command of its own below it.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import Annotated, Any

import typer

from dspark_hf.cli.train_predictor import predictor
from dspark_hf.errors import ConfigError

TEXTS, DRAFTER, TRAINING, RESULT = "Texts", "Drafter", "Training", "Target and result"


def _option(help_text: str, panel: str, name: str | None = None) -> Any:
    names = () if name is None else (name,)
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)


train_app = typer.Typer(
    invoke_without_command=True,
    help="Train a block drafter for a target, or continue a run that was stopped.",
)
train_app.command()(predictor)


@train_app.callback()
def train(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of these options; flags come before it.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Model to draft for: path or hub id.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Texts or prompts: JSONL file, dataset folder or dataset id, with :SPLIT. Without "
            "it the target makes up its own."
        ),
    ] = None,
    tokens: Annotated[
        int | None, _option("Answer tokens to write; the rest of the data is left.", TEXTS)
    ] = None,
    regenerate: Annotated[
        bool | None, _option("Let the target answer anew what has an answer.", TEXTS)
    ] = None,
    temperatures: Annotated[
        str | None, _option("Of answers, one drawn for each. Default: 0,0.7,1.", TEXTS)
    ] = None,
    rows: Annotated[int | None, _option("Texts written at a time. Default: 64.", TEXTS)] = None,
    question_tokens: Annotated[
        int | None, _option("Longest made-up question. Default: 64.", TEXTS)
    ] = None,
    answer_tokens: Annotated[int | None, _option("Longest answer. Default: 256.", TEXTS)] = None,
    layers: Annotated[int | None, _option("Default: 2.", DRAFTER)] = None,
    block_size: Annotated[int | None, _option("Drafts per round. Default: 7.", DRAFTER)] = None,
    taps: Annotated[
        str | None, _option("Target blocks it reads, as 9,18,27. Default: three.", DRAFTER)
    ] = None,
    markov_rank: Annotated[
        int | None, _option("Of the sequential head; 0 for none. Default: 64.", DRAFTER)
    ] = None,
    head: Annotated[
        str | None, _option("vanilla, gated or rnn. Default: vanilla.", DRAFTER)
    ] = None,
    confidence: Annotated[bool | None, _option("With a confidence head.", DRAFTER)] = None,
    intermediate_size: Annotated[
        int | None, _option("Width of the MLP. Default: the target's.", DRAFTER)
    ] = None,
    draft_vocab_size: Annotated[
        int | None, _option("Most frequent ids it may propose. Default: all.", DRAFTER)
    ] = None,
    mask_token: Annotated[
        int | None, _option("Id. Default: one that the texts do not use.", DRAFTER)
    ] = None,
    reads_anchor: Annotated[
        bool | None, _option("DSpark's readout; otherwise DFlash's.", DRAFTER)
    ] = None,
    steps: Annotated[int | None, _option("Default: 1000.", TRAINING)] = None,
    train_tokens: Annotated[
        int | None, _option("Text tokens to train on, instead of steps.", TRAINING)
    ] = None,
    batch_size: Annotated[
        int | None, _option("Texts per step and process. Default: 8.", TRAINING)
    ] = None,
    anchors: Annotated[int | None, _option("Blocks per text. Default: 64.", TRAINING)] = None,
    learning_rate: Annotated[float | None, _option("Peak. Default: 6e-4.", TRAINING)] = None,
    warmup_steps: Annotated[int | None, _option("Default: 50.", TRAINING)] = None,
    weight_decay: Annotated[float | None, _option("Default: 0.01.", TRAINING)] = None,
    clip_norm: Annotated[float | None, _option("Default: 1.", TRAINING)] = None,
    max_tokens: Annotated[int | None, _option("Longest text. Default: 512.", TRAINING)] = None,
    top_k: Annotated[
        int | None, _option("Target probabilities per position. Default: 32.", TRAINING)
    ] = None,
    validation_share: Annotated[float | None, _option("Default: 0.02.", TRAINING)] = None,
    validate_every: Annotated[int | None, _option("Steps. Default: 100.", TRAINING)] = None,
    save_every: Annotated[int | None, _option("Steps. Default: 100.", TRAINING)] = None,
    from_target: Annotated[
        bool | None,
        _option("Start from the target's last blocks.", TRAINING, "--from-target/--from-scratch"),
    ] = None,
    from_bigrams: Annotated[
        bool | None, _option("Start the sequential head from the texts' token pairs.", TRAINING)
    ] = None,
    from_drafter: Annotated[
        str | None, _option("Go on from a block drafter of this target: path or hub id.", TRAINING)
    ] = None,
    only_answers: Annotated[
        bool | None, _option("Learn from answers only, not from prompts.", TRAINING)
    ] = None,
    precision: Annotated[str | None, _option("no or bf16. Default: no.", TRAINING)] = None,
    seed: Annotated[int | None, _option("Default: 0.", TRAINING)] = None,
    cross_entropy: Annotated[float | None, _option("Its share. Default: 0.1.", TRAINING)] = None,
    distance: Annotated[float | None, _option("Its share. Default: 0.9.", TRAINING)] = None,
    confidence_loss: Annotated[float | None, _option("Its share. Default: 1.", TRAINING)] = None,
    decay: Annotated[float | None, _option("Of position weights. Default: 4.", TRAINING)] = None,
    teacher: Annotated[
        str | None, _option("Block drafter to learn from as well.", TRAINING)
    ] = None,
    distillation: Annotated[float | None, _option("Its share. Default: 0.5.", TRAINING)] = None,
    dtype: Annotated[
        str | None, _option("Of the target: bfloat16, float16 or float32.", RESULT)
    ] = None,
    lessons: Annotated[
        Path | None, _option("Folder to keep the target's features in, for later epochs.", RESULT)
    ] = None,
    lessons_gb: Annotated[float | None, _option("Its largest size. Default: 20.", RESULT)] = None,
    layout: Annotated[
        str | None, _option("speculators, or deepspec, which copies the target's head.", RESULT)
    ] = None,
    calibrate: Annotated[bool | None, _option("Fit confidences at the end.", RESULT)] = None,
    calibration_prompts: Annotated[
        Path | None, _option("JSONL file. Default: the 120 shipped for it.", RESULT)
    ] = None,
    calibration_tokens: Annotated[
        int | None, _option("Per prompt and temperature. Default: 128.", RESULT)
    ] = None,
    base_model: Annotated[
        str | None, _option("Hub id of the target, for the card. Default: its name.", RESULT)
    ] = None,
    license: Annotated[  # noqa: A002 - the name of the field in a card
        str | None, _option("For the card. Default: the target's.", RESULT)
    ] = None,
) -> None:
    """Train a block drafter for a target, or continue a run that was stopped.

    Without --data the target makes up chats by its own template; a JSONL file of whole texts is
    used as it is; prompts are answered by the target. The same command continues a run.
    """
    flags = {
        name: str(value) if hasattr(value, "__fspath__") else value
        for name, value in locals().items()
        if name not in ("ctx", "config")
    }
    if ctx.invoked_subcommand is not None:
        given = [name for name, value in flags.items() if value is not None]
        if config is not None or given:
            raise ConfigError(
                f"options of `train {ctx.invoked_subcommand}` must come behind its name; got "
                f"{given or ['config']} before it. Put them behind."
            )
        return
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from dspark_hf.training.command import train_drafter
    from dspark_hf.training.options import TrainOptions

    transformers_logging.disable_progress_bar()
    options = TrainOptions.merge(config, flags)
    done = train_drafter(options)
    if done is not None:
        Console(highlight=False).print(
            f"The drafter is in {done.folder} ({done.num_bytes / 2**20:.1f} MiB), its card in "
            f"{done.folder / 'README.md'}; expected length on held-out texts "
            f"{done.expected_length:.2f} tokens per target forward.",
            soft_wrap=True,
        )
