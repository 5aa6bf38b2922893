"""Writes the kernels as a project for Hugging Face's kernel-builder, ready to build and upload.

Run:     python kernels/export.py FOLDER
Output:  FOLDER/build.toml, flake.nix and torch-ext/dspark_kernels without tests and benchmarks.

Kernels from the Hub are loaded from outside the Python path, several versions beside one another,
so they must import themselves relatively; this repository imports absolutely, the copy does not.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "dspark_kernels"
LEFT_OUT = re.compile(r"(^|/)(testing/|test_|bench_|costs\.py|__pycache__)")
"""Tests, benchmarks and cost tables stay here."""
OPS = {
    "page_summary": ("rebuild_tail_pages", "update_page_summaries"),
    "page_score": ("page_score",),
    "page_select": ("page_select",),
    "paged_attention": ("paged_attention",),
    "merge_lse": ("merge_lse",),
    "ragged_attention": ("ragged_attention",),
    "block_sparse_prefill": ("block_sparse_prefill",),
    "markov_step": ("markov_step",),
    "rejection_sampling": ("rejection_sample",),
}
"""What the package offers at the top, by folder."""


def relative(source: str, depth: int) -> str:
    """Turn absolute imports of the package into relative ones.

    Args:
        source: A module's text.
        depth: Folders between the module and the package.

    Returns:
        str: The text with `from dspark_kernels.x import y` rewritten.
    """
    return re.sub(rf"\bfrom {PACKAGE}\.", "from ." + "." * depth, source)


def export(folder: Path) -> None:
    """Write the project, replacing what an earlier call left in `folder`/torch-ext."""
    target = folder / "torch-ext" / PACKAGE
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted((HERE / PACKAGE).rglob("*.py")):
        inside = path.relative_to(HERE / PACKAGE)
        if LEFT_OUT.search(inside.as_posix()):
            continue
        copy = target / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(relative(path.read_text(), len(inside.parents) - 1))
    lines = [f"from .{op}.op import {', '.join(names)}" for op, names in OPS.items()]
    names = ", ".join(f'"{name}"' for group in OPS.values() for name in group)
    text = (target / "__init__.py").read_text() + "\n" + "\n".join(lines)
    (target / "__init__.py").write_text(f"{text}\n\n__all__ = [{names}]\n")
    for name in ("build.toml", "flake.nix"):
        shutil.copy(HERE / name, folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    export(parser.parse_args().folder)
