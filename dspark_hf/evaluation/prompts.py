"""Prompts of an evaluation and those of a calibration, which never meet; or a file of one's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dspark_hf.data import GROUPS, Prompt, load_calibration_prompts, load_prompts
from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = ("prompt", "text")
"""Where a line of a prompt file may keep its text; the first that is there counts."""


def evaluation_prompts(limit: int | None = None) -> list[Prompt]:
    """Return the shipped prompts that drafters are judged by.

    Args:
        limit: Prompts per group at most, of 15; None for all.
    """
    return [prompt for group in GROUPS for prompt in load_prompts(group)[:limit]]


def calibration_prompts(limit: int | None = None) -> list[Prompt]:
    """Return the shipped prompts that confidences are calibrated on.

    Args:
        limit: Prompts per group at most, of 18 to 36; None for all 120.
    """
    return [prompt for group in GROUPS for prompt in load_calibration_prompts(group)[:limit]]


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a JSONL file.

    Args:
        path: Each line has "prompt" (or "text"), and may have "group" and "id".
        limit: Prompts per group at most; None for all.

    Returns:
        list[Prompt]: In file order; those without a group are of the group "all".

    Raises:
        ConfigError: If a line is none, naming it.
    """
    prompts: list[Prompt] = []
    counts: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"prompts must be a readable JSONL file; got {path}: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, path, number)
        counts[prompt.group] = counts.get(prompt.group, 0) + 1
        if limit is None or counts[prompt.group] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"prompts must hold at least one line; got none in {path}.")
    return prompts


def _parse(line: str, path: Path, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"every line of prompts must be JSON; line {number} of {path} is not: {error}."
        ) from error
    fields = record if isinstance(record, dict) else {}
    text = next((fields[name] for name in FIELDS if isinstance(fields.get(name), str)), None)
    if not text:
        raise ConfigError(
            f"every line of prompts must have a text under one of {list(FIELDS)}; got "
            f"{line[:60]!r} in line {number} of {path}."
        )
    return Prompt(str(fields.get("id", number)), str(fields.get("group", "all")), text)
