"""Where a contender's tokens leave the baseline's, and how close a call it was there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dspark_hf.benchmarks.contenders import PLAIN, Contender
from dspark_hf.benchmarks.contest import Item, Outcome
from dspark_hf.verification.ties import margin_limit

StepLogits = Callable[[Item, int], Sequence[torch.Tensor]]
"""Scores of the baseline's own steps: item and number of steps to tensors of shape (B, V)."""


@dataclass(frozen=True)
class Difference:
    """The first token of a row that is not the baseline's.

    Attributes:
        row: Row of the batch.
        index: Place among the new tokens, from 0.
        plain_token: The baseline's choice; None if its text had ended.
        token: The contender's choice; None if its text had ended.
        margin: How much higher the baseline's step scored its own choice, in logit units; None
            where a text had ended or the baseline chose otherwise when asked again.
        margin_limit: Largest margin that rounding explains, see `verification.ties.margin_limit`.
        top_gap: Gap between that step's two best scores; below `margin` if the contender chose
            neither.
    """

    row: int
    index: int
    plain_token: int | None
    token: int | None
    margin: float | None = None
    margin_limit: float | None = None
    top_gap: float | None = None

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        if self.margin is None or self.margin_limit is None:
            return False
        return self.margin <= self.margin_limit


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two texts differ, by an earlier end too; None if nowhere."""
    for index, (one, two) in enumerate(zip(plain, other, strict=False)):
        if one != two:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


def compare(
    outcomes: Sequence[Outcome],
    items: Sequence[Item],
    step_logits: StepLogits,
    dtype: torch.dtype,
) -> list[list[Difference]]:
    """Compare every outcome with the baseline's of the same item and repeat.

    The baseline itself is compared with its first repeat, which shows whether it repeats itself.

    Args:
        outcomes: Of one contest, the baseline's included.
        items: Its items.
        step_logits: Asked once per item that has differences, after all timing.
        dtype: The model's.

    Returns:
        list[list[Difference]]: Differences of each outcome, at most one a row.
    """
    plain = {(o.item, o.repeat): o.texts for o in outcomes if o.contender == PLAIN}
    found = [
        _differences(plain[o.item, 0 if o.contender == PLAIN else o.repeat], o.texts)
        for o in outcomes
    ]
    steps: dict[str, int] = defaultdict(int)
    for outcome, differences in zip(outcomes, found, strict=True):
        for difference in differences:
            steps[outcome.item] = max(steps[outcome.item], difference.index + 1)
    by_name = {item.name: item for item in items}
    logits = {name: step_logits(by_name[name], count) for name, count in steps.items()}
    return [
        [_with_margin(difference, logits[outcome.item], dtype) for difference in differences]
        for outcome, differences in zip(outcomes, found, strict=True)
    ]


def count_unlike(outcomes: Sequence[Outcome], baseline: str) -> dict[str, int]:
    """Count texts that differ from those of another contender than plain decoding.

    Args:
        outcomes: Of one contest.
        baseline: The contender compared with.

    Returns:
        dict[str, int]: Differing texts of every other contender, over items and repeats.
    """
    theirs = {(o.item, o.repeat): o.texts for o in outcomes if o.contender == baseline}
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.contender != baseline:
            pairs = zip(theirs[outcome.item, outcome.repeat], outcome.texts, strict=True)
            unlike = sum(one != other for one, other in pairs)
            counts[outcome.contender] = counts.get(outcome.contender, 0) + unlike
    return counts


def baseline_logits(plain: Contender) -> StepLogits:
    """Return a function that decodes an item once more and keeps the scores of its steps.

    Args:
        plain: The baseline.

    Returns:
        StepLogits: Untimed; scores as the baseline's own one-token steps give them.
    """

    def step_logits(item: Item, num_steps: int) -> Sequence[torch.Tensor]:
        output: Mapping[str, Sequence[torch.Tensor]] = plain.generate(
            item.inputs,
            max_new_tokens=num_steps,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return output["scores"]

    return step_logits


def _differences(
    plain: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[Difference]:
    found = []
    for row, (ours, theirs) in enumerate(zip(plain, texts, strict=True)):
        index = first_difference(ours, theirs)
        if index is not None:
            choices = [text[index] if index < len(text) else None for text in (ours, theirs)]
            found.append(Difference(row, index, *choices))
    return found


def _with_margin(
    difference: Difference, logits: Sequence[torch.Tensor], dtype: torch.dtype
) -> Difference:
    ours, theirs = difference.plain_token, difference.token
    if ours is None or theirs is None or difference.index >= len(logits):
        return difference
    scores = logits[difference.index][difference.row].float()
    first, second = scores.topk(2).values.tolist()
    if float(scores[ours]) < first:
        return difference
    return replace(
        difference,
        margin=float(scores[ours] - scores[theirs]),
        margin_limit=margin_limit(dtype, first),
        top_gap=first - second,
    )
