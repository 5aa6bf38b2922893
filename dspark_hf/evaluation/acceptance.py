"""`dspark-hf eval acceptance`: decode prompts once per drafter, and keep what they say as JSON."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks import environment, results
from dspark_hf.config import MOST_DRAFT_TOKENS
from dspark_hf.drafting.resolve import resolve_drafter
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation import figures
from dspark_hf.evaluation.rounds import (
    BlockRounds,
    PromptRounds,
    block_drafter,
    collect_rounds,
    drafting_with,
    uncalibrated,
)
from dspark_hf.verification.scaling import Scaling, Scalings, fit_sts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dspark_hf.data import Prompt
    from dspark_hf.drafting.base import Drafter

SECTION = "acceptance"
ALL = "all"
"""Group of everything, added where there are several."""
LOOKUP_DRAFTS = 7
"""Tokens asked of a drafter that has no block of its own."""
STORED = "stored with the drafter"
FITTED = "fitted here on every other prompt, measured on those between"


@dataclass(frozen=True)
class AcceptanceSettings:
    """What is evaluated.

    Attributes:
        drafter: Its name, path or hub id.
        against: Drafters to compare with.
        max_new_tokens: Tokens per prompt at most.
        temperatures: What texts are decoded at; 0 is greedy.
        seed: Of the draws.
    """

    drafter: str
    against: tuple[str, ...] = ()
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured."""
        if self.max_new_tokens < 2:
            raise ConfigError(
                f"max_new_tokens must be at least 2, as the first token comes with the prompt; got "
                f"{self.max_new_tokens}."
            )
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(
                "temperatures must be one or more numbers of at least 0; got "
                f"{list(self.temperatures)}."
            )


def evaluate_acceptance(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: AcceptanceSettings,
    output: Path,
    *,
    name: str,
    command: str,
    observer: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate a drafter and those it is compared with, and write the result file.

    Args:
        model: Wrapped with the drafter of the settings.
        tokenizer: Its tokenizer.
        prompts: Neither trained nor calibrated on.
        settings: What is evaluated.
        output: Result file; one that is there is replaced.
        name: The model's, for tables.
        command: Command line, for the record.
        observer: Told how many prompts have been decoded since it was last told.

    Returns:
        dict[str, Any]: The contents of the file.

    Raises:
        ConfigError: If the model has no drafter, or a name or path is none.
    """
    main = model.dspark.drafter
    if main is None:
        raise ConfigError(
            "drafter must name one to evaluate; got none. Pass auto, lookup or a path."
        )
    others = {
        _label(source): resolve_drafter(source, model, tokenizer) for source in settings.against
    }
    conditions = environment.conditions(command)
    load_at_start = environment.load_average()
    num_drafts = block_length(main)

    def decoded(drafter: Drafter, length: int) -> list[PromptRounds]:
        found: list[PromptRounds] = []
        own = block_drafter(drafter)
        with drafting_with(model, drafter), nullcontext() if own is None else uncalibrated(own):
            for temperature in settings.temperatures:
                found += collect_rounds(
                    model,
                    tokenizer,
                    prompts,
                    num_drafts=length,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=temperature,
                    seed=settings.seed,
                    observer=observer,
                )
        return found

    ours = decoded(main, num_drafts)
    theirs = {
        label: decoded(drafter, block_length(drafter))
        for label, drafter in others.items()
        if drafter is not None
    }
    label = _label(settings.drafter)
    own = block_drafter(main)
    run = {
        "section": SECTION,
        "dtype": str(model.dtype).removeprefix("torch."),
        "drafter": label,
        "num_drafts": num_drafts,
        **conditions,
        "load_average": [load_at_start, environment.load_average()],
        "settings": {
            "max_new_tokens": settings.max_new_tokens,
            "temperatures": list(settings.temperatures),
            "seed": settings.seed,
        },
        "groups": _by_group(
            ours, lambda part: _group_figures(part, num_drafts, has_blocks=own is main)
        ),
        "calibration": _calibration(ours, num_drafts, own.scalings if own else None),
        "against": {
            other: _against(ours, rounds, settings.temperatures) for other, rounds in theirs.items()
        },
        "rows": [row for who, part in {label: ours, **theirs}.items() for row in _rows(who, part)],
    }
    held = results.new_results(environment.machine(), environment.describe_model(model, name))
    held = results.merge(held, results.run_key(SECTION, run["dtype"]), run)
    results.save_results(output, held)
    return held


def block_length(drafter: Drafter) -> int:
    """Return the tokens a drafter is asked for: its block, or a fixed number if it has none."""
    own = block_drafter(drafter)
    return min(LOOKUP_DRAFTS if own is None else own.block_size, MOST_DRAFT_TOKENS)


def _label(source: str) -> str:
    return Path(source).name


def _by_group(
    decoded: Sequence[PromptRounds], figure: Callable[[Sequence[PromptRounds]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Compute figures per temperature and group, all groups together last."""
    entries = []
    for temperature in dict.fromkeys(entry.temperature for entry in decoded):
        here = [entry for entry in decoded if entry.temperature == temperature]
        groups = list(dict.fromkeys(entry.group for entry in here))
        for group in [*groups, ALL] if len(groups) > 1 else groups:
            part = [entry for entry in here if group in (ALL, entry.group)]
            entries.append({"temperature": temperature, "group": group, **figure(part)})
    return entries


def _group_figures(
    part: Sequence[PromptRounds], num_drafts: int, *, has_blocks: bool = True
) -> dict[str, Any]:
    """Return counts, acceptance by position and, of drafters with blocks, shorter blocks."""
    rounds = BlockRounds.of(part, num_drafts)
    whole = rounds.whole()
    return {
        **figures.length_figures(part),
        "whole_rounds": len(whole),
        "positions": figures.position_figures(rounds),
        "depth": figures.depth_figures(whole) if has_blocks and len(whole) else [],
    }


def _calibration(
    decoded: Sequence[PromptRounds], num_drafts: int, stored: Scalings | None
) -> dict[str, Any] | None:
    """Return how far confidences can be trusted; None for a drafter without."""
    if not len(BlockRounds.of(decoded, num_drafts).confident().whole()):
        return None
    scalings, source, measured = stored, STORED, list(decoded)
    if scalings is None:
        order = {name: i for i, name in enumerate(dict.fromkeys(e.prompt for e in decoded))}
        fitted = [entry for entry in decoded if order[entry.prompt] % 2 == 0]
        measured = [entry for entry in decoded if order[entry.prompt] % 2]
        found = [
            _fit([entry for entry in fitted if (entry.temperature > 0) == is_drawn], num_drafts)
            for is_drawn in (False, True)
        ]
        sound = [scaling for scaling in found if scaling is not None]
        if not sound or not measured:
            return None
        scalings, source = Scalings(found[0] or sound[0], found[1] or sound[-1]), FITTED

    def figure(part: Sequence[PromptRounds]) -> dict[str, Any]:
        scaling = scalings.of(is_drawn=part[0].temperature > 0)
        rounds = BlockRounds.of(part, num_drafts).confident()
        return {"scaling": scaling.to_dict(), **_confidence_figures(rounds, scaling)}

    return {"source": source, "groups": _by_group(measured, figure)}


def _fit(part: Sequence[PromptRounds], num_drafts: int) -> Scaling | None:
    whole = BlockRounds.of(part, num_drafts).confident().whole()
    return fit_sts(whole.logits, whole.accepted) if len(whole) else None


def _confidence_figures(rounds: BlockRounds, scaling: Scaling) -> dict[str, Any]:
    whole = rounds.whole()
    thresholds = figures.threshold_figures(whole, scaling) if len(whole) else []
    return {**figures.calibration_figures(rounds, scaling), "thresholds": thresholds}


def _against(
    ours: Sequence[PromptRounds], theirs: Sequence[PromptRounds], temperatures: Sequence[float]
) -> list[dict[str, Any]]:
    """Compare two drafters per temperature and group."""
    entries = []
    for temperature in temperatures:
        here = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.temperature == temperature]
        groups = list(dict.fromkeys(a.group for a, _ in here))
        for group in [*groups, ALL] if len(groups) > 1 else groups:
            mine = [a for a, _ in here if group in (ALL, a.group)]
            others = [b for a, b in here if group in (ALL, a.group)]
            entries.append(
                {
                    "temperature": temperature,
                    "group": group,
                    **figures.length_figures(others),
                    **figures.gain_figures(mine, others),
                }
            )
    return entries


def _rows(who: str, decoded: Sequence[PromptRounds]) -> list[dict[str, Any]]:
    """Return one row of the result file per decoded text."""
    kept = ("new_tokens", "rounds", "drafted", "verified", "accepted", "accepted_per_round")
    rows = []
    for entry in decoded:
        record = asdict(entry.record)
        rows.append(
            {
                "drafter": who,
                "prompt": entry.prompt,
                "group": entry.group,
                "temperature": entry.temperature,
                **{name: record[name] for name in kept},
            }
        )
    return rows
