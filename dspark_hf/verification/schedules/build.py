"""The schedule a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_hf.verification.draft_costs import DraftCosts
from dspark_hf.verification.schedules.auto import CostAwareSchedule
from dspark_hf.verification.schedules.confident import (
    BudgetSchedule,
    PrefixSchedule,
    ThresholdSchedule,
)
from dspark_hf.verification.schedules.fixed import FixedSchedule

if TYPE_CHECKING:
    from dspark_hf.config import DSparkConfig
    from dspark_hf.verification.costs import StepCosts
    from dspark_hf.verification.schedules.base import Schedule


def build_schedule(
    config: DSparkConfig,
    costs: StepCosts,
    block_size: int | None = None,
    *,
    draft_cost_grows: bool = False,
) -> Schedule:
    """Make the schedule of a configuration.

    Args:
        config: Names it and its settings.
        costs: Measured step costs of the target, shared by its schedules.
        block_size: Of a drafter that computes a whole block for any length.
        draft_cost_grows: Whether a longer part of a block costs it more.

    Returns:
        Schedule: One that has learned nothing.
    """
    most = config.max_draft_tokens
    if config.schedule == "fixed":
        return FixedSchedule(most)
    if config.schedule == "threshold":
        return ThresholdSchedule(most, costs, config.confidence_threshold)
    if config.schedule == "prefix":
        return PrefixSchedule(most, costs)
    drafts = DraftCosts(block_size, grows=draft_cost_grows)
    if config.schedule == "budget":
        return BudgetSchedule(most, costs, drafts)
    return CostAwareSchedule(most, costs, drafts, may_pause=config.never_slower)
