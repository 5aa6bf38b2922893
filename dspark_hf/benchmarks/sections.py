"""The sections of the benchmark: who decodes what, and what is timed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dspark_hf.benchmarks import contenders as who
from dspark_hf.benchmarks import prompts as what
from dspark_hf.benchmarks.bench import contest
from dspark_hf.benchmarks.comparing import count_unlike
from dspark_hf.benchmarks.contest import decoding_only, whole_call
from dspark_hf.benchmarks.drafting import drafter_section
from dspark_hf.benchmarks.queueing import queue_section
from dspark_hf.benchmarks.scheduling import scheduling_section
from dspark_hf.benchmarks.sparse import sparse_section
from dspark_hf.benchmarks.stats import paired_ratios, spread
from dspark_hf.benchmarks.unlike import never_slower_section
from dspark_hf.targets.select import position_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from dspark_hf.benchmarks.bench import Bench, SectionResult

CONTEXT_TOKENS = 32
"""Tokens decoded behind the first at each context."""
RECHECK_PROMPTS, RECHECK_TOKENS = 50, 64


def run_section(name: str, bench: Bench) -> SectionResult:
    """Measure one section.

    Args:
        name: One of `settings.SECTIONS`.
        bench: Model, settings and clock.

    Returns:
        SectionResult: Every timed call and what follows from them.
    """
    sections: dict[str, Callable[[Bench], SectionResult]] = {
        "prompts": _prompts,
        "context": _context,
        "batch": _batch,
        "recheck": _recheck,
        "scheduling": scheduling_section,
        "drafter": drafter_section,
        "never-slower": never_slower_section,
        "queue": queue_section,
        "sparse": sparse_section,
    }
    return sections[name](bench)


def _prompts(bench: Bench) -> SectionResult:
    settings = bench.settings
    contenders = who.prompt_contenders(bench.model, settings.drafter, bench.tokenizer)
    return contest(bench, "prompts", contenders, bench.items(settings.max_new_tokens), whole_call)


def _batch(bench: Bench) -> SectionResult:
    settings = bench.settings
    contenders = who.batch_contenders(bench.model, settings.drafter, bench.tokenizer)
    items = bench.items(settings.max_new_tokens)
    batch = what.batch_item(items, bench.pad_id, settings.max_new_tokens)
    return contest(bench, "batch", contenders, [batch], whole_call)


def _context(bench: Bench) -> SectionResult:
    contenders = who.context_contenders(bench.model)
    limit, _ = position_limit(bench.model)
    items = what.context_items(bench.tokenizer, bench.settings.contexts, CONTEXT_TOKENS, limit)
    result = contest(bench, "context", contenders, items, decoding_only, is_endless=True)
    return replace(result, adds_all=False)


def _recheck(bench: Bench) -> SectionResult:
    contenders = who.recheck_contenders(bench.model)
    length = min(RECHECK_TOKENS, bench.settings.max_new_tokens)
    items = what.alternating(bench.items(length), RECHECK_PROMPTS)
    result = contest(bench, "recheck", contenders, items, whole_call)
    _, undrafted, trusting, recheck = (contender.name for contender in contenders)
    ratios = paired_ratios(result.samples, recheck, baseline=trusting)
    unlike = count_unlike(result.outcomes, undrafted)
    extra = {
        "recheck_over_plain_verify": spread(ratios),
        "unlike_undrafted": {name: unlike[name] for name in (trusting, recheck)},
    }
    return replace(result, extra=extra)
