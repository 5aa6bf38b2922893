"""Table and plot of the section "sparse"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks.drafter_tables import number, percentiles, times
from dspark_hf.benchmarks.markers import Table
from dspark_hf.evaluation.plots import COLOURS, MARKERS, panels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure


def sparse_tables(run: Mapping[str, Any], note: str) -> dict[str, Table]:
    """Return a table of whole-model steps and one of a layer's attention.

    Args:
        run: An entry of the result file.
        note: Conditions of the measurement.
    """
    header = [
        "context", "rows", "new tokens", "attention", "ms", "against our dense", "20-80 %",
        "against HF default", "pages read", "of those held",
    ]  # fmt: skip
    tables = {}
    for level, name in (("model", "sparse"), ("layer", "sparse-layer")):
        rows = [_row(entry) for entry in run["extra"]["steps"] if entry["level"] == level]
        tables[name] = Table(f"{name}, {run['dtype']}", header, rows, note)
    tables["self-sparse"] = _self_sparse(run, note)
    return tables


def _self_sparse(run: Mapping[str, Any], note: str) -> Table:
    header = [
        "context", "keys and values", "accepted length", "ms/token, dense", "ms/token, drafted",
        "speed", "tokens alike",
    ]  # fmt: skip
    rows = [
        [
            f"{entry['context']:,}",
            "a text's, repeated" if entry["is_repeated"] else "a text's",
            number(entry["accepted_length"], 2),
            number(1000 * entry["dense_s"], 1),
            number(1000 * entry["drafted_s"], 1),
            f"{entry['dense_s'] / entry['drafted_s']:.2f}x",
            f"{entry['same_tokens']}/{entry['tokens']}",
        ]
        for entry in run["extra"]["self_sparse"]
    ]
    return Table(f"self-sparse, {run['dtype']}", header, rows, note)


def _row(entry: Mapping[str, Any]) -> list[str]:
    is_read = entry["mean_pages"] is not None
    return [
        f"{entry['context']:,}",
        str(entry["rows"]),
        str(entry["queries"]),
        entry["way"],
        number(1000 * entry["step_s"]["p50"], 2),
        times(entry["over_dense"]),
        percentiles(entry["over_dense"], 2),
        times(entry["over_hf"]),
        number(entry["mean_pages"], 0) if is_read else "all",
        f"{entry['share']:.0%}" if is_read else "100%",
    ]


def sparse_figure(run: Mapping[str, Any]) -> Figure:
    """Draw a layer's time and pages against the context, and the whole model's time."""
    figure, (left, middle, right) = panels(3)
    steps = [e for e in run["extra"]["steps"] if e["rows"] == 1 and e["queries"] == 1]
    ways = list(dict.fromkeys(entry["way"] for entry in steps))
    for axis, level, what in (
        (left, "layer", "step_s"), (middle, "layer", "mean_pages"), (right, "model", "step_s"),
    ):  # fmt: skip
        for place, way in enumerate(ways):
            here = [e for e in steps if (e["level"], e["way"]) == (level, way)]
            if what == "mean_pages":
                values = [e["mean_pages"] or e["context"] / 16 for e in here]
            else:
                values = [1000 * e["step_s"]["p50"] for e in here]
            axis.plot(
                [e["context"] for e in here], values, label=way, color=COLOURS[place % 7],
                marker=MARKERS[place % 7],
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("context, tokens")
    left.set(title="one layer", ylabel="ms a step")
    middle.set(title="one layer", ylabel="pages read per key head")
    right.set(title="whole model", ylabel="ms a step")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(
        f"A decoding step over long contexts ({run['dtype']})", x=0.01, ha="left", fontsize=12,
        weight="bold",
    )  # fmt: skip
    return figure
