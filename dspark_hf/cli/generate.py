"""`dspark-hf generate`: text from any causal LM, with what drafting did for it."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dspark_hf.cli.options import Dtype  # noqa: TC001 - typer reads annotations
from dspark_hf.errors import ConfigError

WARM_UP_TOKENS = 4
"""New tokens of the untimed calls before a comparison."""


def generate(
    model: Annotated[str, typer.Option(help="Path or hub id of a causal LM.")],
    prompt: Annotated[list[str], typer.Option(help="What to answer; repeat it for a batch.")],
    drafter: Annotated[
        str, typer.Option(help="auto, lookup, none, or the path or hub id of a drafter.")
    ] = "lookup",
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Apply the chat template. Default: if there is one."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per prompt.")] = 128,
    dtype: Dtype = "bfloat16",
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random.")] = False,
    temperature: Annotated[float, typer.Option(help="Above 0; used with --sample.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes --sample repeatable.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plain Transformers too, and compare.")
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(help="Show every round: an HTML file to write, or - for the terminal."),
    ] = None,
) -> None:
    """Generate text and colour the draft tokens that were accepted."""
    from dspark_hf.cli import render, session, token_view
    from dspark_hf.cli.trace_page import trace_page
    from dspark_hf.config import DSparkConfig
    from dspark_hf.losslessness import find_forks

    if sample:
        check_temperature(temperature)
    if trace not in (None, "-"):
        check_page(Path(trace))
    console = Console(highlight=False)
    # Draft lengths follow measured times; only coupled draws do not depend on them.
    config = DSparkConfig(seed=seed, acceptance="rejection" if seed is None else "coupled")
    wrapped, tokenizer = session.load(model, drafter, dtype, config)
    batch = session.encode(wrapped, tokenizer, prompt, chat=chat)
    kwargs: dict[str, Any] = {"do_sample": sample, "pad_token_id": tokenizer.pad_token_id}
    if sample:
        kwargs["temperature"] = temperature
    if compare:
        # The first call of a process pays for allocations and thread pools. Ours comes first as it
        # says what is wrong with a prompt.
        session.generate(wrapped, batch, **kwargs, max_new_tokens=WARM_UP_TOKENS)
        session.generate_plain(wrapped, batch, **kwargs, max_new_tokens=WARM_UP_TOKENS)
    kwargs["max_new_tokens"] = max_new_tokens
    with nullcontext([]) if trace is None else wrapped.dspark.trace() as rounds:
        run = session.generate(wrapped, batch, **kwargs)
    for number, (ids, record) in enumerate(zip(run.ids, run.records, strict=True), start=1):
        if len(run.ids) > 1:
            console.rule(f"prompt {number}", align="left")
        render.print_exactly(console, render.pieces_of(tokenizer, ids, record.accepted_mask))
    console.rule()
    console.print(render.legend(console))
    console.print(f"{run.tokens_per_s:.1f} tokens/s ({run.seconds:.2f} s, prompts included)")
    console.print(render.speculation_table(run.records))
    if trace == "-":
        token_view.print_trace(console, rounds, tokenizer)
    elif trace is not None:
        page = trace_page(
            rounds,
            run.records,
            session.rows_of(batch),
            tokenizer,
            title=f"{Path(model).name}, drafter {Path(drafter).name}",
            first=[ids[0] if ids else None for ids in run.ids],
        )
        Path(trace).write_text(page, encoding="utf-8")
        console.print(f"Every round is in {trace}.", soft_wrap=True)
    if compare:
        plain = session.generate_plain(wrapped, batch, **kwargs)
        ratio = run.tokens_per_s / plain.tokens_per_s
        console.print(f"plain Transformers: {plain.tokens_per_s:.1f} tokens/s, ratio x{ratio:.2f}")
        if sample:
            console.print("Sampled texts differ from run to run; `dspark-hf verify` tests them.")
            return
        for fork in find_forks(wrapped, batch, plain.ids, run.ids, kwargs):
            console.print(render.identical_text(fork, wrapped.dtype))


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that cannot be sampled at.

    Args:
        temperature: Of --temperature.

    Raises:
        ConfigError: Unless it is a finite number above 0.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"--temperature must be a finite number above 0 to sample at; got {temperature:g}. For "
            "the likeliest token at every place leave --sample out."
        )


def check_page(path: Path) -> None:
    """Make the folder of a page, so that one that cannot be written fails before the model loads.

    Args:
        path: Of --trace.

    Raises:
        ConfigError: If no file can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        place = path if path.exists() else path.parent
        is_writable = not path.is_dir() and os.access(place, os.W_OK)
    except OSError as error:
        raise _refused(path, error.strerror or type(error).__name__) from error
    if not is_writable:
        raise _refused(path, "a folder" if path.is_dir() else "no permission to write")


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--trace must be a file that can be written, or - for the terminal; got {str(path)!r}: "
        f"{why}. Name another file."
    )
