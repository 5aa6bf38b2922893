"""Calibrating a drafter: its confidences scaled to what a target accepts, greedy and sampled."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_hf.data import Prompt
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.rounds import (
    BlockRounds,
    CalibratedDrafter,
    PromptRounds,
    block_drafter,
    collect_rounds,
    drafting_with,
    uncalibrated,
)
from dspark_hf.verification.calibration import (
    area_under_curve,
    error_by_chance,
    expected_calibration_error,
)
from dspark_hf.verification.scaling import Scaling, Scalings, fit_sts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

TEMPERATURES = (0.0, 1.0)
FEW_ROUNDS = 300
"""Rounds below which chance alone moves the error by two points or more."""


@dataclass(frozen=True)
class ModeCalibration:
    """A scaling, and what it changes on rounds it never saw.

    Attributes:
        scaling: Fitted on all rounds.
        ece_before: Per position, expected calibration error of the survival without scaling.
        ece_after: The same with scaling; each half of the prompts is measured with what was fitted
            on the other.
        auc: Per position, how well the survival ranks; None where all or none survived.
        num_rounds: Rounds fitted on and measured.
    """

    scaling: Scaling
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc: tuple[float | None, ...]
    num_rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        lists = {
            name: [None if x is None else round(x, 6) for x in getattr(self, name)]
            for name in ("ece_before", "ece_after", "auc")
        }
        return {**self.scaling.to_dict(), **lists, "num_rounds": self.num_rounds}


@dataclass(frozen=True)
class Calibration:
    """What calibrating found.

    Attributes:
        greedy: From texts decoded greedily; where there were none, from the others.
        sampled: From texts that were sampled; where there were none, from the others.
        num_prompts: Prompts decoded at every temperature.
        sampling: Temperatures the texts were decoded at; 0 is greedy.
    """

    greedy: ModeCalibration
    sampled: ModeCalibration
    num_prompts: int
    sampling: tuple[float, ...]

    @property
    def scalings(self) -> Scalings:
        """What a drafter applies."""
        return Scalings(self.greedy.scaling, self.sampled.scaling)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a drafter's calibration.json."""
        return {
            "greedy": self.greedy.to_dict(),
            "sampled": self.sampled.to_dict(),
            "num_prompts": self.num_prompts,
            "sampling": list(self.sampling),
        }


def calibrate_drafter(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt | str],
    *,
    max_new_tokens: int = 128,
    temperatures: Sequence[float] = TEMPERATURES,
    observer: Callable[[int], None] | None = None,
) -> Calibration:
    """Decode prompts with whole blocks and fit a scaling to each way of decoding; change nothing.

    What is measured comes from rounds of prompts that were not fitted on.

    Args:
        model: Wrapped; its drafter, or one it is made of, gives confidences.
        tokenizer: The model's.
        prompts: At least two; best ones like those that will be decoded, and not trained on.
        max_new_tokens: Tokens decoded per prompt and temperature at most.
        temperatures: What the texts are decoded at: 0 for greedy, others for sampling.
        observer: Told how many prompts have been decoded since it was last told.

    Returns:
        Calibration: `model.dspark.calibrate` puts it to use.

    Raises:
        ConfigError: If no drafter has confidences that can be scaled, or prompts are too few.

    Cost: a whole block verified per round, for every prompt and temperature.
    Source: DSpark, arXiv:2607.05147, sequential temperature scaling.
    """
    drafter = calibrated_drafter(model)
    if not temperatures or min(temperatures) < 0:
        raise ConfigError(
            f"temperatures must be one or more numbers of at least 0; got {list(temperatures)}."
        )
    named = [
        p if isinstance(p, Prompt) else Prompt(str(i), "all", p) for i, p in enumerate(prompts)
    ]
    decoded: list[PromptRounds] = []
    with drafting_with(model, drafter), uncalibrated(drafter):
        for temperature in temperatures:
            decoded += collect_rounds(
                model,
                tokenizer,
                named,
                num_drafts=drafter.block_size,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                observer=observer,
            )
    return fit_modes(decoded, drafter.block_size)


def calibrated_drafter(model: Any) -> CalibratedDrafter:
    """Return the drafter of a wrapped model whose confidences can be calibrated.

    Args:
        model: Wrapped.

    Raises:
        ConfigError: If there is none.
    """
    handle = getattr(model, "dspark", None)
    drafter = None if handle is None else block_drafter(handle.drafter)
    if drafter is None:
        name = getattr(getattr(handle, "drafter", None), "name", None)
        raise ConfigError(
            f"calibration needs a model wrapped with a block drafter; got drafter {name!r}. Only "
            "block drafters have confidences that temperatures scale."
        )
    return drafter


def fit_modes(decoded: Sequence[PromptRounds], num_drafts: int) -> Calibration:
    """Fit a scaling to the greedy texts among rounds, and one to the sampled ones.

    Args:
        decoded: Of the same prompts at every temperature, in one order.
        num_drafts: Draft positions.

    Raises:
        ConfigError: As for `fit`.
    """
    found = {}
    for is_drawn in (False, True):
        halves: tuple[list[PromptRounds], list[PromptRounds]] = ([], [])
        temperatures = dict.fromkeys(entry.temperature for entry in decoded)
        for temperature in temperatures:
            if (temperature > 0) == is_drawn:
                here = [entry for entry in decoded if entry.temperature == temperature]
                # Rounds of one text are too alike to be parted.
                halves[0].extend(here[::2])
                halves[1].extend(here[1::2])
        if halves[0]:
            found[is_drawn] = fit(*(BlockRounds.of(half, num_drafts) for half in halves))
    return Calibration(
        found[False] if False in found else found[True],
        found[True] if True in found else found[False],
        num_prompts=len({entry.prompt for entry in decoded}),
        sampling=tuple(temperatures),
    )


def fit(first: BlockRounds, second: BlockRounds) -> ModeCalibration:
    """Fit a scaling on all rounds; measure each half with what the other half gives.

    Args:
        first: Rounds of one half of the prompts; only whole blocks are fitted on.
        second: Of the other half.

    Raises:
        ConfigError: If one half has no whole block, or there are no confidences.
    """
    halves = (first, second)
    whole = [half.whole() for half in halves]
    if not all(map(len, whole)):
        raise ConfigError(
            "prompts must give both halves at least one round of a whole block; got "
            f"{len(whole[0])} and {len(whole[1])}. Pass more prompts, or raise max_new_tokens."
        )
    if any(np.isnan(half.logits).any() for half in whole):
        raise ConfigError(
            "calibration needs a drafter with a confidence head; got one that states no "
            "confidence. Train one with a confidence head."
        )
    num_rounds = sum(map(len, whole))
    if num_rounds < FEW_ROUNDS:
        logger.warning(
            "Calibrated on %d rounds; chance plays a part below %d.", num_rounds, FEW_ROUNDS
        )
    crossed = [fit_sts(half.logits, half.accepted) for half in reversed(whole)]
    both = BlockRounds.join(halves)
    before = survivals(both, Scaling.plain(both.logits.shape[1]))
    after = np.concatenate(
        [survivals(half, scaling) for half, scaling in zip(halves, crossed, strict=True)]
    )
    fitted = BlockRounds.join(whole)
    return ModeCalibration(
        fit_sts(fitted.logits, fitted.accepted),
        ece_before=tuple(position_errors(both, before)),
        ece_after=tuple(position_errors(both, after)),
        auc=tuple(position_aucs(both, after)),
        num_rounds=len(fitted),
    )


def survivals(rounds: BlockRounds, scaling: Scaling) -> NDArray[np.float64]:
    """Return the stated survival of the first k tokens, of shape (R, N); NaN where not drafted."""
    return np.asarray(np.cumprod(scaling.apply(rounds.logits), axis=1))


def outcomes_at(
    rounds: BlockRounds, stated: NDArray[np.float64], position: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return predictions and outcomes of one position, of the rounds where it is settled."""
    found = rounds.known > position
    return stated[found, position], rounds.accepted[found] > position


def position_errors(rounds: BlockRounds, stated: NDArray[np.float64]) -> list[float]:
    """Return the expected calibration error of the stated survivals (R, N) at every position."""
    return [
        expected_calibration_error(*outcomes_at(rounds, stated, k)) for k in range(stated.shape[1])
    ]


def chance_errors(rounds: BlockRounds, stated: NDArray[np.float64]) -> list[float]:
    """Return the error that chance alone would give at every position."""
    return [error_by_chance(outcomes_at(rounds, stated, k)[0]) for k in range(stated.shape[1])]


def position_aucs(rounds: BlockRounds, stated: NDArray[np.float64]) -> list[float | None]:
    """Return how well they rank at every position; None where there is nothing to rank."""
    values = [area_under_curve(*outcomes_at(rounds, stated, k)) for k in range(stated.shape[1])]
    return [None if math.isnan(value) else value for value in values]
