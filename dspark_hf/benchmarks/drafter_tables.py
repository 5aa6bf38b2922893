"""Table rows of the sections about drafters, and how every table writes its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks.markers import Table

if TYPE_CHECKING:
    from collections.abc import Mapping


def scheduling_row(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of "scheduling": speed beside what was verified for it."""
    rounds = summary.get("rounds")
    verified = number(summary["verified"] / rounds, 2) if rounds else "-"
    return {
        "rows": summary["group"].split()[0],
        "schedule": summary["contender"],
        "tokens/s": number(summary["tokens_per_s"]["p50"], 1),
        "speed": times(summary["ratio"]),
        "speed 20-80 %": percentiles(summary["ratio"], 2),
        "per CPU second": times(summary["cpu_ratio"]),
        "accepted length": accepted_text(summary),
        "verified drafts per row and round": verified,
        "same text": same_text(summary),
    }


def drafter_row(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of "drafter"; sampled texts are drawn anew and not compared."""
    is_greedy = summary["group"].endswith("greedy")
    return {
        "prompts": summary["group"],
        "generate()": summary["contender"],
        "accepted length": accepted_text(summary),
        "tokens/s": number(summary["tokens_per_s"]["p50"], 1),
        "speed": times(summary["ratio"]),
        "speed 20-80 %": percentiles(summary["ratio"], 2),
        "per CPU second": times(summary["cpu_ratio"]),
        "same text": same_text(summary) if is_greedy else "-",
    }


def pooled_rows(run: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the rows of "never-slower": pooled speed beside the spread over prompts."""
    by_key = {(s["group"], s["contender"]): s for s in run["summary"]}
    rows = []
    for entry in run["extra"]["pooled"]:
        summary = by_key[entry["group"], entry["contender"]]
        rows.append(
            {
                "prompts": entry["group"],
                "generate()": entry["contender"],
                "number": str(summary["items"]),
                "pooled speed": f"{entry['ratio']:.2f}x",
                "per CPU second": f"{entry['cpu_ratio']:.2f}x",
                "median": times(summary["ratio"]),
                "20-80 %": percentiles(summary["ratio"], 2),
                "calls slower than plain": f"{entry['share_slower']:.0%}",
                "accepted length": accepted_text(summary),
                "same text": same_text(summary),
            }
        )
    return rows


def split_table(run: Mapping[str, Any], note: str) -> Table:
    """Return what a forward costs by how its drafts are spread over eight rows.

    Args:
        run: Of the section "scheduling".
        note: Conditions of the measurement.
    """
    rows = [
        [
            " ".join(map(str, split["lengths"])), number(1000 * split["step_s"]["p50"], 2),
            f"{split['ratio']['p50']:.3f}", percentiles(split["ratio"], 3),
        ]
        for split in run["extra"]["splits"]
    ]  # fmt: skip
    header = ["drafts verified per row", "ms", "against the first", "20-80 %"]
    return Table(f"split, {run['dtype']}", header, rows, note)


def same_text(summary: Mapping[str, Any]) -> str:
    """Say how many texts equal plain's, and how close the others came."""
    texts, margin = summary["texts"], summary["largest_margin"]
    parts = [f"{texts - summary['texts_that_differ']}/{texts}"]
    if summary["near_ties"]:
        parts.append(f"{summary['near_ties']} near-ties")
    if summary["other_differences"]:
        parts.append(f"{summary['other_differences']} others")
    if margin is not None:
        parts.append(f"margin to {margin:.3g}")
    if summary.get("fallback_calls"):
        parts.append(f"{summary['fallback_calls']} calls in the model's own loop")
    return ", ".join(parts)


def accepted_text(summary: Mapping[str, Any]) -> str:
    """Show the accepted length; a dash where Transformers does not report its own."""
    length = summary.get("accepted_length")
    return "-" if length is None else number(length, 2)


def times(values: Mapping[str, float] | None) -> str:
    """Show a ratio's median; 1 for the baseline."""
    return "1" if values is None else f"{values['p50']:.2f}x"


def percentiles(values: Mapping[str, float] | None, digits: int) -> str:
    """Show the 20th and 80th percentile."""
    return "-" if values is None else f"{values['p20']:.{digits}f}-{values['p80']:.{digits}f}"


def number(value: float, digits: int) -> str:
    """Show a number."""
    return f"{value:.{digits}f}"
