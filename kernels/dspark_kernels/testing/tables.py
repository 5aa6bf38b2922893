"""Writes the tables of kernels/README.md: costs by formula, resources by compiling.

`python -m dspark_kernels.testing.tables` rewrites the costs; with `--compile` it also compiles
every kernel for every chip (a minute or two) and stores what it reads in kernels/resources.json.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark_kernels.costs import COSTS, Shape
from dspark_kernels.testing.chips import CHIPS
from dspark_kernels.testing.ops import OPS

KERNELS = Path(__file__).parents[2]
README, RESOURCES = KERNELS / "README.md", KERNELS / "resources.json"
STEPS = (1, 8)
"""Tokens of the steps in the table of costs."""


def cost_table() -> str:
    """Return bytes, flops, intensity and floor of every op as a Markdown table."""
    lines = [
        "| op | tokens | MB moved | Mflop | flop per byte | floor, µs |",
        "|---|---|---|---|---|---|",
    ]
    for op in OPS:
        for tokens in STEPS:
            if tokens > 1 and op in ("block_sparse_prefill", "markov_step", "rejection_sampling"):
                continue
            cost = COSTS[op](Shape(tokens=tokens))
            step = "prompt" if op == "block_sparse_prefill" else str(tokens)
            lines.append(
                f"| {op} | {step} | {cost.bytes_moved / 1e6:.3f} | {cost.flops / 1e6:.3f} "
                f"| {cost.intensity:.1f} | {cost.floor_us:.2f} |"
            )
    return "\n".join(lines)


def compile_all() -> list[dict[str, Any]]:
    """Compile every build of every op for every chip and return what each uses."""
    from dspark_kernels.testing.aot import compile_build

    found = []
    for op in OPS:
        for build in importlib.import_module(f"dspark_kernels.{op}.kernel").builds():
            for chip in CHIPS.values():
                used = asdict(compile_build(build, chip))
                found.append({"op": op, "build": build.name, "chip": chip.name, **used})
    return found


def resource_table(records: list[dict[str, Any]]) -> str:
    """Return registers and shared memory per chip as a Markdown table."""
    head = " | ".join(CHIPS)
    lines = [f"| op, variant | {head} |", "|---|" + "---|" * len(CHIPS)]
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        spilled = f", {record['spilled']} spilled" if record["spilled"] else ""
        text = f"{record['registers']} / {record['shared_bytes'] / 1024:.1f}{spilled}"
        cells.setdefault(f"{record['op']} {record['build']}", {})[record["chip"]] = text
    for name, row in cells.items():
        lines.append(f"| {name} | " + " | ".join(row.get(chip, "") for chip in CHIPS) + " |")
    return "\n".join(lines)


def place(text: str, name: str, table: str) -> str:
    """Put a table between the markers of its name."""
    pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)


def render(text: str) -> str:
    """Return the README with both tables as they should be."""
    text = place(text, "costs", cost_table())
    if RESOURCES.exists():
        text = place(text, "resources", resource_table(json.loads(RESOURCES.read_text())))
    return text


if __name__ == "__main__":
    if "--compile" in sys.argv[1:]:
        RESOURCES.write_text(json.dumps(compile_all(), indent=1) + "\n")
    README.write_text(render(README.read_text()))
