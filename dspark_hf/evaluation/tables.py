"""Tables of an evaluation's result file, for documents and model cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks.markers import Table
from dspark_hf.evaluation.figures import INTERVAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHOWN_THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds a table shows; the file and the plot have all."""


def all_tables(results: Mapping[str, Any]) -> dict[str, list[Table]]:
    """Return every table a result file can fill, by marker name.

    Args:
        results: A result file's contents.

    Returns:
        dict[str, list[Table]]: "acceptance" and "positions"; "depth" of block drafters,
        "calibration" and "threshold" of those with confidences, "against" where others were
        evaluated. One table per run in each.
    """
    tables: dict[str, list[Table]] = {}
    for run in results["runs"].values():
        note = _note(run, results)
        made = {
            "acceptance": _acceptance(run, note),
            "positions": _positions(run, note),
        }
        if any(entry["depth"] for entry in run["groups"]):
            made["depth"] = _depth(run, note)
        if run["calibration"] is not None:
            made["calibration"] = _calibration(run, note)
            made["threshold"] = _threshold(run, note)
        if run["against"]:
            made["against"] = _against(run, note)
        for name, table in made.items():
            tables.setdefault(name, []).append(table)
    return tables


def decoding(temperature: float) -> str:
    """Return how decoding at a temperature is called."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def _acceptance(run: Mapping[str, Any], note: str) -> Table:
    header = [
        "prompts", "decoding", "accepted length", "accepted drafts per round", "rounds", "tokens",
    ]  # fmt: skip
    rows = [
        [
            entry["group"], decoding(entry["temperature"]), f"{entry['accepted_length']:.2f}",
            f"{entry['accepted_per_round']:.2f}", f"{entry['rounds']:,}",
            f"{entry['new_tokens']:,}",
        ]
        for entry in run["groups"]
    ]  # fmt: skip
    return Table(f"acceptance of {run['drafter']}, {run['dtype']}", header, rows, note)


def _positions(run: Mapping[str, Any], note: str) -> Table:
    header = ["prompts", "decoding", *(str(k + 1) for k in range(run["num_drafts"]))]
    rows = [
        [
            entry["group"],
            decoding(entry["temperature"]),
            *(
                "-" if at["rate"] is None else f"{at['rate']:.0%} ({at['tested']:,})"
                for at in entry["positions"]
            ),
        ]
        for entry in run["groups"]
    ]
    text = f"Share accepted of the rounds that tested a position (their number in brackets). {note}"
    return Table(f"acceptance by position of {run['drafter']}, {run['dtype']}", header, rows, text)


def _depth(run: Mapping[str, Any], note: str) -> Table:
    header = ["prompts", "decoding", *(str(k + 1) for k in range(run["num_drafts"]))]
    rows = [
        [
            entry["group"],
            decoding(entry["temperature"]),
            *(f"{at['accepted_length']:.2f}" for at in entry["depth"]),
        ]
        for entry in run["groups"]
        if entry["depth"]
    ]
    text = f"Expected accepted length if blocks were cut to 1, 2, ... drafts. {note}"
    return Table(f"draft length of {run['drafter']}, {run['dtype']}", header, rows, text)


def _calibration(run: Mapping[str, Any], note: str) -> Table:
    calibration = run["calibration"]
    header = [
        "position", "decoding", "temperature", "shift", "error before", "error after", "by chance",
        "AUC",
    ]  # fmt: skip
    rows = []
    for entry in _totals(calibration["groups"]):
        before, after = entry["before"], entry["after"]
        columns = zip(
            entry["scaling"]["temperatures"],
            entry["scaling"]["shifts"],
            before["ece_by_position"],
            after["ece_by_position"],
            after["chance_by_position"],
            after["auc_by_position"],
            strict=True,
        )
        for k, (heat, shift, old, new, chance, auc) in enumerate(columns, start=1):
            rows.append(
                [
                    str(k), decoding(entry["temperature"]), f"{heat:.2f}",
                    f"{shift:+.2f}", f"{old:.1%}", f"{new:.1%}", f"{chance:.1%}", _ranks(auc),
                ]
            )  # fmt: skip
        rows.append(
            [
                "all", decoding(entry["temperature"]), "", "", f"{before['ece']:.1%}",
                f"{after['ece']:.1%}", "", _ranks(after["auc"]),
            ]
        )  # fmt: skip
    text = (
        "Expected calibration error of the survival of the first k drafts; by chance: the error of "
        "scaled confidences if they were right, as outcomes are finite; scaling "
        f"{calibration['source']}. {note}"
    )
    return Table(f"calibration of {run['drafter']}, {run['dtype']}", header, rows, text)


def _threshold(run: Mapping[str, Any], note: str) -> Table:
    header = [
        "confidence_threshold", "decoding", "accepted length", "verified drafts per round",
        "of these accepted",
    ]  # fmt: skip
    rows = [
        [
            f"{at['threshold']:g}", decoding(entry["temperature"]), f"{at['accepted_length']:.2f}",
            f"{at['verified_per_round']:.2f}",
            "-" if at["share_accepted"] is None else f"{at['share_accepted']:.0%}",
        ]
        for entry in _totals(run["calibration"]["groups"])
        for at in entry["thresholds"]
        if at["threshold"] in SHOWN_THRESHOLDS
    ]  # fmt: skip
    text = f"Computed from rounds of whole blocks, {run['num_drafts']} drafts each. {note}"
    return Table(f"threshold of {run['drafter']}, {run['dtype']}", header, rows, text)


def _against(run: Mapping[str, Any], note: str) -> Table:
    header = [
        "prompts", "against", "decoding", "its accepted length", "ours", "more accepted drafts",
        f"{INTERVAL[0]}-{INTERVAL[1]} %",
    ]  # fmt: skip
    ours = {(entry["temperature"], entry["group"]): entry for entry in run["groups"]}
    rows = [
        [
            entry["group"], other, decoding(entry["temperature"]),
            f"{entry['accepted_length']:.2f}",
            f"{ours[entry['temperature'], entry['group']]['accepted_length']:.2f}",
            "-" if entry["gain"] is None else f"{entry['gain']:+.0%}",
            "-" if entry["interval"] is None else "{:+.0%} to {:+.0%}".format(*entry["interval"]),
        ]
        for other, entries in run["against"].items()
        for entry in entries
    ]  # fmt: skip
    text = (
        f"Accepted drafts per round relative to the other drafter's; intervals over prompts. {note}"
    )
    return Table(f"{run['drafter']} against others, {run['dtype']}", header, rows, text)


def _totals(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last entry of every temperature: all groups together."""
    last = {entry["temperature"]: entry for entry in entries}
    return list(last.values())


def _ranks(auc: float | None) -> str:
    return "-" if auc is None else f"{auc:.2f}"


def _note(run: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    prompts = len({row["prompt"] for row in run["rows"]})
    return (
        f"{results['model']['name']}, {run['dtype']}, drafter {run['drafter']} with blocks of "
        f"{run['num_drafts']}; {prompts} prompts x {run['settings']['max_new_tokens']} tokens; "
        f"torch {run['versions']['torch']}, transformers {run['versions']['transformers']}; "
        f"{run['date'].split()[0]}."
    )
