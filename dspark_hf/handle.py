"""DSparkHandle: what `model.dspark` is, the state a wrapped model carries."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat
from dspark_hf.attention.crossover import measure_crossover
from dspark_hf.attention.policy import SparsePolicy, resolve_policy
from dspark_hf.attention.sparse import SparseReading, SparseStats
from dspark_hf.config import DSparkConfig
from dspark_hf.decode import Decoder, Recheck
from dspark_hf.drafting.base import FeatureDrafter
from dspark_hf.drafting.block.taps import FeatureTaps
from dspark_hf.drafting.self_sparse import SelfSparseDrafter
from dspark_hf.errors import ConfigError
from dspark_hf.fair_lock import FairLock
from dspark_hf.metrics import LifetimeMetrics
from dspark_hf.profiling import measure_profile, profile_key
from dspark_hf.targets.select import Choice, choose_target
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.profile import ThroughputProfile, mark_stale, profile_folder
from dspark_hf.verification.schedules.build import build_schedule
from dspark_hf.verification.schedules.fixed import FixedSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from dspark_hf.drafting.base import Drafter
    from dspark_hf.drafting.lookup import LookupDrafter
    from dspark_hf.evaluation.calibrate import Calibration
    from dspark_hf.tracing import RoundTrace
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
        sparse_stats: What calls with `DSparkConfig.sparse` read, over the model's life.
    """

    model: PreTrainedModel
    config: DSparkConfig
    drafter: Drafter | None
    metrics: LifetimeMetrics = field(default_factory=LifetimeMetrics)
    costs: StepCosts = field(default_factory=StepCosts)
    lock: Any = field(default_factory=FairLock, repr=False)
    _choices: dict[Any, Choice] = field(default_factory=dict)
    _schedules: dict[Any, Schedule] = field(default_factory=dict)
    lookups: dict[int, LookupDrafter] = field(default_factory=dict, repr=False)
    assistants: dict[int, Drafter] = field(default_factory=dict, repr=False)
    _warned: set[str] = field(default_factory=set)
    _traces: list[list[RoundTrace]] = field(default_factory=list, repr=False)
    _profiled: Any = None
    sparse_stats: SparseStats = field(default_factory=SparseStats)
    _sparse: SparseReading | None = None
    _crossovers: dict[Any, int] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the lock and what was measured: another process measures for itself."""
        state = dict(vars(self))
        state.update(lock=None, costs=StepCosts(), _schedules={}, assistants={}, _profiled=None)
        state.update(_traces=[], _sparse=None, _crossovers={})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore with a lock of its own."""
        vars(self).update(state)
        self.lock = FairLock()

    def target_choice(self) -> Choice:
        """Return which target the model gets, checking it the first time.

        Returns:
            Choice: Path and reason, one per dtype and attention implementation of the model.
        """
        # The lock is held while a call is decoded; what is known need not wait for it.
        known = self._choices.get(self._choice_key())
        if known is not None:
            return known
        with self.lock:
            key = self._choice_key()
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

    def _choice_key(self) -> tuple[Any, ...]:
        # Autocast rounds a float32 model as 16 bits do; what agrees there says nothing here.
        is_cast = compat.is_autocast(self.model)
        return (self.model.dtype, compat.attention_name(self.model), is_cast)

    def decoder(
        self,
        drafter: Drafter | None,
        config: DSparkConfig,
        num_positions: int,
        *,
        prefill_tokens: int | None = None,
        reading: SparseReading | None = None,
    ) -> Decoder:
        """Assemble a decoder for one call, or for those of a queue.

        Args:
            drafter: Who drafts.
            config: Settings of the call.
            num_positions: Tokens to make room for per row at first.
            prefill_tokens: Most prompt tokens fed at once; None for all.
            reading: How rows read long contexts; None for all of them.

        Returns:
            Decoder: With an empty target.
        """
        size = num_positions + config.max_draft_tokens
        is_half = self.model.dtype not in (torch.float32, torch.float64)
        recheck = config.exactness == "recheck" and is_half
        target = self.target_choice().build(self.model, size, like_plain=recheck)
        self._note_block_size(drafter, config)
        if reading is not None:
            target.read_all_sparsely(reading)
        if isinstance(drafter, SelfSparseDrafter):
            drafter.bind(target)
        if isinstance(drafter, FeatureDrafter):
            target.listen(FeatureTaps(self.model, drafter.target_layers), drafter.take)
        return Decoder(
            target=target,
            drafter=drafter,
            schedule=self._schedule(drafter, config),
            vocab_size=int(compat.text_config(self.model).vocab_size),
            recheck=Recheck(self.model.dtype, config.recheck_margin) if recheck else None,
            prefill_tokens=prefill_tokens,
            trace=self.tracer,
        )

    def _note_block_size(self, drafter: Drafter | None, config: DSparkConfig) -> None:
        """Say once that more was asked for than a drafter ever drafts."""
        most, block_size = config.max_draft_tokens, getattr(drafter, "block_size", None)
        is_chosen = most != DSparkConfig.max_draft_tokens
        if drafter is not None and block_size is not None and is_chosen and most > block_size:
            self.warn_once(
                f"max_draft_tokens is {most}, but drafter {drafter.name!r} drafts blocks of "
                f"{block_size}: at most {block_size} tokens are drafted."
            )

    def _schedule(self, drafter: Drafter | None, config: DSparkConfig) -> Schedule:
        if config.schedule == "fixed" or drafter is None:
            return FixedSchedule(config.max_draft_tokens)
        self._load_profile()
        settings = (config.schedule, config.confidence_threshold, config.never_slower)
        key = (drafter.name, id(drafter), config.max_draft_tokens, settings)
        if key not in self._schedules:
            block_size = getattr(drafter, "block_size", None)
            grows = getattr(drafter, "draft_cost_grows", False)
            self._schedules[key] = build_schedule(
                config, self.costs, block_size, draft_cost_grows=grows
            )
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

    def ensure_profile(self) -> None:
        """Start from this machine's stored profile; measure one in seconds if there is none."""
        with self.lock:
            self._load_profile()
            if not self.costs.is_seeded and self.target_choice().path is not None:
                self.profile()

    def _use(self, profile: ThroughputProfile) -> None:
        folder = profile_folder()
        self.costs.seed(profile.entries, lambda: mark_stale(folder, profile.key))

    @contextmanager
    def trace(self) -> Iterator[list[RoundTrace]]:
        """Record every round of the calls inside: what was drafted and what became of it.

        Traces may be nested; each gets every round. Calls of the same model from other threads are
        recorded as well, told apart by `row_id`.

        Yields:
            list[RoundTrace]: Filled while the model generates; per call in the order of rounds, and
            within a round of rows. A call that the model's own loop runs adds nothing.
        """
        rounds: list[RoundTrace] = []
        with self.lock:
            self._traces = [*self._traces, rounds]
        try:
            yield rounds
        finally:
            with self.lock:
                self._traces = [trace for trace in self._traces if trace is not rounds]

    @property
    def tracer(self) -> Callable[[RoundTrace], None] | None:
        """Who is told of rounds; None if nobody asks."""
        return self._record if self._traces else None

    def _record(self, trace: RoundTrace) -> None:
        for rounds in self._traces:
            rounds.append(trace)

    def calibrate(
        self,
        prompts: Sequence[Any],
        tokenizer: Any,
        *,
        max_new_tokens: int = 128,
        temperatures: Sequence[float] = (0.0, 1.0),
    ) -> Calibration:
        """Fit the drafter's confidences to what this model accepts, and use them from now on.

        Args:
            prompts: At least two, texts or `data.Prompt`s, not among those it was trained on.
            tokenizer: The model's.
            max_new_tokens: Tokens decoded per prompt and temperature at most.
            temperatures: What the texts are decoded at: 0 for greedy, others for sampling.

        Returns:
            Calibration: What was fitted, measured on prompts that were not fitted on; its
            `to_dict()` is what a drafter's folder keeps as calibration.json.

        Raises:
            ConfigError: If the drafter has no confidences to calibrate, or prompts are too few.
        """
        # Built on the public surface, above this layer; only what calls it needs it.
        from dspark_hf.evaluation.calibrate import calibrate_drafter, calibrated_drafter

        with self.lock:
            calibration = calibrate_drafter(
                self.model,
                tokenizer,
                prompts,
                max_new_tokens=max_new_tokens,
                temperatures=temperatures,
            )
            calibrated_drafter(self.model).scalings = calibration.scalings
            # What schedules have learned of the old confidences says nothing of the new ones.
            self._schedules.clear()
        return calibration

    @contextmanager
    def sparse_attention(self, policy: SparsePolicy | str) -> Iterator[SparseStats]:
        """Read long contexts by a policy in the calls inside. Quicker, and not lossless.

        Contexts shorter than the policy's `min_context` are read densely, and prompts unless the
        policy has a `prefill`.

        Args:
            policy: A `SparsePolicy`, "quality" or "fast".

        Yields:
            SparseStats: What the calls inside read.

        Raises:
            ConfigError: If the policy is none of these, or its budget has factors for another
                number of layers.
            CheckpointError: If its predictor was trained for a model of another shape.
            NotImplementedError: If the model does not run on the flat target: its attention cannot
                be changed.
        """
        chosen = resolve_policy(policy)
        if chosen is None:
            raise ConfigError(
                "policy must be a SparsePolicy, 'quality' or 'fast'; got None. To decode densely, "
                "leave the context."
            )
        stats = SparseStats()
        with self.lock:
            before, self._sparse = self._sparse, self._new_reading(chosen, stats)
        try:
            yield stats
        finally:
            with self.lock:
                self._sparse = before

    def is_read_sparsely(self, config: DSparkConfig) -> bool:
        """Tell whether a call is asked to read long contexts by a policy."""
        return self._sparse is not None or config.sparse is not None

    def sparse_reading(self, config: DSparkConfig) -> SparseReading | None:
        """Return how a call reads long contexts: by the surrounding context, else by its config.

        Args:
            config: Settings of the call.

        Raises:
            ConfigError: See `sparse_attention`.
            CheckpointError: As above.
            NotImplementedError: If it should and the model's attention cannot be changed.
        """
        if self._sparse is not None or config.sparse is None:
            return self._sparse
        return self._new_reading(resolve_policy(config.sparse), self.sparse_stats)

    def _new_reading(self, policy: SparsePolicy | None, stats: SparseStats) -> SparseReading | None:
        if policy is None:
            return None
        self.target_choice().require_sparse(self.model, "Decode it densely.")
        policy.require_fit(self.model)
        if policy.min_context is not None:
            return SparseReading(policy, stats, policy.min_context)
        key = (policy, self.model.dtype, compat.input_device(self.model), torch.get_num_threads())
        if key not in self._crossovers:
            self._crossovers[key] = measure_crossover(
                policy,
                **compat.attention_shape(self.model),
                dtype=self.model.dtype,
                device=compat.input_device(self.model),
            )
        return SparseReading(policy, stats, self._crossovers[key])

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
        rows: Sequence[int] = (2, 4, 8, 16),
        row_widths: Sequence[int] = (1, 2, 4),
        context: int = 256,
        repeats: int = 5,
    ) -> ThroughputProfile:
        """Measure what forwards over several tokens or rows cost, use it and store it.

        It is stored under `$DSPARK_HF_CACHE` (by default `~/.cache/dspark_hf`) and found by later
        processes that run the same model in the same way on the same machine.

        Args:
            widths: Numbers of new tokens of one row, at least one number.
            rows: Numbers of rows that are decoded together; () for none.
            row_widths: Numbers of new tokens of each of them, at least one number.
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
            profile = measure_profile(
                self.model, choice, widths, rows, row_widths, context, repeats
            )
            self._use(profile)
            try:
                profile.save(profile_folder())
            except OSError as error:
                logger.warning("The profile is used but cannot be stored: %s", error)
        return profile
