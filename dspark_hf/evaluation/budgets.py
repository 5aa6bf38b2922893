"""Budgets by layer: a fixed number of pages, given to the layers where they save most.

Layers differ in how widely they attend. It is measured what each loses by the number of pages that
it reads (`layer_losses.py`); pages are then given out one by one to the layer that gains most.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from dspark_hf import compat
from dspark_hf.attention.pages import PAGE
from dspark_hf.attention.policy import LayeredBudget, SparsePolicy, resolve_policy
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.layer_losses import measure_losses
from dspark_hf.evaluation.windows import spread_windows
from dspark_hf.files import written_whole
from dspark_hf.targets.select import choose_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LEAST = ("error", "missed")
"""What may be made least over layers: squared error of their output, or attention missed."""
MOST_WINDOWS = 4
"""Windows the queries are spread over: a text's parts differ more than a window's."""


@dataclass(frozen=True)
class LayerBudgets:
    """Factors on a policy's budget, one per layer.

    Attributes:
        factors: Of all layers. Over those that select they add up to the pages of one budget for
            all: their mean is 1 where tokens are whole pages. Others have 1.
        tokens: The budget they were measured for, per key head and layer.
        context: Tokens of a window.
        queries: Tokens whose attention was measured.
        least: What was made least, "error" or "missed".
        error_flat: Squared error of a layer's attention output relative to the output's own square,
            the mean over layers that select, with the same budget for each.
        error: The same with the factors, on the same text.
        missed_flat: Share of attention on pages not read, as `error_flat`.
        missed: The same with the factors.
    """

    factors: tuple[float, ...]
    tokens: int
    context: int
    queries: int
    least: str
    error_flat: float
    error: float
    missed_flat: float
    missed: float

    def policy(self, base: SparsePolicy | str, model: PreTrainedModel) -> SparsePolicy:
        """Return a policy with these factors.

        Args:
            base: A policy or its name; its budget is a `FlatBudget` or a `BoostedBudget`.
            model: The model it is for.

        Raises:
            ConfigError: If the model has another number of layers, or the budget no factors.
        """
        num_layers = int(compat.text_config(model).num_hidden_layers)
        if len(self.factors) != num_layers:
            raise ConfigError(
                f"budgets must have a factor for each of the model's {num_layers} layers; got "
                f"{len(self.factors)}. Calibrate them with this model."
            )
        chosen = _resolved(base)
        if not isinstance(chosen.budget, LayeredBudget):
            raise ConfigError(
                "policy.budget must have factors by layer, as FlatBudget and BoostedBudget do; got "
                f"a {type(chosen.budget).__name__}."
            )
        budget = replace(cast("Any", chosen.budget), by_layer=self.factors)
        return chosen.replace(budget=budget)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), "factors": list(self.factors)}

    def save(self, path: str | Path) -> None:
        """Write a JSON file that `load` reads."""
        with written_whole(Path(path)) as partial:
            partial.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LayerBudgets:
        """Read what `save` wrote.

        Args:
            path: The file; a missing one raises FileNotFoundError.

        Raises:
            ConfigError: If it is not such a file.
        """
        try:
            held = json.loads(Path(path).read_text(encoding="utf-8"))
            found = cls(**{**held, "factors": tuple(float(each) for each in held["factors"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} must hold budgets by layer as LayerBudgets.save writes them; reading it "
                f"failed: {error}"
            ) from error
        if not all(math.isfinite(factor) and factor >= 0 for factor in found.factors):
            raise ConfigError(f"factors must be numbers of at least 0; got {list(found.factors)}.")
        return found


@torch.inference_mode()
def calibrate_budgets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Any = None,
    policy: SparsePolicy | str = "quality",
    *,
    context: int = 8192,
    queries: int = 64,
    least: str = "error",
    bos: str = "auto",
    observer: Callable[[int], None] | None = None,
) -> LayerBudgets:
    """Measure what each layer loses by reading few pages and share a policy's budget out.

    On SmolLM2-135M-Instruct, sharing out by least error lowered the drift of steps, by least
    attention missed it did not; see docs/sparse.md.

    Args:
        model: A causal LM that runs on the flat target, wrapped or not.
        tokenizer: Its tokenizer.
        data: See `corpus.read_documents`; None for Python's language reference. Best a text like
            those that will be read, and another than drift is measured on.
        policy: Whose budget, predictor, sink, recent and dense pages count.
        context: Tokens of a window, its BOS included. Queries lie in its second half.
        queries: Tokens whose attention is measured, at most, over all windows.
        least: What to make least over layers: "error", the squared error of their attention output,
            or "missed", the share of attention on pages not read.
        bos: Which windows begin with the BOS token; see `perplexity_drifts`.
        observer: Told how many have been measured since it was last told.

    Returns:
        LayerBudgets: To be kept by `save`, and put to use by `policy`.

    Raises:
        ConfigError: If the text is shorter than a window, the budget covers half of one, or no
            layer selects.
        NotImplementedError: If the model does not run on the flat target.

    Cost: a dense forward over each of up to four windows, and a step for each query.
    """
    chosen = _resolved(policy)
    budget, floor = chosen.tokens // PAGE, chosen.sink_pages + chosen.recent_pages
    if not chosen.tokens < context // 2:
        raise ConfigError(
            f"context must be more than twice the policy's tokens {chosen.tokens}, so that queries "
            f"have something to leave out; got {context}."
        )
    if queries < 1:
        raise ConfigError(f"queries must be at least 1; got {queries}.")
    if least not in LEAST:
        raise ConfigError(f"least must be one of {list(LEAST)}; got {least!r}.")
    choose_target(model).require_sparse(model, "Its layers do not select.")
    chosen.require_fit(model)
    windows = spread_windows(tokenizer, data, context, min(MOST_WINDOWS, queries), bos)
    per_window = max(1, queries // len(windows))
    losses = measure_losses(model, windows, per_window, chosen, observer)
    if not losses:
        raise ConfigError(
            "the model must have a layer of full attention that the policy does not read densely; "
            "got none. There is nothing to share out."
        )
    layers = sorted(losses)
    error, missed = [losses[i].error for i in layers], [losses[i].missed for i in layers]
    flat = [budget] * len(layers)
    pages = share_out(error if least == "error" else missed, sum(flat), floor)
    factors = [1.0] * len(compat.sliding_windows(model) or ())
    for layer, count in zip(layers, pages, strict=True):
        factors[layer] = _factor(count, chosen.tokens)
    return LayerBudgets(
        tuple(factors),
        chosen.tokens,
        context,
        losses[layers[0]].num_tokens,
        least,
        error_flat=_mean(error, flat),
        error=_mean(error, pages),
        missed_flat=_mean(missed, flat),
        missed=_mean(missed, pages),
    )


def share_out(losses: Sequence[NDArray[np.float64]], total: int, floor: int) -> list[int]:
    """Give pages to layers so that the sum of what they lose is least.

    Each step goes to the layer whose next page, or next few together, saves most per page. That is
    the best there is where no page saves more than one given before it.

    Args:
        losses: Per layer, what is lost when 1, 2, ... pages are read.
        total: Pages to give.
        floor: Pages each layer gets at least, from 1.

    Returns:
        list[int]: Pages by layer; `total` in all, or as many as there are.
    """
    pages = [min(floor, len(loss)) for loss in losses]
    left = total - sum(pages)
    offers = [_best_offer(loss, count, left) for loss, count in zip(losses, pages, strict=True)]
    while left > 0:
        best = max(range(len(pages)), key=lambda i: (offers[i][0], -pages[i]))
        gain, count = offers[best]
        if gain < 0:
            break
        if count <= left:
            pages[best] += count
            left -= count
        offers[best] = _best_offer(losses[best], pages[best], left)
    return pages


def _best_offer(loss: NDArray[np.float64], pages: int, left: int) -> tuple[float, int]:
    """Return the most that further pages save, per page, and how many; -1 if there are none."""
    gains = loss[pages - 1] - loss[pages : pages + max(left, 0)]
    if not len(gains):
        return -1.0, 0
    rates = np.maximum(gains, 0) / np.arange(1, len(gains) + 1)
    best = int(rates.argmax())
    return float(rates[best]), best + 1


def _mean(losses: Sequence[NDArray[np.float64]], pages: Sequence[int]) -> float:
    """Return the mean loss of layers that read so many pages."""
    return float(np.mean([loss[count - 1] for loss, count in zip(losses, pages, strict=True)]))


def _factor(pages: int, tokens: int) -> float:
    """Return the factor by which a policy of so many tokens reads so many pages."""
    factor = pages * PAGE / tokens
    # The product is rounded down to whole pages.
    return math.nextafter(factor, math.inf) if int(tokens * factor) // PAGE < pages else factor


def _resolved(policy: SparsePolicy | str) -> SparsePolicy:
    chosen = resolve_policy(policy)
    if chosen is None:
        raise ConfigError("policy must be a SparsePolicy, 'quality' or 'fast'; got None.")
    return chosen
