"""What every section of the benchmark shares: the model, the way a contest is held, the result."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks import contenders as who
from dspark_hf.benchmarks import prompts as what
from dspark_hf.benchmarks.comparing import Difference, baseline_logits, compare
from dspark_hf.benchmarks.contest import Item, Measure, Observer, Outcome, hold
from dspark_hf.benchmarks.stats import Sample, make_samples, summarise
from dspark_hf.losslessness import end_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from dspark_hf.benchmarks.contenders import Contender
    from dspark_hf.benchmarks.settings import BenchSettings
    from dspark_hf.benchmarks.timing import Clock

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


def contest(
    bench: Bench,
    section: str,
    contenders: Sequence[Contender],
    items: Sequence[Item],
    measure: Measure,
    *,
    is_endless: bool = False,
    is_sampled: bool = False,
) -> SectionResult:
    """Warm up, time, and only then compare.

    Args:
        bench: Model, settings and clock.
        section: Name shown to the observer.
        contenders: The baseline first.
        items: What they decode.
        measure: What is timed.
        is_endless: Whether end tokens are ignored.
        is_sampled: Whether texts are drawn, so that comparing them says nothing.

    Returns:
        SectionResult: Every timed call.
    """
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
        differences: list[list[Difference]] = [[] for _ in outcomes]
        if not is_sampled:
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
