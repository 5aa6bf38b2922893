"""Markdown tables of result files, and documents that show them between markers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks.contenders import PLAIN
from dspark_hf.benchmarks.settings import DTYPES, SECTIONS
from dspark_hf.benchmarks.stats import ALL
from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MARKER = re.compile(
    r"(?P<open><!-- bench:(?P<name>[\w-]+) -->\n?)(?P<body>.*?)(?P<close><!-- /bench -->)",
    re.DOTALL,
)
OPENING = re.compile(r"<!-- bench:([\w-]+) -->")
HEADLINE = "headline"
"""Marker of the sentence."""
OVERVIEW = "overview"


@dataclass(frozen=True)
class Table:
    """A table of text, before it becomes markdown or a terminal's.

    Attributes:
        title: What it shows.
        header: Column titles.
        rows: Cells.
        note: Conditions of the measurement; belongs below the table.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Return the table in markdown, numbers to the right, the note below."""
        if not self.header:
            return f"{self.note}\n"
        num_left = 2 if len(self.header) > 1 else 1
        rule = ["---" if i < num_left else "---:" for i in range(len(self.header))]
        lines = [_line(self.header), _line(rule), *(_line(row) for row in self.rows)]
        return "\n".join([*lines, *(["", self.note] if self.note else [])]) + "\n"


def all_tables(results: Mapping[str, Any]) -> dict[str, list[Table]]:
    """Return every table a result file can fill, by marker name.

    Args:
        results: A result file's contents.

    Returns:
        dict[str, list[Table]]: "prompts-bfloat16" and so on for each entry, "prompts" and so on
        for a section in every dtype, "overview", and the sentence "headline".
    """
    runs = results["runs"]
    tables: dict[str, list[Table]] = {}
    for section in SECTIONS:
        for dtype in DTYPES:
            if (key := f"{section}-{dtype}") in runs:
                table = run_table(runs[key], results)
                tables[key] = [table]
                tables.setdefault(section, []).append(table)
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
            _times(summary["ratio"])
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
    columns = {"context": _context_row, "recheck": _recheck_row}.get(run["section"], _row)
    cells = [columns(summary) for summary in run["summary"]]
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
                summary["contender"], run["dtype"], str(batch), _accepted(summary),
                _number(summary["tokens_per_s"]["p50"], 1),
                _times(summary["ratio"]), _range(summary["ratio"], 2), _same(summary),
            ]
            for summary in run["summary"]
            if summary["group"] == group
        )  # fmt: skip
    header = [
        "generate()", "dtype", "batch", "accepted length", "tokens/s", "speed", "20-80 %",
        "same text",
    ]  # fmt: skip
    return Table("overview", header, rows, "<br>\n".join(dict.fromkeys(notes)))


def update_markers(text: str, tables: Mapping[str, Sequence[Table]]) -> tuple[str, list[str]]:
    """Replace what a document shows between markers.

    Args:
        text: A document with `<!-- bench:NAME -->` and `<!-- /bench -->` around each place.
        tables: From `all_tables`.

    Returns:
        tuple[str, list[str]]: The document, and the names of the places filled.

    Raises:
        ConfigError: If there is no place, one is not closed, or its name is not known.
    """
    opened, found = OPENING.findall(text), [match["name"] for match in MARKER.finditer(text)]
    if not opened:
        raise ConfigError(
            "the document must hold `<!-- bench:NAME -->` and `<!-- /bench -->`; got neither. Add "
            f"them where a table belongs; names are {sorted(tables)}."
        )
    if opened != found:
        raise ConfigError(
            f"every `<!-- bench:NAME -->` must be closed by `<!-- /bench -->`; got {opened} opened "
            f"and {found} closed."
        )
    for name in found:
        if name not in tables:
            raise ConfigError(
                f"a marker must name a table of the result file, one of {sorted(tables)}; got "
                f"{name!r}. Correct the marker, or measure that section first."
            )

    def filled(match: re.Match[str]) -> str:
        return (
            f"<!-- bench:{match['name']} -->\n{as_markdown(tables[match['name']])}{match['close']}"
        )

    return MARKER.sub(filled, text), found


def as_markdown(tables: Sequence[Table], *, titles: bool | None = None) -> str:
    """Return tables below each other.

    Args:
        tables: In order.
        titles: Whether each gets its title; None if there are several.

    Returns:
        str: Markdown, ending in a line break.
    """
    wants = len(tables) > 1 if titles is None else titles
    return "\n".join(
        f"**{table.title}**\n\n{table.markdown()}" if wants else table.markdown()
        for table in tables
    )


def _row(summary: Mapping[str, Any]) -> dict[str, str]:
    return {
        "prompts": summary["group"],
        "generate()": summary["contender"],
        "tokens/s": _number(summary["tokens_per_s"]["p50"], 1),
        "tokens/s 20-80 %": _range(summary["tokens_per_s"], 1),
        "speed": _times(summary["ratio"]),
        "speed 20-80 %": _range(summary["ratio"], 2),
        "per CPU second": _times(summary["cpu_ratio"]),
        "accepted length": _accepted(summary),
        "same text": _same(summary),
    }


def _context_row(summary: Mapping[str, Any]) -> dict[str, str]:
    rate, details = summary["tokens_per_s"], summary["details"]
    per_token = {"p20": 1000 / rate["p80"], "p50": 1000 / rate["p50"], "p80": 1000 / rate["p20"]}
    decoded = summary["new_tokens"] / summary["calls"]
    return {
        "prompt": summary["group"],
        "generate()": summary["contender"],
        "ms/token": _number(per_token["p50"], 1),
        "ms/token 20-80 %": _range(per_token, 1),
        "ms/token by subtraction": _number(1000 * details["subtracted_s"]["p50"] / decoded, 1),
        "speed": _times(summary["ratio"]),
        "speed 20-80 %": _range(summary["ratio"], 2),
        "per CPU second": _times(summary["cpu_ratio"]),
        "first token, s": _number(details["first_token_s"]["p50"], 2),
        "same text": _same(summary),
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
        "largest margin": "-" if margin is None else _number(margin, 3),
        "rechecks": str(summary.get("rechecks", "-")),
        "choices changed": str(summary.get("flips", "-")),
        "speed": _times(summary["ratio"]),
        "speed 20-80 %": _range(summary["ratio"], 2),
    }


def _note(run: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    machine, versions, settings = results["machine"], run["versions"], run["settings"]
    load = " to ".join("?" if value is None else f"{value:.2f}" for value in run["load_average"])
    items = len({row["item"] for row in run["rows"]})
    parts = [
        f"{results['model']['name']}, {run['dtype']}",
        f"{items} x {settings['repeats']} calls each",
        f"{machine['cpu']}, {machine['cores']} cores, {run['threads']} threads, load {load}",
        f"torch {versions['torch']}, transformers {versions['transformers']}",
        run["date"].split()[0],
    ]
    parts += [f"{name} cannot run here" for name in run["excluded"]]
    if (cost := run["extra"].get("recheck_over_plain_verify")) is not None:
        parts.append(f"recheck runs at {_times(cost)} of the speed without it ({_range(cost, 2)})")
    for name, count in run["extra"].get("unlike_undrafted", {}).items():
        parts.append(f"{count} texts of {name} are unlike dspark-none's")
    return f"{run['section']}: " + "; ".join(parts) + "."


def _same(summary: Mapping[str, Any]) -> str:
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


def _accepted(summary: Mapping[str, Any]) -> str:
    length = summary.get("accepted_length")
    return "-" if length is None else _number(length, 2)


def _times(values: Mapping[str, float] | None) -> str:
    return "1" if values is None else f"{values['p50']:.2f}x"


def _range(values: Mapping[str, float] | None, digits: int) -> str:
    return "-" if values is None else f"{values['p20']:.{digits}f}-{values['p80']:.{digits}f}"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
