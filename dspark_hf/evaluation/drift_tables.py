"""Tables of a drift result file, for the terminal and for documents."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks.markers import Table
from dspark_hf.benchmarks.results import read_json, require_format
from dspark_hf.evaluation.tables import all_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def drift_tables(results: Mapping[str, Any]) -> dict[str, list[Table]]:
    """Return every table that a drift result file can fill, by marker name.

    Args:
        results: What `dspark-hf eval perplexity --json` writes.

    Returns:
        dict[str, list[Table]]: "drift-TEXT" where policies were measured, "prefill-TEXT" where
        they read prompts, "needle-TEXT" where a needle was looked for; TEXT is the text's name.
    """
    text = re.sub(r"[^a-z0-9]+", "-", results["data"].removesuffix(".txt").lower()).strip("-")
    tables = {}
    if results.get("drift"):
        is_prompts = results["drift"][0]["path"] == "prefill"
        tables[f"{'prefill' if is_prompts else 'drift'}-{text}"] = [_drift(results)]
    if results.get("needle"):
        tables[f"needle-{text}"] = [_needle(results)]
    return tables


def read_tables(path: Path) -> dict[str, list[Table]]:
    """Return every table that an evaluation's result file can fill, by marker name.

    Args:
        path: Of `dspark-hf eval acceptance` or `dspark-hf eval perplexity --json`.

    Raises:
        ConfigError: If it is neither.
    """
    results = read_json(path)
    if isinstance(results, dict) and ("drift" in results or "needle" in results):
        return drift_tables(results)
    return all_tables(require_format(path, results))


def _drift(results: Mapping[str, Any]) -> Table:
    header = [
        "policy", "dense", "sparse", "drift", "95 % interval", "KL", "top-1", "shared",
        "pages a head", "share read", "calls", "speed",
    ]  # fmt: skip
    reports: Sequence[Mapping[str, Any]] = results["drift"]
    rows = [
        [
            report["policy"],
            f"{report['ppl_dense']:.4f}",
            f"{report['ppl_sparse']:.4f}",
            f"{report['drift']:+.2%}",
            "{:+.2%} to {:+.2%}".format(*report["drift_interval"]),
            f"{report['kl']:.4f}",
            f"{report['top1']:.1%}",
            f"{report['overlap']:.1%}",
            f"{report['mean_pages']:.1f} ± {report['spread_pages']:.1f}",
            f"{report['share']:.1%}",
            f"{report['sparse_calls']:,}",
            f"{report['dense_s'] / report['sparse_s']:.2f}x",
        ]
        for report in reports
    ]
    first = reports[0]
    how = f"{first['scored']:,} tokens scored in {first['windows']} windows of {first['context']:,}"
    if first.get("bos") == "every":
        how += ", each with a BOS token first"
    if first["path"] == "prefill":
        how += f", read as prompts, in blocks of {first['step_tokens']} tokens"
        return Table("Drift of sparse prompts", header, rows, _note(results, how))
    how += f", prompt read densely, then steps of {first['step_tokens']} token"
    return Table("Drift of sparse attention", header, rows, _note(results, how))


def _needle(results: Mapping[str, Any]) -> Table:
    answers: Sequence[Mapping[str, Any]] = results["needle"]
    depths = sorted({answer["depth"] for answer in answers})
    found = {(answer["policy"], answer["depth"]): answer["found"] for answer in answers}
    rows = [
        [
            name,
            f"{sum(found[name, depth] for depth in depths)} of {len(depths)}",
            *("found" if found[name, depth] else "-" for depth in depths),
        ]
        for name in dict.fromkeys(answer["policy"] for answer in answers)
    ]
    header = ["policy", "found", *(f"{depth:.0%}" for depth in depths)]
    return Table("Needle, by depth", header, rows, _note(results, "a code of five digits"))


def _note(results: Mapping[str, Any], how: str) -> str:
    machine = results["machine"]
    predictor = results["predictor"] or "bound"
    budgets = "" if results["budgets"] is None else f", budgets by layer of {results['budgets']}"
    return (
        f"{results['model']}, {results['dtype']}, {results['data']}: {how}; pages chosen by "
        f"{predictor}{budgets}; speed against our own dense reading, on {machine['cpu']}."
    )
