"""Summaries of timed calls: medians, 20th and 80th percentiles, and ratios of paired calls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_hf.benchmarks.contenders import PLAIN
from dspark_hf.benchmarks.contest import SUMMED, Item, Outcome
from dspark_hf.metrics import LifetimeMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dspark_hf.benchmarks.comparing import Difference

ALL = "all"
"""Group of everything, summarised where there are several groups."""

STRICT_MARGIN = 0.1
"""Margin counted apart, in logit units: whatever the dtype, a difference below it is a near-tie."""


@dataclass(frozen=True)
class Sample:
    """One timed call as the result file keeps it.

    Attributes:
        item: Name of what was decoded.
        group: Calls summarised together.
        contender: Who decoded.
        repeat: From 0.
        place: Place in the order of its turn.
        wall_s: Elapsed seconds.
        cpu_s: CPU seconds.
        prompt_tokens: Tokens of all prompts, without padding.
        new_tokens: Tokens those seconds generated, up to each row's own end.
        num_rows: Rows decoded.
        differences: First differences from the baseline, at most one a row.
        speculation: Counts of this package; None for Transformers' own loops.
        details: More seconds, where a section measures more.
    """

    item: str
    group: str
    contender: str
    repeat: int
    place: int
    wall_s: float
    cpu_s: float
    prompt_tokens: int
    new_tokens: int
    num_rows: int = 1
    differences: list[Difference] = field(default_factory=list)
    speculation: dict[str, Any] | None = None
    details: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per elapsed second."""
        return self.new_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens per CPU second."""
        return self.new_tokens / self.cpu_s

    def as_row(self) -> dict[str, Any]:
        """Return the call as JSON, seconds to the microsecond."""
        row = asdict(self)
        for name in ("wall_s", "cpu_s"):
            row[name] = round(row[name], 6)
        row["details"] = {name: round(value, 6) for name, value in self.details.items()}
        return row


def make_samples(
    outcomes: Sequence[Outcome], items: Sequence[Item], differences: Sequence[list[Difference]]
) -> list[Sample]:
    """Join a contest's outcomes with their items and differences.

    Args:
        outcomes: From `hold`.
        items: What was decoded.
        differences: From `compare`, one list per outcome.

    Returns:
        list[Sample]: One per outcome, in order.
    """
    by_name = {item.name: item for item in items}
    samples = []
    for outcome, found in zip(outcomes, differences, strict=True):
        item = by_name[outcome.item]
        samples.append(
            Sample(
                item=item.name,
                group=item.group,
                contender=outcome.contender,
                repeat=outcome.repeat,
                place=outcome.place,
                wall_s=outcome.wall_s,
                cpu_s=outcome.cpu_s,
                prompt_tokens=int(item.inputs["attention_mask"].sum()),
                new_tokens=outcome.num_tokens,
                num_rows=len(outcome.texts),
                differences=found,
                speculation=outcome.speculation,
                details=outcome.details,
            )
        )
    return samples


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Return the 20th, 50th and 80th percentile, interpolated linearly.

    Args:
        values: Any number of them.

    Returns:
        dict[str, float] | None: Keys p20, p50, p80; None without values.
    """
    known = list(values)
    if not known:
        return None
    return {f"p{q}": round(float(np.percentile(known, q)), 6) for q in (20, 50, 80)}


def paired_ratios(
    samples: Sequence[Sample], contender: str, baseline: str = PLAIN, *, cpu: bool = False
) -> list[float]:
    """Return how many times quicker a contender was, call by call.

    Args:
        samples: Of one section.
        contender: Whose calls.
        baseline: Who decoded the same item in the same repeat.
        cpu: Whether CPU seconds count instead of elapsed ones.

    Returns:
        list[float]: Tokens per second over the baseline's, for every item and repeat of both.
    """
    rate = "tokens_per_cpu_s" if cpu else "tokens_per_s"
    theirs = {(s.item, s.repeat): getattr(s, rate) for s in samples if s.contender == baseline}
    return [
        getattr(s, rate) / theirs[s.item, s.repeat]
        for s in samples
        if s.contender == contender and (s.item, s.repeat) in theirs
    ]


def summarise(samples: Sequence[Sample], *, adds_all: bool = True) -> list[dict[str, Any]]:
    """Summarise calls by group and contender.

    Args:
        samples: Of one section.
        adds_all: Whether the groups are alike enough to be summarised together as well.

    Returns:
        list[dict[str, Any]]: One summary per group and contender, in order of appearance; where
        there are several groups, those of the group "all" last, unless unwanted.
    """
    groups = list(dict.fromkeys(sample.group for sample in samples))
    contenders = list(dict.fromkeys(sample.contender for sample in samples))
    summaries: list[dict[str, Any]] = []
    for group in [*groups, ALL] if adds_all and len(groups) > 1 else groups:
        here = [sample for sample in samples if group in (ALL, sample.group)]
        present = {sample.contender for sample in here}
        summaries.extend(_summary(here, group, name) for name in contenders if name in present)
    return summaries


def _summary(here: Sequence[Sample], group: str, contender: str) -> dict[str, Any]:
    own = [sample for sample in here if sample.contender == contender]
    is_baseline = contender == PLAIN
    details: dict[str, list[float]] = defaultdict(list)
    for sample in own:
        for name, value in sample.details.items():
            details[name].append(value)
    return {
        "group": group,
        "contender": contender,
        "items": len({sample.item for sample in own}),
        "calls": len(own),
        "new_tokens": sum(sample.new_tokens for sample in own),
        "tokens_per_s": spread(sample.tokens_per_s for sample in own),
        "ratio": None if is_baseline else spread(paired_ratios(here, contender)),
        "cpu_ratio": None if is_baseline else spread(paired_ratios(here, contender, cpu=True)),
        "cores_busy": round(sum(s.cpu_s for s in own) / sum(s.wall_s for s in own), 3),
        "details": {name: spread(values) for name, values in details.items()},
        **_exactness(own),
        **_speculation(own),
    }


def _exactness(own: Sequence[Sample]) -> dict[str, Any]:
    differences = [difference for sample in own for difference in sample.differences]
    margins = [d.margin for d in differences if d.margin is not None]
    num_near = sum(difference.is_near_tie for difference in differences)
    return {
        "texts": sum(sample.num_rows for sample in own),
        "texts_that_differ": len(differences),
        "near_ties": num_near,
        "other_differences": len(differences) - num_near,
        "largest_margin": max(margins, default=None),
        "margins_below_0_1": sum(margin < STRICT_MARGIN for margin in margins),
    }


def _speculation(own: Sequence[Sample]) -> dict[str, Any]:
    """Add up what speculation did; `LifetimeMetrics` defines the accepted length."""
    found = [(s, s.speculation) for s in own if s.speculation is not None]
    if not found:
        return {}
    counted = [(s, counts) for s, counts in found if "rounds" in counts]
    sums = {name: sum(counts[name] for _, counts in counted) for name in SUMMED}
    total = LifetimeMetrics(
        rows=sum(sample.num_rows for sample, _ in counted),
        new_tokens=sum(sample.new_tokens for sample, _ in counted),
        rounds=sums["rounds"],
    )
    return {
        "fallback_calls": len(found) - len(counted),
        "accepted_length": round(total.accepted_length, 4) if counted else None,
        **sums,
    }
