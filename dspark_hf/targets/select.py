"""Which target a model gets: the quickest one that computes what the plain forward computes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from dspark_hf import compat
from dspark_hf.errors import ExpandsCacheError, UnsupportedByFlatError
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.targets.rowwise import RowwiseTarget
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dspark_hf.targets.base import Target

logger = logging.getLogger(__name__)

MAX_ERROR_FLOAT32 = 1e-3
"""Relative RMS of the logits in float32; rounding gives about 1e-6, a wrong mask about 1."""
MAX_ERROR_HALF = 0.1
"""The same in 16 bits, where rounding of another kernel shape gives about 1e-2."""
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""What a model raises when it is fed otherwise than it expects; anything else is ours to see."""
CHECK_LENGTHS = (12, 7)
"""Prompt lengths of the self-check: unequal, so that a row seeing its neighbour is noticed."""


@dataclass(frozen=True)
class Choice:
    """The target a model gets and why.

    Attributes:
        path: "flat", "rowwise", or None when neither is exact.
        reason: Why not the quicker one, for the log and `doctor`; empty when flat.
        gathers: Whether the flat target must return all cached tokens to the model.
    """

    path: str | None
    reason: str = ""
    gathers: bool = False

    def require_sparse(self, model: PreTrainedModel, remedy: str) -> None:
        """Refuse a model whose long contexts cannot be read in part.

        Args:
            model: The model the choice was made for.
            remedy: What to do instead, a sentence.

        Raises:
            NotImplementedError: If it does not run on the flat target, or caches what it expands.
        """
        if self.path != "flat" or self.gathers:
            reason = self.reason or "it caches a compressed form"
            raise NotImplementedError(
                "sparse attention needs a model that runs on the flat target; "
                f"{type(model).__name__} does not: {reason}. {remedy}"
            )

    def build(
        self, model: PreTrainedModel, num_positions: int, *, like_plain: bool = False
    ) -> Target:
        """Make an empty target of the chosen kind.

        Args:
            model: The model the choice was made for.
            num_positions: Tokens expected per row.
            like_plain: Whether a single token must round as in plain decoding.

        Returns:
            Target: The target.

        Raises:
            NotImplementedError: If no kind is exact for the model.
        """
        if self.path == "flat":
            return FlatTarget(model, num_positions, gathers=self.gathers, like_plain=like_plain)
        if self.path == "rowwise":
            return RowwiseTarget(model)
        raise NotImplementedError(
            f"{type(model).__name__} must verify drafts exactly to be decoded here; got: "
            f"{self.reason}. Call generate(), which uses the model's own loop."
        )


@torch.no_grad()
def choose_target(model: PreTrainedModel) -> Choice:
    """Try the targets on a short ragged prompt and compare with the plain forward.

    Args:
        model: Any decoder; its mode (train or eval) is kept.

    Returns:
        Choice: The first of flat and rowwise that agrees.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for gathers in (False, True):
            try:
                reason = _disagreement(FlatTarget(model, 32, gathers=gathers), model)
            except ExpandsCacheError as error:
                reason = str(error)
                continue
            except UnsupportedByFlatError as error:
                reason = str(error)
            except torch.OutOfMemoryError:
                raise
            except MODEL_ERRORS as error:
                reason = f"{type(error).__name__}: {error}"
            if not reason:
                return Choice("flat", gathers=gathers)
            break
        try:
            problem = _disagreement(RowwiseTarget(model), model)
        except torch.OutOfMemoryError:
            raise
        except MODEL_ERRORS as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return Choice("rowwise", reason.rstrip("."))
        return Choice(None, f"{reason.rstrip('.')}; row by row, {problem}")
    finally:
        for module, was_training in modes.items():
            module.training = was_training


def _disagreement(target: Target, model: PreTrainedModel) -> str:
    """Return where a target differs from the plain forward; empty when nowhere.

    The feeds are those of decoding: two ragged prompts, unequal blocks, a rollback, more tokens.
    """
    vocabulary = min(compat.text_config(model).vocab_size, 1000)
    tokens = [
        [(3 + 7 * i + 5 * row) % vocabulary for i in range(length + 6)]
        for row, length in enumerate(CHECK_LENGTHS)
    ]
    plain = [_plain_logits(model, ids) for ids in tokens]
    first, second = CHECK_LENGTHS
    stages = [
        ("prompts", {0: (0, first), 1: (0, second)}),
        ("blocks", {0: (first, first + 3), 1: (second, second + 1)}),
        ("blocks after a rollback", {0: (first + 1, first + 5), 1: (second + 1, second + 4)}),
        ("last tokens of blocks", {0: (first + 2, first + 5), 1: (second + 1, second + 4)}),
        ("single tokens", {0: (first + 5, first + 6), 1: (second + 4, second + 5)}),
    ]
    for name, spans in stages:
        feeds = []
        for row, (start, end) in spans.items():
            if target.length(row) > start:
                target.rollback(row, start)
            keep = 1 if name.startswith("last") else end - start
            feeds.append(Feed(row, tokens[row][start:end], keep))
        for feed, logits in zip(feeds, target.forward(feeds), strict=True):
            end = spans[feed.row_id][1]
            if logits.shape[0] != feed.keep:
                return f"{target.path} logits of {name} are {logits.shape[0]} for {feed.keep}"
            error = _relative_error(logits, plain[feed.row_id][end - feed.keep : end])
            is_float32 = model.dtype == torch.float32 and not compat.is_autocast(model)
            limit = MAX_ERROR_FLOAT32 if is_float32 else MAX_ERROR_HALF
            if not error <= limit:
                return f"{target.path} logits of {name} differ by {error:.2g} (limit {limit:g})"
    return ""


def _plain_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    inputs = torch.tensor([ids], device=compat.input_device(model))
    logits = model(inputs, use_cache=False).logits
    return cast("torch.Tensor", logits)[0].float()


def _relative_error(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Return the median over tokens of the relative RMS error.

    The median, as a mixture of experts may route a token on a tie differently in 16 bits.
    """
    error = (ours - plain).pow(2).mean(-1).sqrt() / plain.pow(2).mean(-1).sqrt().clamp_min(1e-6)
    return float(error.median())


def position_limit(model: PreTrainedModel) -> tuple[int | None, bool]:
    """Return how many positions a model has and whether more of them fail.

    Returns:
        tuple[int | None, bool]: The configured number of positions, None when it has no limit;
        and True when positions are rows of a learned table, so that one more is an error.
    """
    limit = getattr(compat.text_config(model), "max_position_embeddings", None)
    decoder = compat.text_decoder(model)
    tables = {"wpe", "embed_positions", "position_embedding", "position_embeddings"}
    is_table = any(
        name.rpartition(".")[2] in tables and isinstance(module, nn.Embedding)
        for name, module in decoder.named_modules()
    )
    return limit if isinstance(limit, int) and limit > 0 else None, is_table
