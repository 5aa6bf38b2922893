"""DSparkHandle: what `model.dspark` is, the state a wrapped model carries."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat
from dspark_hf.decode import Decoder, Recheck
from dspark_hf.drafting.base import FeatureDrafter
from dspark_hf.drafting.block.taps import FeatureTaps
from dspark_hf.metrics import LifetimeMetrics
from dspark_hf.profiling import measure_profile, profile_key
from dspark_hf.targets.select import Choice, choose_target
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.profile import ThroughputProfile, mark_stale, profile_folder
from dspark_hf.verification.schedules.build import build_schedule
from dspark_hf.verification.schedules.fixed import FixedSchedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from dspark_hf.config import DSparkConfig
    from dspark_hf.drafting.base import Drafter
    from dspark_hf.drafting.lookup import LookupDrafter
    from dspark_hf.verification.schedules.base import Schedule

logger = logging.getLogger(__name__)

FIRST_POSITIONS = 256
"""Positions allocated beyond the prompt at first, in tokens; longer texts grow the cache."""


@dataclass
class DSparkHandle:
    """A wrapped model's settings, drafter, measurements and statistics.

    Attributes:
        model: The wrapped model.
        config: Settings of every call that does not bring its own.
        drafter: Who drafts; None decodes plainly.
        metrics: Sums over the model's life.
        costs: Measured costs of the target's forwards.
        lock: Held while a call is decoded: calls of one model from several threads take turns.
        lookups: Lookup drafters of calls with `prompt_lookup_num_tokens=`, by longest match.
        assistants: Drafters made of models that callers passed as `assistant_model=`, by id.
    """

    model: PreTrainedModel
    config: DSparkConfig
    drafter: Drafter | None
    metrics: LifetimeMetrics = field(default_factory=LifetimeMetrics)
    costs: StepCosts = field(default_factory=StepCosts)
    lock: Any = field(default_factory=threading.RLock, repr=False)
    _choices: dict[Any, Choice] = field(default_factory=dict)
    _schedules: dict[Any, Schedule] = field(default_factory=dict)
    lookups: dict[int, LookupDrafter] = field(default_factory=dict, repr=False)
    assistants: dict[int, Drafter] = field(default_factory=dict, repr=False)
    _warned: set[str] = field(default_factory=set)
    _profiled: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the lock and what was measured: another process measures for itself."""
        state = dict(vars(self))
        state.update(lock=None, costs=StepCosts(), _schedules={}, assistants={}, _profiled=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore with a lock of its own."""
        vars(self).update(state)
        self.lock = threading.RLock()

    def target_choice(self) -> Choice:
        """Return which target the model gets, checking it the first time.

        Returns:
            Choice: Path and reason, one per dtype and attention implementation of the model.
        """
        with self.lock:
            # Autocast rounds a float32 model as 16 bits do; what agrees there says nothing here.
            is_cast = compat.is_autocast(self.model)
            key = (self.model.dtype, compat.attention_name(self.model), is_cast)
            if key not in self._choices:
                choice = choose_target(self.model)
                self._choices[key] = choice
                if choice.path != "flat":
                    logger.warning(
                        "%s runs on the %s: %s.",
                        type(self.model).__name__,
                        "rowwise target" if choice.path else "model's own loop",
                        choice.reason,
                    )
            return self._choices[key]

    def decoder(
        self,
        drafter: Drafter | None,
        config: DSparkConfig,
        num_positions: int,
        *,
        prefill_tokens: int | None = None,
    ) -> Decoder:
        """Assemble a decoder for one call.

        Args:
            drafter: Who drafts.
            config: Settings of the call.
            num_positions: Tokens to make room for per row at first.
            prefill_tokens: Most prompt tokens fed at once; None for all.

        Returns:
            Decoder: With an empty target.
        """
        size = num_positions + config.max_draft_tokens
        is_half = self.model.dtype not in (torch.float32, torch.float64)
        recheck = config.exactness == "recheck" and is_half
        target = self.target_choice().build(self.model, size, like_plain=recheck)
        if isinstance(drafter, FeatureDrafter):
            target.listen(FeatureTaps(self.model, drafter.target_layers), drafter.take)
        return Decoder(
            target=target,
            drafter=drafter,
            schedule=self._schedule(drafter, config),
            vocab_size=int(compat.text_config(self.model).vocab_size),
            recheck=Recheck(self.model.dtype, config.recheck_margin) if recheck else None,
            prefill_tokens=prefill_tokens,
        )

    def _schedule(self, drafter: Drafter | None, config: DSparkConfig) -> Schedule:
        if config.schedule == "fixed" or drafter is None:
            return FixedSchedule(config.max_draft_tokens)
        self._load_profile()
        settings = (config.schedule, config.confidence_threshold, config.never_slower)
        key = (drafter.name, id(drafter), config.max_draft_tokens, settings)
        if key not in self._schedules:
            block_size = getattr(drafter, "block_size", None)
            self._schedules[key] = build_schedule(config, self.costs, block_size)
        return self._schedules[key]

    def _load_profile(self) -> None:
        """Start from the profile an earlier process stored, once per way the model is run."""
        choice = self.target_choice()
        state = (self.model.dtype, self.model.device, choice.path, torch.get_num_threads())
        if self._profiled != state:
            self._profiled = state
            key = profile_key(self.model, choice)
            profile = ThroughputProfile.load(profile_folder(), key)
            if profile is not None:
                self._use(profile)

    def _use(self, profile: ThroughputProfile) -> None:
        folder = profile_folder()
        self.costs.seed(profile.entries, lambda: mark_stale(folder, profile.key))

    def warn_once(self, message: str) -> None:
        """Log a line the first time it is said about this model.

        Args:
            message: The line, at level WARNING.
        """
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    def profile(
        self,
        widths: Sequence[int] = (1, 2, 4, 8, 16),
        rows: Sequence[int] = (2, 4, 8),
        context: int = 256,
        repeats: int = 5,
    ) -> ThroughputProfile:
        """Measure what forwards over several tokens or rows cost, use it and store it.

        It is stored under `$DSPARK_HF_CACHE` (by default `~/.cache/dspark_hf`) and found by later
        processes that run the same model in the same way on the same machine.

        Args:
            widths: Numbers of new tokens of one row, at least one number.
            rows: Numbers of rows with one new token each; () for none.
            context: Cached tokens before them, at least 1; with the widest they must fit the
                model's positions.
            repeats: Forwards per cell, at least 1; the median counts.

        Returns:
            ThroughputProfile: What was measured; `seconds_by_width()` for one row.

        Raises:
            NotImplementedError: If no target is exact for the model (`target_choice().path` is
                None): there is nothing to draft for.
        """
        with self.lock:
            choice = self.target_choice()
            profile = measure_profile(self.model, choice, widths, rows, context, repeats)
            self._use(profile)
            try:
                profile.save(profile_folder())
            except OSError as error:
                logger.warning("The profile is used but cannot be stored: %s", error)
        return profile
