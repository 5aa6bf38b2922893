"""Budgets by layer: a fixed number of pages, given to the layers where they capture most attention.

Layers differ in how widely they attend. For a text, and every full-attention layer, it is measured
what share of its attention the best n pages hold, best in the order in which the policy's predictor
would read them. Pages are then given out one by one to the layer that gains most.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_hf import compat
from dspark_hf.attention.pages import PAGE
from dspark_hf.attention.policy import FlatBudget, SparsePolicy, resolve_policy
from dspark_hf.attention.predictors import page_weights
from dspark_hf.attention.sparse import SparseRow, SparseStats, best_pages
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.drift import spread_windows
from dspark_hf.files import written_whole
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.targets.select import choose_target
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dspark_hf.attention.predictors import Predictor
    from dspark_hf.targets.cache import DSparkCache, DSparkLayer

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
        missed_flat: Share of attention on pages not read, the mean over layers that select, with
            the same budget for each.
        missed: The same with the factors, on the same text.
    """

    factors: tuple[float, ...]
    tokens: int
    context: int
    queries: int
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
        if not hasattr(chosen.budget, "by_layer"):
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
    observer: Callable[[int], None] | None = None,
) -> LayerBudgets:
    """Measure what each layer attends to and share a policy's budget out among them.

    Args:
        model: A causal LM that runs on the flat target, wrapped or not.
        tokenizer: Its tokenizer.
        data: See `corpus.read_documents`; None for Python's language reference. Best a text like
            those that will be read, and another than drift is measured on.
        policy: Whose budget, predictor, sink, recent and dense pages count.
        context: Tokens of a window. Queries lie in its second half.
        queries: Tokens whose attention is measured, at most, over all windows.
        observer: Told how many have been measured since it was last told.

    Returns:
        LayerBudgets: To be kept by `save`, and put to use by `policy`.

    Raises:
        ConfigError: If the text is shorter than a window, the budget covers a window, or no layer
            selects.
        NotImplementedError: If the model does not run on the flat target.

    Cost: a dense forward over each window, in parts, with all attention of one token held at once.
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
    choose_target(model).require_sparse(model, "Its layers do not select.")
    chosen.require_fit(model)
    windows = spread_windows(tokenizer, data, context, min(MOST_WINDOWS, queries))
    per_window = max(1, queries // len(windows))
    sums: dict[int, NDArray[np.float64]] = {}
    measured = sum(_measure(model, ids, per_window, chosen, sums, observer) for ids in windows)
    if not sums:
        raise ConfigError(
            "the model must have a layer of full attention that the policy does not read densely; "
            "got none. There is nothing to share out."
        )
    layers = sorted(sums)
    curves = [sums[layer] / measured for layer in layers]
    pages = share_out(curves, budget * len(curves), floor)
    factors = [1.0] * len(compat.sliding_windows(model) or ())
    for layer, count in zip(layers, pages, strict=True):
        factors[layer] = _factor(count, chosen.tokens)
    return LayerBudgets(
        tuple(factors),
        chosen.tokens,
        context,
        measured,
        missed_flat=_missed(curves, [budget] * len(curves)),
        missed=_missed(curves, pages),
    )


def share_out(curves: Sequence[NDArray[np.float64]], total: int, floor: int) -> list[int]:
    """Give pages to layers so that least attention is missed over all.

    Each step goes to the layer whose next page, or next few together, captures most per page. That
    is the best there is where no page captures more than one given before it.

    Args:
        curves: Per layer, share of attention captured by the first 1, 2, ... pages.
        total: Pages to give.
        floor: Pages each layer gets at least, from 1.

    Returns:
        list[int]: Pages by layer; `total` in all, or as many as there are.
    """
    pages = [min(floor, len(curve)) for curve in curves]
    left = total - sum(pages)
    offers = [_best_offer(curve, floor, left) for curve in curves]
    while left > 0:
        best = max(range(len(pages)), key=lambda i: (offers[i][0], -pages[i]))
        gain, count = offers[best]
        if gain < 0:
            break
        if count <= left:
            pages[best] += count
            left -= count
        offers[best] = _best_offer(curves[best], pages[best], left)
    return pages


def _best_offer(curve: NDArray[np.float64], pages: int, left: int) -> tuple[float, int]:
    """Return the most a layer captures per further page, and with how many; -1 if it has all."""
    gains = curve[pages : pages + max(left, 0)] - curve[pages - 1]
    if not len(gains):
        return -1.0, 0
    rates = np.maximum(gains, 0) / np.arange(1, len(gains) + 1)
    best = int(rates.argmax())
    return float(rates[best]), best + 1


def _missed(curves: Sequence[NDArray[np.float64]], pages: Sequence[int]) -> float:
    captured = [curve[count - 1] for curve, count in zip(curves, pages, strict=True)]
    return float(np.clip(1 - np.mean(captured), 0, 1))


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


def _measure(
    model: PreTrainedModel,
    ids: list[int],
    count: int,
    policy: SparsePolicy,
    sums: dict[int, NDArray[np.float64]],
    observer: Callable[[int], None] | None,
) -> int:
    """Read a window densely, and add up what layers attend to at some tokens of its second half.

    Returns:
        int: How many tokens.
    """
    target = FlatTarget(model, len(ids))
    meter = _Meter(policy, target.cache, sums, -(-len(ids) // PAGE))
    # A step that reads everything, so that it computes what dense attention does.
    tokens = max(policy.tokens, len(ids) + PAGE)
    watched = policy.replace(
        tokens=tokens, predictor=meter, budget=FlatBudget(), mass=None, most_tokens=None,
        prefill=None,
    )  # fmt: skip
    target.read_sparsely(0, SparseRow(watched, SparseStats(), 0))
    places = np.linspace(len(ids) // 2, len(ids) - 1, count).round().astype(int)
    places, read = np.unique(places), 0
    for place in places.tolist():
        if place > read:
            target.forward([Feed(0, ids[read:place], 1, is_prompt=True)])
        target.forward([Feed(0, ids[place : place + 1], 1)])
        read = place + 1
        if observer is not None:
            observer(1)
    return len(places)


@dataclass(frozen=True)
class _Meter:
    """A predictor that scores as the policy's own, and measures what that order captures.

    The step's only row is in slot 0, and its length is still that before the step.
    """

    policy: SparsePolicy
    cache: DSparkCache
    sums: dict[int, NDArray[np.float64]]
    most_pages: int

    @property
    def predictor(self) -> Predictor:
        """Who is measured."""
        return self.policy.predictor

    def scores(
        self, query: torch.Tensor, summary: torch.Tensor, layer: int, scale: float
    ) -> torch.Tensor:
        """Score as the Predictor protocol says."""
        scores = self.predictor.scores(query, summary, layer, scale)
        weights = page_weights(scores)
        order = best_pages(
            weights, weights.numel(), self.policy.sink_pages, self.policy.recent_pages
        )
        length = self.cache.lengths[0] + 1
        keys = cast("DSparkLayer", self.cache.layers[layer]).keys[0, :, :length]
        mass = torch.stack(
            [_page_mass(rows, held, scale) for rows, held in zip(query, keys, strict=True)]
        )
        captured = mass.flatten()[order].cumsum(dim=0)[len(keys) - 1 :: len(keys)] / len(keys)
        curve = np.ones(self.most_pages)
        curve[: len(captured)] = captured.cpu().numpy()
        self.sums[layer] = self.sums.get(layer, 0.0) + curve
        return scores


def _page_mass(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Return each page's share of the attention of one key head's queries (R, D), their mean."""
    weights = torch.softmax((query.float() @ keys.float().T) * scale, dim=-1).double().mean(dim=0)
    return F.pad(weights, (0, -len(weights) % PAGE)).view(-1, PAGE).sum(dim=1)
