"""Tables of the benchmark's result files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks.contenders import PLAIN
from dspark_hf.benchmarks.drafter_tables import (
    accepted_text,
    drafter_row,
    number,
    percentiles,
    pooled_rows,
    same_text,
    scheduling_row,
    split_table,
    times,
)
from dspark_hf.benchmarks.markers import Table
from dspark_hf.benchmarks.queue_tables import queue_tables
from dspark_hf.benchmarks.settings import DTYPES, SECTIONS
from dspark_hf.benchmarks.sparse_tables import sparse_tables
from dspark_hf.benchmarks.stats import ALL

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADLINE = "headline"
"""Marker of the sentence."""
OVERVIEW = "overview"
OWN_TABLES = {"queue": queue_tables, "sparse": sparse_tables}
"""Sections that are more than one table."""


def all_tables(results: Mapping[str, Any]) -> dict[str, list[Table]]:
    """Return every table a result file can fill, by marker name.

    Args:
        results: A result file's contents.

    Returns:
        dict[str, list[Table]]: "prompts-bfloat16" and so on for each entry, "prompts" and so on
        for a section in every dtype, "split" beside "scheduling", "overview", and the sentence
        "headline".
    """
    runs = results["runs"]
    tables: dict[str, list[Table]] = {}
    for section in SECTIONS:
        for dtype in DTYPES:
            if (key := f"{section}-{dtype}") in runs and section in OWN_TABLES:
                note = _note(runs[key], results)
                for name, table in OWN_TABLES[section](runs[key], note).items():
                    tables[f"{name}-{dtype}"] = [table]
                    tables.setdefault(name, []).append(table)
            elif key in runs:
                table = run_table(runs[key], results)
                tables[key] = [table]
                tables.setdefault(section, []).append(table)
                if runs[key]["extra"].get("splits"):
                    split = split_table(runs[key], _note(runs[key], results))
                    tables[f"split-{dtype}"] = [split]
                    tables.setdefault("split", []).append(split)
    overview = overview_table(results)
    if overview.rows:
        tables[OVERVIEW] = [overview]
    sentence = headline(results)
    if sentence is not None:
        tables[HEADLINE] = [Table(HEADLINE, [], [], sentence)]
    return tables


def headline(results: Mapping[str, Any]) -> str | None:
    """Return the one sentence a reader takes away, from the bfloat16 runs.

    Args:
        results: A result file's contents.

    Returns:
        str | None: Ratios of `dspark-lookup` to plain generate(); None without the prompts run.
    """
    run, batch = (results["runs"].get(f"{name}-bfloat16") for name in ("prompts", "batch"))
    if run is None:
        return None

    def ratio(part: Mapping[str, Any], group: str) -> str | None:
        found = [
            times(summary["ratio"])
            for summary in part["summary"]
            if summary["group"] == group and summary["contender"] == "dspark-lookup"
        ]
        return found[0] if found else None

    parts = [
        (ratio(run, "rewrite"), "on prompts whose answers repeat them"),
        (ratio(run, ALL), "over chat, code, maths and rewriting together"),
    ]
    if batch is not None:
        parts.append((ratio(batch, batch["summary"][0]["group"]), "for eight prompts in a batch"))
    said = [f"{number} {where}" for number, where in parts if number is not None]
    return f"Measured in bfloat16 on a CPU, without a drafting model: {', '.join(said)}."


def run_table(run: Mapping[str, Any], results: Mapping[str, Any]) -> Table:
    """Return the table of one section in one dtype.

    Args:
        run: An entry of the result file.
        results: The whole file, for machine and model.

    Returns:
        Table: A row per group and contender.
    """
    columns = {
        "context": _context_row,
        "recheck": _recheck_row,
        "scheduling": scheduling_row,
        "drafter": drafter_row,
    }.get(run["section"], _row)
    cells = [columns(summary) for summary in run["summary"]]
    if run["section"] == "never-slower":
        cells = pooled_rows(run)
    rows = [list(row.values()) for row in cells]
    title = f"{run['section']}, {run['dtype']}"
    return Table(title, list(cells[0]) if cells else [], rows, _note(run, results))


def overview_table(results: Mapping[str, Any]) -> Table:
    """Return speed-ups of all prompts together and of the batch, one row per contender.

    Args:
        results: A result file's contents.

    Returns:
        Table: Transformers' own means beside this package's.
    """
    rows: list[list[str]] = []
    notes: list[str] = []
    for key in [f"{section}-{dtype}" for section in ("prompts", "batch") for dtype in DTYPES]:
        run = results["runs"].get(key)
        if run is None:
            continue
        groups = list(dict.fromkeys(summary["group"] for summary in run["summary"]))
        group = ALL if ALL in groups else groups[0]
        plain = next(s for s in run["summary"] if s["group"] == group and s["contender"] == PLAIN)
        batch = plain["texts"] // plain["calls"]
        notes.append(_note(run, results))
        rows.extend(
            [
                summary["contender"], run["dtype"], str(batch), accepted_text(summary),
                number(summary["tokens_per_s"]["p50"], 1),
                times(summary["ratio"]), percentiles(summary["ratio"], 2), same_text(summary),
            ]
            for summary in run["summary"]
            if summary["group"] == group
        )  # fmt: skip
    header = [
        "generate()", "dtype", "batch", "accepted length", "tokens/s", "speed", "20-80 %",
        "same text",
    ]  # fmt: skip
    return Table("overview", header, rows, "<br>\n".join(dict.fromkeys(notes)))


def _row(summary: Mapping[str, Any]) -> dict[str, str]:
    return {
        "prompts": summary["group"],
        "generate()": summary["contender"],
        "tokens/s": number(summary["tokens_per_s"]["p50"], 1),
        "tokens/s 20-80 %": percentiles(summary["tokens_per_s"], 1),
        "speed": times(summary["ratio"]),
        "speed 20-80 %": percentiles(summary["ratio"], 2),
        "per CPU second": times(summary["cpu_ratio"]),
        "accepted length": accepted_text(summary),
        "same text": same_text(summary),
    }


def _context_row(summary: Mapping[str, Any]) -> dict[str, str]:
    rate, details = summary["tokens_per_s"], summary["details"]
    per_token = {"p20": 1000 / rate["p80"], "p50": 1000 / rate["p50"], "p80": 1000 / rate["p20"]}
    decoded = summary["new_tokens"] / summary["calls"]
    return {
        "prompt": summary["group"],
        "generate()": summary["contender"],
        "ms/token": number(per_token["p50"], 1),
        "ms/token 20-80 %": percentiles(per_token, 1),
        "ms/token by subtraction": number(1000 * details["subtracted_s"]["p50"] / decoded, 1),
        "speed": times(summary["ratio"]),
        "speed 20-80 %": percentiles(summary["ratio"], 2),
        "per CPU second": times(summary["cpu_ratio"]),
        "first token, s": number(details["first_token_s"]["p50"], 2),
        "same text": same_text(summary),
    }


def _recheck_row(summary: Mapping[str, Any]) -> dict[str, str]:
    margin = summary["largest_margin"]
    return {
        "prompts": summary["group"],
        "generate()": summary["contender"],
        "texts": str(summary["texts"]),
        "forks": str(summary["texts_that_differ"]),
        "of these near-ties": str(summary["near_ties"]),
        "margin below 0.1": str(summary["margins_below_0_1"]),
        "largest margin": "-" if margin is None else number(margin, 3),
        "rechecks": str(summary.get("rechecks", "-")),
        "choices changed": str(summary.get("flips", "-")),
        "speed": times(summary["ratio"]),
        "speed 20-80 %": percentiles(summary["ratio"], 2),
    }


def _note(run: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    machine, versions, settings = results["machine"], run["versions"], run["settings"]
    load = " to ".join("?" if value is None else f"{value:.2f}" for value in run["load_average"])
    items = len({row["item"] for row in run["rows"]})
    parts = [
        f"{results['model']['name']}, {run['dtype']}",
        # Sections without rows tell in their tables how often they measured.
        *([f"{items} x {settings['repeats']} calls each"] if items else []),
        f"{machine['cpu']}, {machine['cores']} cores, {run['threads']} threads, load {load}",
        f"torch {versions['torch']}, transformers {versions['transformers']}",
        run["date"].split()[0],
    ]
    parts += [f"{name} cannot run here" for name in run["excluded"]]
    if (cost := run["extra"].get("recheck_over_plain_verify")) is not None:
        parts.append(
            f"recheck runs at {times(cost)} of the speed without it ({percentiles(cost, 2)})"
        )
    for name, count in run["extra"].get("unlike_undrafted", {}).items():
        parts.append(f"{count} texts of {name} are unlike dspark-none's")
    return f"{run['section']}: " + "; ".join(parts) + "."
