"""Calibrating a drafter: temperatures for its confidences, fitted on what a target accepts."""

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
    apply_sts,
    area_under_curve,
    expected_calibration_error,
    fit_sts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

TEMPERATURES = (0.0, 1.0)
FEW_ROUNDS = 300
"""Rounds per half below which chance alone moves the error by two points or more."""


@dataclass(frozen=True)
class Calibration:
    """Temperatures of a drafter's confidences, and what they change on rounds they never saw.

    Attributes:
        temperatures: One per draft position; confidence k is sigmoid(logit_k / temperature_k).
        ece_before: Per position, expected calibration error of the survival without them.
        ece_after: The same with them.
        auc: Per position, how well the survival ranks; None where all or none survived.
        num_fitted: Rounds they were fitted on.
        num_held_out: Rounds the errors were measured on, of other prompts.
        num_prompts: Prompts of both halves together.
        sampling: Temperatures the texts were decoded at; 0 is greedy.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc: tuple[float | None, ...]
    num_fitted: int
    num_held_out: int
    num_prompts: int
    sampling: tuple[float, ...]

    @property
    def num_rounds(self) -> int:
        """Rounds used, for fitting or measuring."""
        return self.num_fitted + self.num_held_out

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a drafter's calibration.json."""
        lists = {
            name: [None if x is None else round(x, 6) for x in getattr(self, name)]
            for name in ("temperatures", "ece_before", "ece_after", "auc", "sampling")
        }
        counts = ("num_rounds", "num_fitted", "num_held_out", "num_prompts")
        return {**lists, **{name: getattr(self, name) for name in counts}}


def calibrate_drafter(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt | str],
    *,
    max_new_tokens: int = 128,
    temperatures: Sequence[float] = TEMPERATURES,
    observer: Callable[[int], None] | None = None,
) -> Calibration:
    """Decode prompts with whole blocks and fit a temperature per position; change nothing.

    Every other prompt is fitted on, those between are measured on.

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
        ConfigError: If no drafter has confidences with temperatures, or prompts are too few.

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
    halves: tuple[list[PromptRounds], list[PromptRounds]] = ([], [])
    with drafting_with(model, drafter), uncalibrated(drafter):
        for temperature in temperatures:
            decoded = collect_rounds(
                model,
                tokenizer,
                named,
                num_drafts=drafter.block_size,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                observer=observer,
            )
            for half, rounds in zip(halves, split_by_prompt(decoded), strict=True):
                half.extend(rounds)
    fitted, held = (BlockRounds.of(half, drafter.block_size) for half in halves)
    return fit(fitted, held, num_prompts=len(named), sampling=tuple(map(float, temperatures)))


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


def split_by_prompt(
    decoded: Sequence[PromptRounds],
) -> tuple[list[PromptRounds], list[PromptRounds]]:
    """Deal prompts to two halves in turn: rounds of one text are too alike to be parted."""
    return list(decoded[::2]), list(decoded[1::2])


def fit(
    fitted: BlockRounds, held: BlockRounds, *, num_prompts: int, sampling: tuple[float, ...]
) -> Calibration:
    """Fit temperatures on one half of the rounds and measure them on the other.

    Args:
        fitted: Rounds to fit on; only whole blocks are used.
        held: Rounds of other prompts.
        num_prompts: For the record.
        sampling: For the record.

    Raises:
        ConfigError: If one half has no whole block, or there are no confidences.
    """
    whole = fitted.whole()
    if not len(whole) or not len(held):
        raise ConfigError(
            "prompts must give both halves at least one round of a whole block; got "
            f"{len(whole)} to fit on and {len(held)} to measure on. Pass more prompts, or raise "
            "max_new_tokens."
        )
    if np.isnan(whole.logits).any():
        raise ConfigError(
            "calibration needs a drafter with a confidence head; got one that states no "
            "confidence. Train one with a confidence head."
        )
    if min(len(whole), len(held)) < FEW_ROUNDS:
        logger.warning(
            "Calibrated on %d rounds and measured on %d; chance plays a part below %d.",
            len(whole),
            len(held),
            FEW_ROUNDS,
        )
    temperatures = tuple(float(t) for t in fit_sts(whole.logits, whole.accepted))
    plain = (1.0,) * len(temperatures)
    return Calibration(
        temperatures=temperatures,
        ece_before=tuple(position_errors(held, plain)),
        ece_after=tuple(position_errors(held, temperatures)),
        auc=tuple(position_aucs(held, temperatures)),
        num_fitted=len(whole),
        num_held_out=len(held),
        num_prompts=num_prompts,
        sampling=sampling,
    )


def survivals(rounds: BlockRounds, temperatures: Sequence[float]) -> NDArray[np.float64]:
    """Return the stated survival of the first k tokens, of shape (R, N); NaN where not drafted."""
    return np.asarray(np.cumprod(apply_sts(rounds.logits, temperatures), axis=1))


def outcomes_at(
    rounds: BlockRounds, stated: NDArray[np.float64], position: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return predictions and outcomes of one position, of the rounds where it is settled."""
    found = rounds.known > position
    return stated[found, position], rounds.accepted[found] > position


def position_errors(rounds: BlockRounds, temperatures: Sequence[float]) -> list[float]:
    """Return the expected calibration error of the survival at every position."""
    stated = survivals(rounds, temperatures)
    return [
        expected_calibration_error(*outcomes_at(rounds, stated, k)) for k in range(stated.shape[1])
    ]


def position_aucs(rounds: BlockRounds, temperatures: Sequence[float]) -> list[float | None]:
    """Return how well the survival ranks at every position; None where there is nothing to rank."""
    stated = survivals(rounds, temperatures)
    values = [area_under_curve(*outcomes_at(rounds, stated, k)) for k in range(stated.shape[1])]
    return [None if math.isnan(value) else value for value in values]
