"""The sections of the benchmark: who decodes what, and what is timed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks import contenders as who
from dspark_hf.benchmarks import prompts as what
from dspark_hf.benchmarks.comparing import baseline_logits, compare, count_unlike
from dspark_hf.benchmarks.contest import (
    Item,
    Measure,
    Observer,
    Outcome,
    decoding_only,
    hold,
    whole_call,
)
from dspark_hf.benchmarks.stats import Sample, make_samples, paired_ratios, spread, summarise
from dspark_hf.losslessness import end_ids
from dspark_hf.targets.select import position_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from dspark_hf.benchmarks.contenders import Contender
    from dspark_hf.benchmarks.settings import BenchSettings
    from dspark_hf.benchmarks.timing import Clock

CONTEXT_TOKENS = 32
"""Tokens decoded behind the first at each context."""
RECHECK_PROMPTS, RECHECK_TOKENS = 50, 64
WARM_UP_CALLS, WARM_UP_TOKENS = 2, 24


@dataclass(frozen=True)
class Bench:
    """What every section needs.

    Attributes:
        model: The plain model.
        tokenizer: Its tokenizer.
        settings: What is measured.
        clock: Where seconds come from.
        observer: Told of every call.
    """

    model: PreTrainedModel
    tokenizer: Any
    settings: BenchSettings
    clock: Clock
    observer: Observer

    @property
    def pad_id(self) -> int:
        """The padding id, or one that serves as such."""
        known = (self.tokenizer.pad_token_id, self.model.generation_config.pad_token_id)
        found = [*known, *end_ids(self.model, {}), 0]
        return next(int(token) for token in found if token is not None)

    def items(self, max_new_tokens: int) -> list[Item]:
        """Return the shipped prompts within the settings' limit."""
        return what.prompt_items(self.tokenizer, max_new_tokens, self.settings.limit)


@dataclass(frozen=True)
class SectionResult:
    """What a section measured.

    Attributes:
        samples: Every timed call.
        excluded: Contenders that could not run, with the reason.
        outcomes: The same calls with their texts, which the file does not keep.
        extra: Summaries that only this section has.
        adds_all: Whether its groups are alike enough to be summarised together as well.
    """

    samples: list[Sample]
    excluded: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    adds_all: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return summaries and rows."""
        return {
            "excluded": self.excluded,
            "summary": summarise(self.samples, adds_all=self.adds_all),
            "extra": self.extra,
            "rows": [sample.as_row() for sample in self.samples],
        }


def run_section(name: str, bench: Bench) -> SectionResult:
    """Measure one section.

    Args:
        name: One of `settings.SECTIONS`.
        bench: Model, settings and clock.

    Returns:
        SectionResult: Every timed call and what follows from them.
    """
    sections = {"prompts": _prompts, "context": _context, "batch": _batch, "recheck": _recheck}
    return sections[name](bench)


def _prompts(bench: Bench) -> SectionResult:
    settings = bench.settings
    contenders = who.prompt_contenders(bench.model, settings.drafter, bench.tokenizer)
    return _contest(bench, "prompts", contenders, bench.items(settings.max_new_tokens), whole_call)


def _batch(bench: Bench) -> SectionResult:
    settings = bench.settings
    contenders = who.batch_contenders(bench.model, settings.drafter, bench.tokenizer)
    items = bench.items(settings.max_new_tokens)
    batch = what.batch_item(items, bench.pad_id, settings.max_new_tokens)
    return _contest(bench, "batch", contenders, [batch], whole_call)


def _context(bench: Bench) -> SectionResult:
    contenders = who.context_contenders(bench.model)
    limit, _ = position_limit(bench.model)
    items = what.context_items(bench.tokenizer, bench.settings.contexts, CONTEXT_TOKENS, limit)
    result = _contest(bench, "context", contenders, items, decoding_only, is_endless=True)
    return replace(result, adds_all=False)


def _recheck(bench: Bench) -> SectionResult:
    contenders = who.recheck_contenders(bench.model)
    length = min(RECHECK_TOKENS, bench.settings.max_new_tokens)
    items = what.alternating(bench.items(length), RECHECK_PROMPTS)
    result = _contest(bench, "recheck", contenders, items, whole_call)
    _, undrafted, trusting, recheck = (contender.name for contender in contenders)
    ratios = paired_ratios(result.samples, recheck, baseline=trusting)
    unlike = count_unlike(result.outcomes, undrafted)
    extra = {
        "recheck_over_plain_verify": spread(ratios),
        "unlike_undrafted": {name: unlike[name] for name in (trusting, recheck)},
    }
    return replace(result, extra=extra)


def _contest(
    bench: Bench,
    section: str,
    contenders: Sequence[Contender],
    items: Sequence[Item],
    measure: Measure,
    *,
    is_endless: bool = False,
) -> SectionResult:
    """Warm up, time, and only then compare."""
    excluded = warm_up(contenders, what.encode(bench.tokenizer, what.WARM_UP_TEXT))
    able = [contender for contender in contenders if contender.name not in excluded]
    with who.endless(able) if is_endless else nullcontext():
        outcomes = hold(
            able,
            items,
            bench.settings.repeats,
            measure,
            clock=bench.clock,
            observer=bench.observer,
            section=section,
        )
        differences = compare(outcomes, items, baseline_logits(able[0]), bench.model.dtype)
    return SectionResult(make_samples(outcomes, items, differences), excluded, outcomes)


def warm_up(contenders: Sequence[Contender], inputs: Any) -> dict[str, str]:
    """Run every contender a little, untimed: first calls load code and check the model.

    Args:
        contenders: All of a section.
        inputs: A prompt that is not measured.

    Returns:
        dict[str, str]: Transformers' own means that this model does not support, with the reason.
    """
    excluded = {}
    for contender in contenders:
        try:
            for _ in range(WARM_UP_CALLS):
                contender.generate(inputs, max_new_tokens=WARM_UP_TOKENS)
        except (ValueError, NotImplementedError) as error:
            if not contender.name.startswith("hf-"):
                raise
            excluded[contender.name] = str(error).splitlines()[0]
    return excluded
