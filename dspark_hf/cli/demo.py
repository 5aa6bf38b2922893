"""`dspark-hf demo`: a model beside itself, with and without this package."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dspark_hf.cli import render
from dspark_hf.cli.options import Dtype  # noqa: TC001 - typer reads annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dspark_hf.cli.session import Timed
    from dspark_hf.losslessness import Fork

SHOWN = {
    "rewrite-03": "A code edit: the answer repeats the prompt, so lookup drafts well",
    "chat-03": "An open question: little to copy; a trained drafter guesses, if one ships",
}
"""Prompts of the side-by-side part and what they show."""
BATCHED = ("rewrite-03", "chat-03", "rewrite-10", "code-10")
"""Prompts of the pipeline part, of different lengths."""
REPEATS = 2
"""Timed calls per side; the two take turns, so that a busy moment does not favour one."""
WARM_UP_TOKENS = 8
SPINS_PER_S = 1
"""Redrawing takes time from what is measured."""


@dataclass(frozen=True)
class Contest:
    """A plain and a wrapped run of the same batch.

    Attributes:
        plain: Of the unwrapped model; the seconds are medians.
        ours: Of the wrapped one.
        forks: Where a row's texts part; None where they are identical.
    """

    plain: Timed
    ours: Timed
    forks: list[Fork | None]

    @property
    def ratio(self) -> float:
        """How many times faster the wrapped run was, in tokens per second."""
        return self.ours.tokens_per_s / self.plain.tokens_per_s


def demo(
    model: Annotated[
        str | None, typer.Option(help="Path or hub id. Default: SmolLM2-135M-Instruct.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 64,
    dtype: Dtype = "bfloat16",
) -> None:
    """Show a model generate with and without drafts, side by side, alone and in a pipeline."""
    from dspark_hf.cli import session
    from dspark_hf.data import load_prompts
    from dspark_hf.demo_model import prepare_smollm2

    console = Console(highlight=False)
    source = model or str(prepare_smollm2())
    wrapped, tokenizer = session.load(source, "auto", dtype)
    texts = {prompt.id: prompt.text for prompt in load_prompts()}
    kwargs = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    together = session.encode(wrapped, tokenizer, [texts[name] for name in BATCHED])
    with console.status("Warming up ...", refresh_per_second=SPINS_PER_S):
        warm_up(wrapped, together, kwargs)
    console.print(introduction(model or "SmolLM2-135M-Instruct", wrapped))
    console.print(render.legend(console))
    kwargs["max_new_tokens"] = max_new_tokens
    for name, title in SHOWN.items():
        batch = session.encode(wrapped, tokenizer, [texts[name]])
        with console.status(f"Generating {name} ...", refresh_per_second=SPINS_PER_S):
            contest = race(wrapped, batch, kwargs)
        console.print()
        console.print(side_by_side(title, texts[name], contest, tokenizer, wrapped.dtype))
    with console.status("Running the pipelines ...", refresh_per_second=SPINS_PER_S):
        prompts = [texts[name] for name in BATCHED]
        run = pipelines(wrapped, tokenizer, prompts, together, kwargs)
        contest = race(wrapped, together, kwargs, run=run)
    console.print()
    console.print(pipeline_table(contest, BATCHED, together, wrapped.dtype))


def warm_up(model: Any, batch: dict[str, torch.Tensor], kwargs: dict[str, Any]) -> None:
    """Run both sides once untimed, and measure step costs as a longer life would have.

    Args:
        model: A wrapped model.
        batch: Any batch.
        kwargs: Keywords of generate().
    """
    from dspark_hf.cli import session

    session.generate_plain(model, batch, **kwargs, max_new_tokens=WARM_UP_TOKENS)
    session.generate(model, batch, **kwargs, max_new_tokens=WARM_UP_TOKENS)
    if model.dspark.target_choice().path is not None:
        model.dspark.profile(repeats=3)


def race(
    model: Any,
    batch: dict[str, torch.Tensor],
    kwargs: dict[str, Any],
    run: Callable[[bool], Timed] | None = None,
) -> Contest:
    """Time both sides in turns and compare their texts.

    Args:
        model: A wrapped model.
        batch: The prompts.
        kwargs: Keywords of generate().
        run: Does one timed call, wrapped or not; generate() by default.

    Returns:
        Contest: With median seconds.
    """
    from dspark_hf.cli import session
    from dspark_hf.losslessness import find_forks

    def call(is_wrapped: bool) -> Timed:
        if run is not None:
            return run(is_wrapped)
        side = session.generate if is_wrapped else session.generate_plain
        return side(model, batch, **kwargs)

    runs: dict[bool, list[Timed]] = {False: [], True: []}
    for _ in range(REPEATS):
        for is_wrapped, done in runs.items():
            done.append(call(is_wrapped))
    # Texts are those of the last calls: in 16 bits draft lengths can decide a near-tie.
    plain, ours = (
        replace(done[-1], seconds=median(timed.seconds for timed in done)) for done in runs.values()
    )
    return Contest(plain, ours, find_forks(model, batch, plain.ids, ours.ids, kwargs))


def pipelines(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    batch: dict[str, torch.Tensor],
    kwargs: dict[str, Any],
) -> Callable[[bool], Timed]:
    """Return a function that runs Transformers' pipeline once, wrapped or not.

    Args:
        model: A wrapped model.
        tokenizer: Its tokenizer.
        prompts: What the users say.
        batch: The same, encoded.
        kwargs: Keywords of generate().

    Returns:
        Callable[[bool], Timed]: Takes whether the model is wrapped.
    """
    from torch import tensor
    from transformers import pipeline

    from dspark_hf.cli import session
    from dspark_hf.losslessness import unwrapped

    chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = chats if tokenizer.chat_template else list(prompts)

    def run(is_wrapped: bool) -> Timed:
        with nullcontext() if is_wrapped else unwrapped(model):
            pipe = pipeline(
                "text-generation", model=model, tokenizer=tokenizer, batch_size=len(inputs)
            )

            def call() -> list[list[int]]:
                answers = pipe(inputs, return_tensors=True, **kwargs)
                sequences = tensor([answer[0]["generated_token_ids"] for answer in answers])
                return session.new_ids(model, sequences, batch)

            return session.observe(model, call)

    return run


def introduction(name: str, model: Any) -> Text:
    """Return what is measured, and how.

    Args:
        name: Of the model.
        model: The wrapped model.

    Returns:
        Text: Two lines.
    """
    from torch import get_num_threads

    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    where = f"{get_num_threads()} CPU threads" if model.device.type == "cpu" else model.device
    return Text.assemble(
        (name, "bold"),
        f": {millions:,.0f} M parameters, {str(model.dtype).removeprefix('torch.')}, {where}.\n"
        "The same weights run in Transformers alone (plain) and wrapped (dspark), in turns. "
        f"Times are medians of {REPEATS} runs, prompts included.",
    )


def side_by_side(
    title: str, prompt: str, contest: Contest, tokenizer: Any, dtype: torch.dtype
) -> Group:
    """Return one prompt's two answers beside each other, with their numbers below.

    Args:
        title: What the prompt shows.
        prompt: What the user says.
        contest: The two runs.
        tokenizer: Decodes.
        dtype: Type the model computes in.

    Returns:
        Group: To be printed.
    """
    record = contest.ours.records[0]
    texts = [
        render.pieces_of(tokenizer, contest.plain.ids[0], []),
        render.pieces_of(tokenizer, contest.ours.ids[0], record.accepted_mask),
    ]
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(
        *(
            Panel(render.as_text(pieces), title=side)
            for pieces, side in zip(texts, ("plain", "dspark"), strict=True)
        )
    )
    grid.add_row(
        f"{contest.plain.tokens_per_s:.1f} tokens/s",
        Text.assemble(
            f"{contest.ours.tokens_per_s:.1f} tokens/s, ",
            (f"x{contest.ratio:.2f}", "bold"),
            f"; accepted length {record.accepted_length:.2f}\n"
            f"{record.rounds} rounds, {record.accepted} of {record.verified} drafts accepted",
        ),
    )
    asked = Text(f"> {' '.join(prompt.split())}", "dim", no_wrap=True, overflow="ellipsis")
    return Group(Text(title, "bold"), asked, grid, render.identical_text(contest.forks[0], dtype))


def pipeline_table(
    contest: Contest, names: Sequence[str], batch: dict[str, torch.Tensor], dtype: torch.dtype
) -> Group:
    """Return the pipeline's rows as a table, and the batch's times below.

    Args:
        contest: The two runs.
        names: Of the prompts.
        batch: The prompts, encoded.
        dtype: Type the model computes in.

    Returns:
        Group: To be printed.
    """
    header = ("prompt", "prompt tokens", "new tokens", "accepted length", "identical")
    table = render.plain_table(*header, left=("prompt", "identical"))
    lengths = batch["attention_mask"].sum(dim=-1).tolist()
    for i, (name, length) in enumerate(zip(names, lengths, strict=True)):
        fork = contest.forks[i]
        note = "yes"
        if fork is not None:
            kind = "near-tie" if fork.is_near_tie else "NOT ROUNDING"
            note = f"to token {fork.index}, {kind} ({fork.margin:.3g})"
        accepted_length = contest.ours.records[i].accepted_length
        table.add_row(
            name, str(length), str(len(contest.ours.ids[i])), f"{accepted_length:.2f}", note
        )
    num_identical = sum(fork is None for fork in contest.forks)
    plain, ours = contest.plain, contest.ours
    numbers = Text.assemble(
        f"plain {plain.seconds:.1f} s ({plain.tokens_per_s:.1f} tokens/s); dspark "
        f"{ours.seconds:.1f} s ({ours.tokens_per_s:.1f} tokens/s), ",
        (f"x{contest.ratio:.2f}", "bold"),
        f"\naccepted length {render.mean_accepted_length(ours.records):.2f}; "
        f"identical: {num_identical} of {len(names)}",
    )
    title = Text(f'pipeline("text-generation", batch_size={len(names)}), left padded', "bold")
    parts: list[Any] = [title, table, numbers]
    if any(fork is not None and fork.is_near_tie for fork in contest.forks):
        kind = str(dtype).removeprefix("torch.")
        parts.append(
            Text(
                f"near-tie: plain scored two tokens as close (margin) as {kind} rounds. "
                "With --dtype float32 texts are identical.",
                "dim",
            )
        )
    return Group(*parts)
