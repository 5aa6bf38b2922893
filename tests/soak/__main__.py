"""Runs a soak from the command line; ends with 1 if anything was wrong."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as hf_logging

from dspark_hf.benchmarks import environment
from soak.report import line, record, save, show
from soak.run import SoakSettings, soak

OUTPUT = Path("benchmarks/results/soak.json")


def main(arguments: list[str] | None = None) -> int:
    """Soak, write the record, print it; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=SoakSettings.minutes)
    parser.add_argument("--model", help="path or hub id of a checkpoint; a tiny random one if not")
    parser.add_argument("--seed", type=int, default=SoakSettings.seed)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    chosen = parser.parse_args(arguments)
    # Faults are counted, not told one by one.
    logging.getLogger("dspark_hf").setLevel(logging.ERROR)
    hf_logging.set_verbosity_error()
    console = Console()
    settings = SoakSettings(chosen.minutes, chosen.model or None, chosen.seed)
    with environment.threads_set_to(1):
        found = soak(settings, lambda sample: console.print(line(sample), highlight=False))
        result = record(found, command(settings))
    save(result, chosen.output)
    show(result, console)
    return 1 if result["problems"] else 0


def command(settings: SoakSettings) -> str:
    """Return how this soak can be repeated, without what is private to a machine."""
    model = "" if settings.model is None else f" MODEL={Path(settings.model).name}"
    return f"make soak MINUTES={settings.minutes:g}{model}"


if __name__ == "__main__":
    sys.exit(main())
