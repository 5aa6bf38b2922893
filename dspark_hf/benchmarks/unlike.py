"""Section "never-slower": short prompts of many kinds, most of which a drafter was not made for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.benchmarks import contenders as who
from dspark_hf.benchmarks.bench import Bench, SectionResult, contest
from dspark_hf.benchmarks.contest import Item, whole_call
from dspark_hf.benchmarks.drafting import name_of
from dspark_hf.benchmarks.stats import ALL, Sample
from dspark_hf.benchmarks.unlike_prompts import unlike_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_PROMPTS = 200
MOST_TOKENS = 64
"""New tokens per prompt at most: a call's first tokens are where drafting may lose."""


def never_slower_section(bench: Bench) -> SectionResult:
    """Time plain decoding and the wrapper as it comes on prompts unlike each other.

    Args:
        bench: Its settings may name a drafter; lookup otherwise.

    Returns:
        SectionResult: One group per kind; `extra["pooled"]` has the ratios of pooled speeds.
    """
    source = bench.settings.drafter
    name = "dspark-lookup" if source is None else name_of(source)
    contenders = [
        who.Contender(who.PLAIN, bench.model),
        who.wrapped(bench.model, name, source or "lookup", tokenizer=bench.tokenizer),
    ]
    result = contest(bench, "never-slower", contenders, _items(bench), whole_call)
    return replace(result, extra={"pooled": pooled_ratios(result.samples)})


def pooled_ratios(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return speeds over plain's with all calls of a group pooled, all groups together last.

    A group's speed is its tokens over its seconds, so that long texts count for what they take.

    Args:
        samples: Of one contest.

    Returns:
        list[dict[str, Any]]: Per group and contender but plain: the pooled ratio, in elapsed and in
        CPU seconds, and the share of calls that were slower than plain's.
    """
    groups = [*dict.fromkeys(sample.group for sample in samples), ALL]
    contenders = [n for n in dict.fromkeys(s.contender for s in samples) if n != who.PLAIN]
    entries = []
    for group in groups:
        here = [sample for sample in samples if group in (ALL, sample.group)]
        by_name: dict[str, list[Sample]] = defaultdict(list)
        for sample in here:
            by_name[sample.contender].append(sample)
        plain = {(s.item, s.repeat): s for s in by_name[who.PLAIN]}
        for name in contenders:
            own = by_name[name]
            slower = [
                s.tokens_per_s < plain[s.item, s.repeat].tokens_per_s
                for s in own
                if (s.item, s.repeat) in plain
            ]
            entries.append(
                {
                    "group": group,
                    "contender": name,
                    "ratio": round(_speed(own) / _speed(by_name[who.PLAIN]), 4),
                    "cpu_ratio": round(
                        _speed(own, cpu=True) / _speed(by_name[who.PLAIN], cpu=True), 4
                    ),
                    "share_slower": round(sum(slower) / len(slower), 4),
                }
            )
    return entries


def _speed(samples: Sequence[Sample], *, cpu: bool = False) -> float:
    seconds = sum(sample.cpu_s if cpu else sample.wall_s for sample in samples)
    return sum(sample.new_tokens for sample in samples) / seconds


def _items(bench: Bench) -> list[Item]:
    """Return the prompts within the settings' limit per kind."""
    tokens = min(MOST_TOKENS, bench.settings.max_new_tokens)
    items: list[Item] = []
    counts: dict[str, int] = defaultdict(int)
    for name, kind, ids in unlike_prompts(bench.tokenizer, NUM_PROMPTS):
        counts[kind] += 1
        if bench.settings.limit is None or counts[kind] <= bench.settings.limit:
            row = torch.tensor([ids])
            inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
            items.append(Item(name, kind, inputs, tokens))
    return items
