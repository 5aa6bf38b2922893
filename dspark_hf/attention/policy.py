"""SparsePolicy: how much of a long context a decoding step reads. Not lossless, and off by default.

A step reads, per layer, the sink pages, the newest pages and the pages that promise most attention,
chosen jointly over heads and pages. Prompts are read densely, or as `SparsePrefill` says.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dspark_hf import compat
from dspark_hf.attention.pages import PAGE
from dspark_hf.attention.predictors import BoundPredictor, TrainedPredictor
from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from dspark_hf.attention.predictors import Predictor


@dataclass(frozen=True)
class StepSignals:
    """What is known of a row before a step, for budgets that follow the input.

    Attributes:
        entropy: Of the row's latest next-token distribution, in nats; None if unknown.
        was_rejected: Whether the latest round rejected a draft.
        token: The newest committed token.
        steps: Steps since the prompt.
    """

    entropy: float | None = None
    was_rejected: bool = False
    token: int = -1
    steps: int = 0


CALM = StepSignals(steps=1 << 30)
"""What is known where nothing makes a step critical."""


class BudgetPolicy(Protocol):
    """Decides how many tokens a step may read per key head, before the step."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `StepSignals.entropy` is wanted; computing it costs a softmax per step."""

    def factor(self, layer: int, signals: StepSignals) -> float:
        """Return the factor on the policy's budget for one layer and step, at least 0."""


@runtime_checkable
class LayeredBudget(Protocol):
    """What a budget has besides, if it has factors by layer: it only fits models with as many."""

    @property
    def by_layer(self) -> Sequence[float]:
        """One factor per layer of the model; empty for the same at all."""


def _check_factors(name: str, factors: Sequence[float]) -> None:
    """Refuse factors that no number of tokens can be multiplied by."""
    for factor in factors:
        if not (math.isfinite(factor) and factor >= 0):
            raise ConfigError(
                f"{name} must be finite and at least 0; got {factor}. Give 1 for the policy's "
                "tokens, and 0 where only sink and recent pages are to be read."
            )


@dataclass(frozen=True)
class FlatBudget:
    """The same budget everywhere, or one factor per layer.

    Attributes:
        by_layer: Factors from calibration, one per layer; empty for 1.
    """

    by_layer: tuple[float, ...] = ()
    needs_entropy: bool = False

    def __post_init__(self) -> None:
        """Refuse factors that cannot be honoured."""
        _check_factors("factors in by_layer", self.by_layer)

    def factor(self, layer: int, signals: StepSignals) -> float:  # noqa: ARG002 - the protocol's
        """Return the layer's factor."""
        return self.by_layer[layer] if self.by_layer else 1.0


@dataclass(frozen=True)
class BoostedBudget:
    """More where the text is critical: uncertain steps, after a rejection or a delimiter, at first.

    Attributes:
        boost: Factor at critical positions.
        entropy: Nats from which a step counts as uncertain; None for never.
        delimiters: Token ids after which a step is critical.
        first_steps: Steps after the prompt that are critical.
        after_rejection: Whether a step after a refused draft is critical.
        by_layer: Factors per layer; empty for 1.
    """

    boost: float = 2.0
    entropy: float | None = 3.0
    delimiters: frozenset[int] = frozenset()
    first_steps: int = 4
    after_rejection: bool = True
    by_layer: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse factors that cannot be honoured, naming the parameter."""
        _check_factors("factors in by_layer", self.by_layer)
        _check_factors("boost", (self.boost,))

    @property
    def needs_entropy(self) -> bool:
        """Whether uncertainty counts."""
        return self.entropy is not None

    def factor(self, layer: int, signals: StepSignals) -> float:
        """Return the layer's factor, boosted at critical positions."""
        is_critical = (
            (signals.was_rejected and self.after_rejection)
            or signals.steps < self.first_steps
            or signals.token in self.delimiters
            or self._is_uncertain(signals.entropy)
        )
        base = self.by_layer[layer] if self.by_layer else 1.0
        return base * self.boost if is_critical else base

    def _is_uncertain(self, entropy: float | None) -> bool:
        return entropy is not None and self.entropy is not None and entropy >= self.entropy


BLOCKS = (64, 128)
"""Numbers of a prompt's queries that may share a choice of pages."""


@dataclass(frozen=True)
class SparsePrefill:
    """What a block of a prompt's queries reads of a row's full-attention layers.

    Attributes:
        tokens: Tokens before the block read per key head on average over a layer's heads, in whole
            pages, sink and recent pages among them, times the budget's factor of the layer. The
            block itself is read on top.
        mass: Share of attention that must be captured by estimate, or more pages are read, up to
            four times `tokens`; None reads `tokens` and no more.
        block: Queries that share a choice of pages, 64 or 128.
        min_context: Tokens of a prompt that are read densely before blocks begin. None for twice
            `tokens`, where a block that selects is quicker than one that reads everything.
    """

    tokens: int = 2048
    mass: float | None = None
    block: int = 64
    min_context: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the parameter."""
        if self.block not in BLOCKS:
            raise ConfigError(f"block must be one of {list(BLOCKS)}; got {self.block}.")
        if self.mass is not None and not 0 < self.mass <= 1:
            raise ConfigError(f"mass must lie between 0 and 1, or be None; got {self.mass}.")
        if self.min_context is not None and self.min_context < 0:
            raise ConfigError(f"min_context must be at least 0 or None; got {self.min_context}.")

    @property
    def ceiling(self) -> int:
        """Most tokens before a block that are read per key head."""
        return self.tokens if self.mass is None else 4 * self.tokens

    @property
    def first_block(self) -> int:
        """The first block, counted from the row's first token, that selects."""
        start = 2 * self.tokens if self.min_context is None else self.min_context
        return -(-start // self.block)


@dataclass(frozen=True)
class SparsePolicy:
    """What a decoding step reads of a row's full-attention layers.

    Attributes:
        tokens: Tokens read per key head on average over a layer's heads, in whole pages.
        mass: Share of attention that must be captured by estimate, or more pages are read;
            None reads `tokens` and no more.
        most_tokens: Tokens at which extending ends; None for four times `tokens`.
        sink_pages: First pages, always read.
        recent_pages: Newest pages, always read; at least 2, as a draft may span two.
        predictor: Scores pages.
        budget: Factor on `tokens` by layer and step.
        min_context: Shorter rows are read densely; None takes the measured length from which
            reading sparsely is quicker, and never less than the budget.
        dense_layers: Layers that are always read densely.
        prefill: What prompts read; None for everything.
    """

    tokens: int = 2048
    mass: float | None = None
    most_tokens: int | None = None
    sink_pages: int = 1
    recent_pages: int = 4
    predictor: Predictor = field(default_factory=BoundPredictor)
    budget: BudgetPolicy = field(default_factory=FlatBudget)
    min_context: int | None = None
    dense_layers: frozenset[int] = frozenset()
    prefill: SparsePrefill | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the parameter."""
        least = (self.sink_pages + self.recent_pages) * PAGE
        if self.recent_pages < 2 or self.sink_pages < 0:
            raise ConfigError(
                "recent_pages must be at least 2 and sink_pages at least 0; got "
                f"{self.recent_pages} and {self.sink_pages}."
            )
        if self.tokens < least:
            raise ConfigError(
                f"tokens must cover the {self.sink_pages} sink and {self.recent_pages} recent "
                f"pages, {least} tokens; got {self.tokens}. Raise it or keep fewer pages."
            )
        if self.prefill is not None and self.prefill.tokens < least:
            raise ConfigError(
                f"prefill.tokens must cover the sink and recent pages, {least} tokens; got "
                f"{self.prefill.tokens}. Raise it or keep fewer pages."
            )
        if self.mass is not None and not 0 < self.mass <= 1:
            raise ConfigError(f"mass must lie between 0 and 1, or be None; got {self.mass}.")
        if self.most_tokens is not None and self.most_tokens < self.tokens:
            raise ConfigError(
                f"most_tokens must be at least tokens {self.tokens}; got {self.most_tokens}."
            )

    @property
    def ceiling(self) -> int:
        """Most tokens read per key head."""
        return 4 * self.tokens if self.most_tokens is None else self.most_tokens

    def require_fit(self, model: PreTrainedModel) -> None:
        """Refuse a model that the predictor was not trained for or the budget has no factors for.

        Args:
            model: The model whose context is to be read.

        Raises:
            CheckpointError: If the predictor fits models of another shape only.
            ConfigError: If the budget's factors by layer are more or fewer than the model's layers.
        """
        factors = self.budget.by_layer if isinstance(self.budget, LayeredBudget) else ()
        num_layers = int(compat.text_config(model).num_hidden_layers)
        if factors and len(factors) != num_layers:
            raise ConfigError(
                f"policy.budget.by_layer must have a factor for each of the model's {num_layers} "
                f"layers; got {len(factors)}. Measure them with this model (dspark-hf eval "
                "budgets), or leave them out for the same everywhere."
            )
        if isinstance(self.predictor, TrainedPredictor):
            self.predictor.require_fit(model)

    def replace(self, **changes: object) -> SparsePolicy:
        """Return a copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


PRESETS = {
    "quality": SparsePolicy(tokens=2048, mass=0.98),
    "fast": SparsePolicy(
        tokens=1024, budget=BoostedBudget(entropy=None, first_steps=16, after_rejection=False)
    ),
}
"""What `sparse_attention("quality")` and `"fast"` mean. An answer begins in the first steps after a
prompt: there `fast` reads twice as much."""


def resolve_policy(policy: SparsePolicy | str | None) -> SparsePolicy | None:
    """Return the policy that a name stands for.

    Args:
        policy: A policy, one of `PRESETS`, or None for dense attention.

    Raises:
        ConfigError: If it is none of these.
    """
    if policy is None or isinstance(policy, SparsePolicy):
        return policy
    if isinstance(policy, str) and policy in PRESETS:
        return PRESETS[policy]
    raise ConfigError(
        f"sparse must be a SparsePolicy, one of {sorted(PRESETS)} or None; got {policy!r}."
    )
