"""`dspark-hf doctor`: what this machine has, and what a given model gets from this package."""

from __future__ import annotations

import os
import platform
from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark_hf.cli.options import Dtype  # noqa: TC001 - typer reads annotations

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dspark_hf.targets.select import Choice

PACKAGES = ("dspark-hf", "torch", "transformers", "accelerate", "triton")
WIDTHS = (1, 2, 3, 5, 9, 17)
"""Tokens per forward that are timed: one of the target's own and 0, 1, 2, 4, 8, 16 of a draft."""
REPEATS = 9
"""Timed forwards per width; the median is shown."""
TOLD_WIDTHS = (5, 9)
"""Of `WIDTHS`, those told in words."""
WIDE, NOT_SHARED = WIDTHS[-1], 0.15
"""A processor that computes with 16 bits takes little longer for so many tokens than for one; where
each further one costs this part of the first or more, it converts every number every time."""
PATHS = {
    "flat": "flat: all rows of a batch in one ragged forward",
    "rowwise": "rowwise: each row with a cache of its own",
    None: "own loop: generate() runs as Transformers wrote it, without drafts",
}


def doctor(
    model: Annotated[str | None, typer.Option(help="Path or hub id of a causal LM.")] = None,
    dtype: Dtype = "bfloat16",
) -> None:
    """Show versions, devices and threads; with --model, what that model gets and what pays."""
    console = Console(highlight=False)
    console.print(_facts("Environment", environment()))
    for advice in thread_advice(os.environ.get("OMP_WAIT_POLICY")):
        console.print(Text(f"Advice: {advice}", "yellow"))
    if model is None:
        console.print("Add --model PATH_OR_ID to see which path a model takes and what pays.")
        return
    from dspark_hf.cli import session

    wrapped, tokenizer = session.load(model, "none", dtype)
    choice = wrapped.dspark.target_choice()
    console.print(_facts(model, model_facts(wrapped, tokenizer, choice)))
    if choice.path is None:
        console.print(Text("Drafting cannot help here: nothing verifies drafts exactly.", "yellow"))
        return
    profile = wrapped.dspark.profile(widths=WIDTHS, repeats=REPEATS)
    seconds = profile.seconds_by_width()
    console.print(cost_table(seconds))
    console.print(verdict(seconds))
    for advice in dtype_advice(wrapped.dtype, wrapped.device, seconds):
        console.print(Text(f"Advice: {advice}", "yellow"))


def environment() -> dict[str, str]:
    """Return versions, devices and threads, by name."""
    import torch

    from dspark_hf.benchmarks.environment import usable_cores
    from dspark_hf.profiling import cpu_name

    facts = {"python": f"{platform.python_version()} on {platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed" if name != "dspark-hf" else "run from its source folder"
    capability = torch.backends.cpu.get_cpu_capability()
    facts["CPU"] = f"{cpu_name()}, {usable_cores()} cores, {capability}"
    facts["GPU"] = ", ".join(
        f"{torch.cuda.get_device_name(i)} "
        f"({torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB)"
        for i in range(torch.cuda.device_count())
    ) or "none"  # fmt: skip
    facts["threads"] = str(torch.get_num_threads())
    facts["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "not set")
    return facts


def thread_advice(wait_policy: str | None) -> list[str]:
    """Say what to change about threads.

    Args:
        wait_policy: Value of OMP_WAIT_POLICY; None if not set.

    Returns:
        list[str]: A sentence per problem.
    """
    import torch

    from dspark_hf.benchmarks.environment import usable_cores

    advice = []
    if (wait_policy or "").lower() != "passive":
        advice.append(
            "set OMP_WAIT_POLICY=passive before Python starts; waiting threads then sleep instead "
            "of taking time from the working ones, which matters on few or shared cores."
        )
    threads, cores = torch.get_num_threads(), usable_cores()
    if threads > cores:
        advice.append(f"{threads} threads share {cores} cores; set OMP_NUM_THREADS={cores}.")
    return advice


def model_facts(model: Any, tokenizer: Any, choice: Choice) -> dict[str, str]:
    """Return what a model is and which path it takes.

    Args:
        model: A wrapped model.
        tokenizer: Its tokenizer.
        choice: Its target.

    Returns:
        dict[str, str]: By name.
    """
    from dspark_hf import compat
    from dspark_hf.targets.select import position_limit

    limit, is_hard = position_limit(model)
    kind = "learned: one more is an error" if is_hard else "quality may fall beyond"
    facts = {
        "architecture": type(model).__name__,
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": compat.attention_name(model),
        "layers": layer_kinds(compat.text_config(model)),
        "target": PATHS[choice.path],
        "why": choice.reason or "its logits agree with the plain forward on a ragged batch",
        "positions": "no limit" if limit is None else f"{limit} ({kind})",
        "tokenizer": f"{type(tokenizer).__name__}, {len(tokenizer)} tokens, "
        f"{'with' if tokenizer.chat_template else 'without'} chat template",
    }
    if choice.gathers:
        facts["target"] += ", expanding its compressed cache"
    return facts


def layer_kinds(config: Any) -> str:
    """Return how many layers of each kind a text configuration has."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return f"{config.num_hidden_layers} (one kind)"
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())


def break_even(ratio: float, num_drafts: int) -> float | None:
    """Return the acceptance per draft token at which a round costs what it saves.

    With each draft token accepted with probability a, given those before it, a round of N commits
    1 + a + ... + a^N tokens; it pays when these exceed its cost in one-token steps.

    Args:
        ratio: Cost of the round, in one-token steps.
        num_drafts: Draft tokens N verified in it.

    Returns:
        float | None: From 0 to 1; None when even full acceptance does not pay.

    Source: Leviathan et al., arXiv:2211.17192, equation 1.
    """
    if ratio <= 1:
        return 0.0
    if ratio > num_drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**k for k in range(num_drafts + 1)) < ratio:
            low = middle
        else:
            high = middle
    return high


def cost_table(seconds: Mapping[int, float]) -> Table:
    """Return the step costs as a table.

    Args:
        seconds: Of a forward, by the number of its tokens; one token is among them.

    Returns:
        Table: One line per width.
    """
    from dspark_hf.cli.render import plain_table

    table = plain_table("draft tokens", "tokens verified", "ms", "cost", "break-even acceptance",
                        title="Cost of a round, at a context of 256 tokens")  # fmt: skip
    for width, second in seconds.items():
        ratio, num_drafts = second / seconds[1], width - 1
        needed = break_even(ratio, num_drafts) if num_drafts else None
        shown = "never pays" if needed is None else f"{needed:.0%}"
        table.add_row(str(num_drafts), str(width), f"{1e3 * second:.1f}", f"x{ratio:.2f}",
                      shown if num_drafts else "")  # fmt: skip
    return table


def verdict(seconds: Mapping[int, float]) -> str:
    """Say in a sentence or two whether drafting can pay.

    Args:
        seconds: As for `cost_table`.

    Returns:
        str: For each of `TOLD_WIDTHS`.
    """
    lines = []
    for width in TOLD_WIDTHS:
        ratio = seconds[width] / seconds[1]
        needed = break_even(ratio, width - 1)
        pays = "never pays" if needed is None else f"pays from {needed:.0%} acceptance on"
        lines.append(
            f"Verifying {width} tokens costs x{ratio:.2f} of one: with {width - 1} draft tokens a "
            f"round, drafting {pays}."
        )
    lines.append(
        "The drafter's own time comes on top (lookup takes almost none). Where it does not pay, "
        "the schedule stops drafting by itself."
    )
    return " ".join(lines)


def dtype_advice(
    dtype: torch.dtype, device: torch.device, seconds: Mapping[int, float]
) -> list[str]:
    """Say whether another dtype may suit the processor better.

    Args:
        dtype: Of the model.
        device: Where it runs.
        seconds: As for `cost_table`.

    Returns:
        list[str]: A sentence per problem.
    """
    ratio = seconds[WIDE] / seconds[1]
    if device.type != "cpu" or dtype.itemsize != 2 or ratio < 1 + NOT_SHARED * (WIDE - 1):
        return []
    name = str(dtype).removeprefix("torch.")
    advice = (
        f"{WIDE} tokens take x{ratio:.1f} of one: this processor seems to lack instructions for "
        f"{name}. float32 may be quicker, above all for prompts and drafts; compare with "
        "--dtype float32."
    )
    return [advice]


def _facts(title: str, facts: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False,
                  box=None, pad_edge=False)  # fmt: skip
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return table
