"""Run sections of the benchmark and keep their results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dspark_hf.benchmarks import environment, results
from dspark_hf.benchmarks.bench import Bench
from dspark_hf.benchmarks.sections import run_section
from dspark_hf.benchmarks.timing import Clock
from dspark_hf.demo_model import HUB_ID, prepare_smollm2
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from dspark_hf.benchmarks.contest import Observer
    from dspark_hf.benchmarks.settings import BenchSettings


def run_benchmark(
    settings: BenchSettings,
    output: Path,
    *,
    command: str,
    observer: Observer,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Measure the chosen sections, saving after each.

    Args:
        settings: What to measure.
        output: Result file; entries of other sections and dtypes are kept.
        command: Command line, for the record.
        observer: Told of every timed call.
        clock: Where seconds come from; the system's clocks when None.

    Returns:
        dict[str, Any]: The contents of the result file.

    Raises:
        ConfigError: If the file holds results of another machine or model.
    """
    model, tokenizer, name = load_target(settings)
    machine, described = environment.machine(), environment.describe_model(model, name)
    held = results.open_results(output, machine, described)
    bench = Bench(model, tokenizer, settings, clock or Clock(), observer)
    for section in settings.chosen:
        with environment.threads_set_to(settings.threads):
            run = _measured(section, bench, command)
        held = results.merge(held, results.run_key(section, settings.dtype), run)
        results.save_results(output, held)
    return held


def load_target(settings: BenchSettings) -> tuple[PreTrainedModel, Any, str]:
    """Load the plain model and its tokenizer.

    Args:
        settings: Which model, in which dtype.

    Returns:
        tuple[PreTrainedModel, Any, str]: Model, tokenizer, and the model's name for tables.

    Raises:
        CheckpointError: If they cannot be loaded.
    """
    source = settings.model if settings.model is not None else str(prepare_smollm2())
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, settings.dtype))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"model must be the path or hub id of a causal LM with its tokenizer; loading "
            f"{source!r} failed: {str(error).strip().splitlines()[0]}"
        ) from error
    name = HUB_ID if settings.model is None else settings.model
    if Path(name).exists():
        name = Path(name).resolve().name
    return model.eval(), tokenizer, name


def _measured(section: str, bench: Bench, command: str) -> dict[str, Any]:
    load_at_start = environment.load_average()
    conditions = environment.conditions(command)
    measured = run_section(section, bench)
    return {
        "section": section,
        "dtype": bench.settings.dtype,
        **conditions,
        "attention": bench.model.config._attn_implementation,  # noqa: SLF001 - no public reader
        "load_average": [load_at_start, environment.load_average()],
        "settings": {k: v for k, v in asdict(bench.settings).items() if k not in PRIVATE},
        **measured.as_json(),
    }


PRIVATE = frozenset({"model", "drafter", "sections", "dtype", "threads"})
"""Settings recorded elsewhere, or that may be paths of one machine."""
