"""Plot of a sweep: drift with its interval, and speed of steps or prompts, by tokens read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dspark_hf.evaluation.plots import COLOURS, DPI, SETTINGS, panels

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def draw_sweep(results: Mapping[str, Any], path: Path) -> None:
    """Write the plot of a drift result file.

    Args:
        results: With "drift", a list of reports with their "tokens".
        path: The PNG file.
    """
    from matplotlib import rc_context

    reports = sorted(results["drift"], key=lambda report: report["tokens"])
    tokens = [report["tokens"] for report in reports]
    drift = [100 * report["drift"] for report in reports]
    # A bootstrap interval need not hold its estimate where there is a single block.
    below = [max(d - 100 * r["drift_interval"][0], 0) for d, r in zip(drift, reports, strict=True)]
    above = [max(100 * r["drift_interval"][1] - d, 0) for d, r in zip(drift, reports, strict=True)]
    speed = [report["dense_s"] / report["sparse_s"] for report in reports]
    with rc_context(cast("Any", SETTINGS)):
        figure, (left, right) = panels(2)
        left.errorbar(tokens, drift, yerr=[below, above], color=COLOURS[0], marker="o", capsize=3)
        left.axhline(0, color="#888888", linewidth=1)
        left.set(title="Perplexity rise, 95 % interval", ylabel="per cent")
        right.plot(tokens, speed, color=COLOURS[1], marker="s")
        right.axhline(1, color="#888888", linewidth=1)
        what = "prompts" if reports[0].get("path") == "prefill" else "steps"
        right.set(title=f"Speed of {what} against our dense ones", ylabel="times")
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xticks(tokens, [str(count) for count in tokens])
            axis.minorticks_off()
            axis.set_xlabel("tokens read per key head")
        first = reports[0]
        figure.suptitle(
            f"{results['model']}, {results['dtype']}, context {first['context']}, "
            f"{first['scored']} tokens scored",
            fontsize=10,
        )
        figure.savefig(path, dpi=DPI)
