"""Runs a soak from the command line; ends with 1 if anything was wrong."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from dspark_hf.benchmarks import environment
from soak.report import line, record, save, show
from soak.run import SoakSettings, soak

OUTPUT = Path("benchmarks/results/soak.json")
MODEL_BOUND_S = 600.0
"""Seconds within which every request must have ended where the model is not a tiny one."""


def main(arguments: list[str] | None = None) -> int:
    """Soak, write the record, print it; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=SoakSettings.minutes)
    parser.add_argument("--model", help="path or hub id of a checkpoint; a tiny random one if not")
    parser.add_argument("--seed", type=int, default=SoakSettings.seed)
    parser.add_argument("--faults", type=float, default=SoakSettings.faults)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    chosen = parser.parse_args(arguments)
    console = Console()
    settings = SoakSettings(chosen.minutes, chosen.model or None, chosen.seed, faults=chosen.faults)
    with environment.threads_set_to(1), quiet():
        found = soak(settings, lambda sample: console.print(line(sample), highlight=False))
        result = record(found, command(settings))
    save(result, chosen.output)
    show(result, console)
    return 1 if result["problems"] else 0


@contextmanager
def quiet() -> Iterator[None]:
    """Log errors only for a while: faults are counted, not told one by one."""
    loggers = [logging.getLogger(name) for name in ("dspark_hf", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def command(settings: SoakSettings) -> str:
    """Return how this soak can be repeated, without what is private to a machine."""
    model = "" if settings.model is None else f" MODEL={Path(settings.model).name}"
    faults = "" if settings.faults == SoakSettings.faults else f" FAULTS={settings.faults:g}"
    return f"make soak MINUTES={settings.minutes:g}{model}{faults}"


if __name__ == "__main__":
    sys.exit(main())
