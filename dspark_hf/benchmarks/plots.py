"""Plots of the benchmark: schedules as batches grow, and steps as contexts grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks.contenders import PLAIN
from dspark_hf.benchmarks.sparse_tables import sparse_figure
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.plots import COLOURS, MARKERS, panels, save

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.figure import Figure

FIXED = "fixed-"


def draw_runs(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write one plot per dtype of the sections "scheduling" and "sparse".

    Args:
        results: A result file's contents.
        folder: Where the PNG files go; made if absent.

    Returns:
        list[Path]: The files.

    Raises:
        ConfigError: If neither was measured.
    """
    drawn = {"scheduling": _scheduling, "sparse": sparse_figure}
    runs = {key: run for key, run in results["runs"].items() if run["section"] in drawn}
    if not runs:
        raise ConfigError(
            f"the result file must hold one of the sections {sorted(drawn)} to be drawn; got "
            f"{sorted(results['runs'])}. Run `dspark-hf bench generate --section scheduling` first."
        )
    return [save(drawn[run["section"]], run, folder / f"{key}.png") for key, run in runs.items()]


def _scheduling(run: Mapping[str, Any]) -> Figure:
    figure, (left, right) = panels(2)
    names = list(dict.fromkeys(summary["contender"] for summary in run["summary"]))
    sizes = sorted({_size(summary) for summary in run["summary"]})
    coloured = [name for name in names if name != PLAIN and not name.startswith(FIXED)]
    for name in [name for name in names if name != PLAIN]:
        here = sorted((s for s in run["summary"] if s["contender"] == name), key=_size)
        found = [s for s in here if s.get("rounds")]
        style: dict[str, Any] = {"color": "#b4b8c0", "linewidth": 1, "zorder": 1}
        if name in coloured:
            place = coloured.index(name)
            style = {"color": COLOURS[place % 7], "marker": MARKERS[place % 7], "label": name}
        elif name == f"{FIXED}1":
            style["label"] = "fixed lengths"
        left.plot([_size(s) for s in found], [s["verified"] / s["rounds"] for s in found], **style)
        right.plot([_size(s) for s in here], [s["ratio"]["p50"] for s in here], **style)
        if name not in coloured and found:
            verified = found[-1]["verified"] / found[-1]["rounds"]
            left.annotate(
                name.removeprefix(FIXED), (_size(found[-1]), verified), xytext=(4, -3), fontsize=8,
                textcoords="offset points", color="#777777",
            )  # fmt: skip
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.set_xlabel("rows in the batch")
        axis.set_ylim(0, None)
    left.set(ylabel="verified drafts per row and round", title="what is verified")
    right.set(ylabel="speed, plain generate() = 1", title="what it gains")
    right.axhline(1, color="#555555", linewidth=1, linestyle="--")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(
        f"Schedules over batch sizes ({run['dtype']})", x=0.01, ha="left", fontsize=12,
        weight="bold",
    )  # fmt: skip
    return figure


def _size(summary: Mapping[str, Any]) -> int:
    return int(summary["group"].split()[0])
