"""Original prompts for the demo, benchmarks and calibration, in four groups."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from dspark_hf.errors import ConfigError

GROUPS = ("chat", "code", "maths", "rewrite")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: Stable unique name, such as "chat-01".
        group: One of `GROUPS`. Answers to "rewrite" copy much of the prompt; "chat" hardly any.
        text: What the user says; apply the model's chat template to it.
    """

    id: str
    group: str
    text: str


def load_prompts(group: str | None = None) -> list[Prompt]:
    """Return the prompts that ship for measuring, in file order: never learned from or fitted on.

    Args:
        group: One of `GROUPS`; None returns all groups.

    Returns:
        list[Prompt]: 15 prompts, or 60 for all groups.

    Raises:
        ConfigError: If there is no such group.
    """
    return _load("prompts.jsonl", group)


def load_calibration_prompts(group: str | None = None) -> list[Prompt]:
    """Return the prompts that ship for calibrating confidences: others, of the same kinds.

    Args:
        group: One of `GROUPS`; None returns all groups.

    Returns:
        list[Prompt]: 120 for all groups.

    Raises:
        ConfigError: If there is no such group.
    """
    return _load("calibration.jsonl", group)


def _load(name: str, group: str | None) -> list[Prompt]:
    if group is not None and group not in GROUPS:
        raise ConfigError(
            f"group must be one of {list(GROUPS)} or None; got {group!r}. Pass None for all groups."
        )
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    return [
        Prompt(id=record["id"], group=record["group"], text=record["prompt"])
        for record in records
        if group in (None, record["group"])
    ]
