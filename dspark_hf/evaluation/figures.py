"""What an evaluation's rounds say: accepted lengths, calibration, and what shorter drafts would do.

All figures are computed from rounds in which whole blocks were drafted and verified. A sweep keeps
the places where those rounds began, though shorter drafts would have begun others: it compares
settings with each other, and the benchmark measures the one that is chosen.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_hf.evaluation.calibrate import (
    chance_errors,
    outcomes_at,
    position_aucs,
    position_errors,
    survivals,
)
from dspark_hf.metrics import LifetimeMetrics
from dspark_hf.verification.calibration import (
    area_under_curve,
    expected_calibration_error,
    reliability,
)
from dspark_hf.verification.scaling import Scaling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dspark_hf.evaluation.rounds import BlockRounds, PromptRounds

THRESHOLDS = tuple(round(0.05 * k, 2) for k in range(20))
"""Confidence thresholds of the sweep."""
RESAMPLES = 1000
"""Draws of prompts behind an interval."""
INTERVAL = (5, 95)
"""Percentiles that an interval spans."""


def length_figures(prompts: Sequence[PromptRounds]) -> dict[str, Any]:
    """Return counts and accepted length as the rows' own records have them.

    Args:
        prompts: Of one group or several.

    Returns:
        dict[str, Any]: As JSON; quantities as `metrics` defines them.
    """
    total = LifetimeMetrics()
    total.add([prompt.record for prompt in prompts])
    counts = {
        name: getattr(total, name)
        for name in ("new_tokens", "rounds", "drafted", "verified", "accepted")
    }
    return {
        "prompts": len(prompts),
        **counts,
        "accepted_length": round(total.accepted_length, 4),
        "accepted_per_round": round(accepted_per_round(prompts), 4),
    }


def accepted_per_round(prompts: Sequence[PromptRounds]) -> float:
    """Return draft tokens committed per round; 0 without rounds."""
    rounds = sum(prompt.record.rounds for prompt in prompts)
    return sum(prompt.record.accepted for prompt in prompts) / rounds if rounds else 0.0


def position_figures(rounds: BlockRounds) -> list[dict[str, Any]]:
    """Return, per draft position, how often it was tested and accepted.

    Args:
        rounds: Of whole blocks or parts.

    Returns:
        list[dict[str, Any]]: "rate" is conditional on all before it accepted; None if untested.
    """
    figures = []
    for k in range(rounds.logits.shape[1]):
        reached = (rounds.known > k) & (rounds.accepted >= k)
        tested, accepted = int(reached.sum()), int((reached & (rounds.accepted > k)).sum())
        rate = round(accepted / tested, 4) if tested else None
        figures.append({"position": k + 1, "tested": tested, "accepted": accepted, "rate": rate})
    return figures


def calibration_figures(rounds: BlockRounds, scaling: Scaling) -> dict[str, Any]:
    """Compare stated and observed survival, without and with scaling.

    Args:
        rounds: With confidences, none of them fitted on.
        scaling: Of the confidences.

    Returns:
        dict[str, Any]: As JSON: per position, and pooled over positions with reliability bins.
    """
    figures: dict[str, Any] = {"rounds": len(rounds)}
    plain = Scaling.plain(rounds.logits.shape[1])
    for name, used in (("before", plain), ("after", scaling)):
        survival = survivals(rounds, used)
        said, came = _pooled(rounds, survival)
        stated = used.apply(rounds.logits)
        reached = _reached(rounds)
        figures[name] = {
            "ece_by_position": [round(x, 6) for x in position_errors(rounds, survival)],
            "chance_by_position": [round(x, 6) for x in chance_errors(rounds, survival)],
            "auc_by_position": position_aucs(rounds, survival),
            "ece": round(expected_calibration_error(said, came), 6),
            "auc": _number(area_under_curve(said, came)),
            # Of a token given those before it, where those were accepted.
            "conditional_ece": round(
                expected_calibration_error(stated[reached], _accepted(rounds)[reached]), 6
            ),
            "reliability": [asdict(entry) for entry in reliability(said, came)],
        }
    return figures


def threshold_figures(rounds: BlockRounds, scaling: Scaling) -> list[dict[str, Any]]:
    """Return what verifying up to the first token below a confidence would have given.

    Args:
        rounds: Whole blocks with confidences.
        scaling: Of the confidences.

    Returns:
        list[dict[str, Any]]: Per threshold: accepted length, drafted and verified tokens a round.
    """
    stated = scaling.apply(rounds.logits)
    figures = []
    for threshold in THRESHOLDS:
        lengths = np.cumprod(stated >= threshold, axis=1).sum(axis=1)
        figures.append({"threshold": threshold, **_cut_figures(rounds, lengths)})
    return figures


def depth_figures(rounds: BlockRounds) -> list[dict[str, Any]]:
    """Return what blocks cut to 1, 2, ... tokens would have given.

    Args:
        rounds: Whole blocks.

    Returns:
        list[dict[str, Any]]: Per `max_draft_tokens`: accepted length, verified tokens a round.
    """
    return [
        {"max_draft_tokens": n, **_cut_figures(rounds, np.full(len(rounds), n))}
        for n in range(1, rounds.logits.shape[1] + 1)
    ]


def gain_figures(
    ours: Sequence[PromptRounds], theirs: Sequence[PromptRounds], seed: int = 0
) -> dict[str, Any]:
    """Return how many more draft tokens one drafter gets accepted per round than another.

    Args:
        ours: Of one drafter.
        theirs: Of another, same prompts in the same order.
        seed: Of the resampling.

    Returns:
        dict[str, Any]: "gain", relative to the other's, None where that has none accepted; and an
        interval over resampled prompts, the pairs kept together.
    """
    counts = np.array(
        [
            [a.record.accepted, a.record.rounds, b.record.accepted, b.record.rounds]
            for a, b in zip(ours, theirs, strict=True)
        ],
        dtype=np.float64,
    )
    generator = np.random.default_rng(seed)
    picks = generator.integers(len(counts), size=(RESAMPLES, len(counts)))
    draws = [_gain(counts[pick].sum(axis=0)) for pick in picks]
    known = [draw for draw in draws if draw is not None]
    gain = _gain(counts.sum(axis=0))
    interval = None
    if gain is not None and known:
        interval = [round(float(np.percentile(known, q)), 4) for q in INTERVAL]
    return {"gain": None if gain is None else round(gain, 4), "interval": interval}


def _gain(sums: NDArray[np.float64]) -> float | None:
    accepted, rounds, their_accepted, their_rounds = (float(x) for x in sums)
    if not rounds or not their_accepted:
        return None
    return accepted / rounds / (their_accepted / their_rounds) - 1


def _cut_figures(rounds: BlockRounds, lengths: NDArray[Any]) -> dict[str, Any]:
    accepted = np.minimum(rounds.accepted, lengths)
    num_verified = float(lengths.mean())
    return {
        "accepted_length": round(float(accepted.mean()) + 1, 4),
        "drafted_per_round": rounds.logits.shape[1],
        "verified_per_round": round(num_verified, 4),
        "share_accepted": round(float(accepted.mean()) / num_verified, 4) if num_verified else None,
    }


def _accepted(rounds: BlockRounds) -> NDArray[np.bool_]:
    return rounds.accepted[:, None] > np.arange(rounds.logits.shape[1])


def _reached(rounds: BlockRounds) -> NDArray[np.bool_]:
    places = np.arange(rounds.logits.shape[1])
    return (rounds.known[:, None] > places) & (rounds.accepted[:, None] >= places)


def _pooled(
    rounds: BlockRounds, stated: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    pairs = [outcomes_at(rounds, stated, k) for k in range(stated.shape[1])]
    return np.concatenate([p for p, _ in pairs]), np.concatenate([o for _, o in pairs])


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 6)
