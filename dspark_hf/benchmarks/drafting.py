"""Section "drafter": a drafter beside lookup and plain decoding, greedy and sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks import contenders as who
from dspark_hf.benchmarks.bench import Bench, SectionResult, contest
from dspark_hf.benchmarks.contest import Item, whole_call
from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.benchmarks.contenders import Contender

GROUPS = ("chat", "code", "maths")
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""Keywords of sampling from the target's own distribution."""


def drafter_section(bench: Bench) -> SectionResult:
    """Time plain decoding, lookup and the drafter on the shipped prompts that copy little.

    Args:
        bench: Its settings name the drafter.

    Returns:
        SectionResult: Groups "chat, greedy", "chat, T = 1" and so on.
    """
    items = [item for item in bench.items(bench.settings.max_new_tokens) if item.group in GROUPS]
    source = chosen_drafter(bench)
    contenders = [
        who.Contender(who.PLAIN, bench.model),
        who.wrapped(bench.model, "dspark-lookup", "lookup"),
        who.wrapped(bench.model, name_of(source), source, tokenizer=bench.tokenizer),
    ]
    greedy = contest(bench, "drafter", contenders, _renamed(items, "greedy"), whole_call)
    drawn = contest(
        bench, "drafter", _sampling(contenders), _renamed(items, "T = 1"), whole_call,
        is_sampled=True,
    )  # fmt: skip
    return SectionResult(
        [*greedy.samples, *drawn.samples],
        {**greedy.excluded, **drawn.excluded},
        [*greedy.outcomes, *drawn.outcomes],
        adds_all=False,
    )


def chosen_drafter(bench: Bench) -> str:
    """Return the drafter that the settings name.

    Args:
        bench: Model and settings.

    Raises:
        ConfigError: If they name none.
    """
    source = bench.settings.drafter
    if source is None:
        raise ConfigError("drafter must name one to measure; got none. Pass --drafter.")
    return source


def name_of(source: str) -> str:
    """Return a drafter's name as a contender."""
    return f"dspark:{Path(source).name}"


def _renamed(items: Sequence[Item], decoding: str) -> list[Item]:
    return [
        replace(item, name=f"{item.name}, {decoding}", group=f"{item.group}, {decoding}")
        for item in items
    ]


def _sampling(contenders: Sequence[Contender]) -> list[Contender]:
    return [replace(one, options={**one.options, **SAMPLED}) for one in contenders]
