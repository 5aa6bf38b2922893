"""DSparkHandle: what `model.dspark` is, the state a wrapped model carries."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat
from dspark_hf.decode import Decoder, Recheck
from dspark_hf.drafting.base import FeatureDrafter
from dspark_hf.drafting.block.taps import FeatureTaps
from dspark_hf.metrics import LifetimeMetrics
from dspark_hf.targets.select import Choice, choose_target
from dspark_hf.values import Feed
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.schedules.auto import CostAwareSchedule
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
    _schedules: dict[Any, CostAwareSchedule] = field(default_factory=dict)
    lookups: dict[int, LookupDrafter] = field(default_factory=dict, repr=False)
    assistants: dict[int, Drafter] = field(default_factory=dict, repr=False)
    _warned: set[str] = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the lock and what was measured: another process measures for itself."""
        state = dict(vars(self))
        state.update(lock=None, costs=StepCosts(), _schedules={}, assistants={})
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
        key = (drafter.name, id(drafter), config.max_draft_tokens, config.never_slower)
        if key not in self._schedules:
            self._schedules[key] = CostAwareSchedule(
                config.max_draft_tokens, self.costs, may_pause=config.never_slower
            )
        return self._schedules[key]

    def warn_once(self, message: str) -> None:
        """Log a line the first time it is said about this model.

        Args:
            message: The line, at level WARNING.
        """
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    @torch.no_grad()
    def profile(
        self, widths: Sequence[int] = (1, 2, 4, 8, 16), context: int = 256, repeats: int = 5
    ) -> dict[int, float]:
        """Measure what a forward over several tokens of one row costs, and remember it.

        Args:
            widths: Numbers of new tokens, at least one number.
            context: Cached tokens before them, at least 1; with the widest they must fit the
                model's positions.
            repeats: Forwards per width, at least 1; the median counts.

        Returns:
            dict[int, float]: Seconds by width.

        Raises:
            NotImplementedError: If no target is exact for the model (`target_choice().path` is
                None): there is nothing to draft for.
        """
        with self.lock:
            target = self.target_choice().build(self.model, context + max(widths))
            target.forward([Feed(0, [1] * context, 1)])
            seconds: dict[int, list[float]] = {width: [] for width in widths}
            for _ in range(repeats):
                for width in widths:
                    target.hold(0)
                    begin = perf_counter()
                    logits = target.forward([Feed(0, [1] * width, width)])[0]
                    logits.argmax(dim=-1).tolist()
                    seconds[width].append(perf_counter() - begin)
                    self.costs.observe(width, context, seconds[width][-1])
                    target.rollback(0, context)
        return {width: sorted(times)[len(times) // 2] for width, times in seconds.items()}
