"""Plots of an evaluation: acceptance by position, reliability, thresholds, accepted length."""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import TYPE_CHECKING, Any

from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.tables import decoding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, told apart without colour vision; lines have markers besides."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL = (4.8, 3.9)
"""Width and height of a panel, in inches."""
DPI = 150
FEWEST_TESTED = 10
"""Rounds below which a share is left out of the plot; the file and the table have it."""
SETTINGS: dict[str, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e3e5e8", "grid.linewidth": 0.7, "axes.axisbelow": True,
    "axes.titlelocation": "left", "axes.titlesize": 11, "legend.frameon": False,
    "legend.fontsize": 9, "lines.linewidth": 1.8, "lines.markersize": 5,
}  # fmt: skip


def require_matplotlib() -> None:
    """Refuse to go on without the plotting library.

    Raises:
        ConfigError: Saying how to get it or do without.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "plots need matplotlib; it is not installed. Run `pip install 'dspark-hf[eval]'`, or "
            "pass --no-plots."
        )


def draw_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every plot a result file can fill, of its first run.

    Args:
        results: A result file's contents.
        folder: Where the PNG files go; made if absent.

    Returns:
        list[Path]: The files.
    """
    run = next(iter(results["runs"].values()))
    plots: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
        "acceptance_by_position": _positions,
        "accepted_length": _lengths,
    }
    if run["calibration"] is not None:
        plots.update(reliability=_reliability, threshold=_thresholds)
    return [save(draw, run, folder / f"{name}.png") for name, draw in plots.items()]


def save(draw: Callable[[Mapping[str, Any]], Figure], run: Mapping[str, Any], path: Path) -> Path:
    """Draw a run in this package's style and write it as PNG."""
    mpl: Any = importlib.import_module("matplotlib")
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(SETTINGS):
        draw(run).savefig(path, dpi=DPI)
    return path


def panels(count: int, *, width: float = PANEL[0]) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side, drawn without any global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, PANEL[1]), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _positions(run: Mapping[str, Any]) -> Figure:
    temperatures = _temperatures(run)
    figure, axes = panels(len(temperatures))
    for axis, temperature in zip(axes, temperatures, strict=True):
        for place, entry in enumerate(_at(run["groups"], temperature)):
            found = [at for at in entry["positions"] if at["tested"] >= FEWEST_TESTED]
            _line(
                axis, place, [at["position"] for at in found], [at["rate"] for at in found],
                entry["group"],
            )  # fmt: skip
        axis.set(
            title=decoding(temperature),
            xlabel="draft position",
            ylabel="accepted, of those reached",
            ylim=(0, 1.02),
            xticks=range(1, run["num_drafts"] + 1),
        )
    _legend_below(figure, axes[0])
    return _titled(
        figure, run, f"Acceptance by position, where at least {FEWEST_TESTED} rounds tested it"
    )


def _lengths(run: Mapping[str, Any]) -> Figure:
    temperatures = _temperatures(run)
    figure, axes = panels(len(temperatures))
    series = {run["drafter"]: run["groups"], **run["against"]}
    width = 0.8 / len(series)
    for axis, temperature in zip(axes, temperatures, strict=True):
        names = [entry["group"] for entry in _at(run["groups"], temperature)]
        for place, (label, entries) in enumerate(series.items()):
            values = [entry["accepted_length"] for entry in _at(entries, temperature)]
            places = [i + (place - (len(series) - 1) / 2) * width for i in range(len(names))]
            bars = axis.bar(places, values, width * 0.92, color=COLOURS[place % 7], label=label)
            axis.bar_label(bars, fmt="%.2f", fontsize=7 if len(series) > 2 else 8, padding=1)
        axis.axhline(1, color="#555555", linewidth=1, linestyle="--")
        axis.set(title=decoding(temperature), xticks=range(len(names)), ylim=(0, None))
        axis.set_xticklabels(names)
        axis.set_ylabel("accepted length (tokens per round)")
        axis.grid(visible=False, axis="x")
        axis.margins(y=0.12)
    _legend_below(figure, axes[0])
    return _titled(figure, run, "Accepted length; the dashed line is plain decoding")


def _reliability(run: Mapping[str, Any]) -> Figure:
    entries = run["calibration"]["groups"]
    figure, axes = panels(2)
    names = (("before", "as stated"), ("after", "scaled"))
    for axis, (name, title) in zip(axes, names, strict=True):
        axis.plot([0, 1], [0, 1], color="#555555", linewidth=1, linestyle="--")
        for place, temperature in enumerate(_temperatures(run)):
            total = _at(entries, temperature)[-1][name]
            bins = total["reliability"]
            label = f"{decoding(temperature)}, error {total['ece']:.1%}"
            said = [entry["mean_probability"] for entry in bins]
            came = [entry["frequency"] for entry in bins]
            _line(axis, place, said, came, label)
            sizes = [60 * math.log10(10 * entry["count"]) for entry in bins]
            axis.scatter(said, came, sizes, color=COLOURS[place % 7], alpha=0.2, linewidths=0)
        axis.set(
            title=title,
            xlabel="stated probability of surviving",
            ylabel="share that survived",
            xlim=(0, 1),
            ylim=(0, 1.02),
        )
        axis.legend(loc="upper left")
    return _titled(
        figure, run, "Reliability of the confidences; discs grow with the logarithm of the count"
    )


def _thresholds(run: Mapping[str, Any]) -> Figure:
    entries = run["calibration"]["groups"]
    figure, axes = panels(2)
    left, right = axes
    for place, temperature in enumerate(_temperatures(run)):
        sweep = _at(entries, temperature)[-1]["thresholds"]
        if not sweep:
            continue
        thresholds = [at["threshold"] for at in sweep]
        verified = [at["verified_per_round"] for at in sweep]
        lengths = [at["accepted_length"] for at in sweep]
        label = decoding(temperature)
        _line(left, place, thresholds, lengths, f"{label}: accepted length")
        left.plot(
            thresholds, verified, color=COLOURS[place % 7], linestyle=":",
            label=f"{label}: verified drafts",
        )  # fmt: skip
        _line(right, place, verified, lengths, label)
        for at in sweep[::4]:
            right.annotate(
                f"{at['threshold']:g}", (at["verified_per_round"], at["accepted_length"]),
                xytext=(3, -11), textcoords="offset points", fontsize=8, color="#555555",
            )  # fmt: skip
    left.set(xlabel="confidence threshold", ylabel="tokens per round", ylim=(0, None))
    left.set_title("by threshold")
    right.set(xlabel="verified drafts per round", ylabel="accepted length")
    right.set_title("what verifying more gains (numbers: threshold)")
    left.legend(loc="best")
    right.legend(loc="lower right")
    return _titled(figure, run, "Confidence threshold")


def _line(axis: Axes, place: int, x: Sequence[float], y: Sequence[float], label: str) -> None:
    axis.plot(x, y, color=COLOURS[place % 7], marker=MARKERS[place % 7], label=label)


def _legend_below(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _titled(figure: Figure, run: Mapping[str, Any], title: str) -> Figure:
    # What was measured goes on a line of its own: one line would be cut at the figure's edge.
    figure.suptitle(
        f"{title}\n{run['drafter']}, {run['dtype']}", x=0.01, ha="left", fontsize=11, weight="bold"
    )
    return figure


def _temperatures(run: Mapping[str, Any]) -> list[float]:
    return list(run["settings"]["temperatures"])


def _at(entries: Sequence[Mapping[str, Any]], temperature: float) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if entry["temperature"] == temperature]
