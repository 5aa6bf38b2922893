"""Measuring a model's throughput profile: the one place that runs forwards to time them."""

from __future__ import annotations

import hashlib
import json
import platform
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from dspark_hf import compat
from dspark_hf.values import Feed
from dspark_hf.verification.profile import StepSeconds, ThroughputProfile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from dspark_hf.targets.base import Target
    from dspark_hf.targets.select import Choice

UNRELATED = ("_name_or_path", "transformers_version", "architectures", "use_cache")
"""Entries of a configuration that say nothing of what a forward costs."""


def profile_key(model: PreTrainedModel, choice: Choice) -> dict[str, str]:
    """Return what must be the same for a profile to hold.

    Args:
        model: The model.
        choice: The target it gets.

    Returns:
        dict[str, str]: Machine, threads, torch, and the model's class, configuration and type.
    """
    device = compat.input_device(model)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    values = compat.text_config(model).to_dict()
    related = {name: value for name, value in values.items() if name not in UNRELATED}
    text = json.dumps(related, sort_keys=True, default=str)
    return {
        "machine": cpu_name() if device.type == "cpu" else machine,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "class": type(model).__name__,
        "config": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "dtype": f"{model.dtype}{' under autocast' if compat.is_autocast(model) else ''}",
        "attention": compat.attention_name(model),
        "target": str(choice.path),
    }


@torch.no_grad()
def measure_profile(
    model: PreTrainedModel,
    choice: Choice,
    widths: Sequence[int],
    rows: Sequence[int],
    row_widths: Sequence[int],
    context: int,
    repeats: int,
) -> ThroughputProfile:
    """Time forwards of one row over several tokens, and of several rows over some tokens each.

    Args:
        model: The model.
        choice: The target it gets.
        widths: Numbers of new tokens of one row.
        rows: Numbers of rows.
        row_widths: Numbers of new tokens of each of several rows.
        context: Cached tokens before them, at least 1; several rows share them.
        repeats: Forwards per cell; the median counts.

    Returns:
        ThroughputProfile: In the order of `widths`, then of `rows` and `row_widths`.

    Raises:
        NotImplementedError: If no target is exact for the model.
    """
    cells = [(1, width) for width in widths]
    cells += [(num_rows, num_rows * width) for num_rows in rows for width in row_widths]
    cells = list(dict.fromkeys(cells))
    target = choice.build(model, context + max((*widths, *row_widths)))
    share = max(1, context // max(num_rows for num_rows, _ in cells))
    # Row 0 holds the whole context, those behind it one share each.
    lengths = [context, *[share] * max(num_rows for num_rows, _ in cells)]
    for row, length in enumerate(lengths):
        target.forward([Feed(row, [1] * length, 1)])
    seconds: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    # Cells take turns, so that a machine that slows down slows all of them.
    for _ in range(repeats):
        for num_rows, num_tokens in cells:
            fed = [0] if num_rows == 1 else list(range(1, num_rows + 1))
            seconds[num_rows, num_tokens].append(
                _time_forward(target, {row: lengths[row] for row in fed}, num_tokens // num_rows)
            )
    entries = [
        StepSeconds(
            num_rows, num_tokens, context if num_rows == 1 else num_rows * share, median(times)
        )
        for (num_rows, num_tokens), times in seconds.items()
    ]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return ThroughputProfile(profile_key(model, choice), date, tuple(entries))


def _time_forward(target: Target, lengths: Mapping[int, int], width: int) -> float:
    """Time a forward over rows of the given cached lengths, and take it back."""
    for row in lengths:
        target.hold(row)
    begin = perf_counter()
    logits = target.forward([Feed(row, [1] * width, width) for row in lengths])
    if logits[0].device.type != "cpu":
        torch.accelerator.synchronize(logits[0].device)
    seconds = perf_counter() - begin
    for row, length in lengths.items():
        target.rollback(row, length)
    return seconds


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name.

    Args:
        cpuinfo: Where Linux lists it.

    Returns:
        str: The name, or the architecture where the system tells no name.
    """
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
