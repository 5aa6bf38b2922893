"""Perplexity over sliding windows: every token but the first is scored exactly once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.corpus import read_documents

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BOS = ("none", "once", "every")


@dataclass(frozen=True)
class PerplexityReport:
    """Perplexity of a model on some text.

    Attributes:
        ppl: exp(nll).
        nll: Mean negative log likelihood, in nats per scored token.
        scored: Tokens scored: all but the first of each document, or that one too behind a BOS.
        documents: Documents.
        windows: Forwards' rows.
        context: Most tokens of a window.
        stride: Tokens by which windows advance; each token sees at least context - stride before
            it, or all there are.
        bos: "none", "once" or "every": whether windows begin with the BOS token.
    """

    ppl: float
    nll: float
    scored: int
    documents: int
    windows: int
    context: int
    stride: int
    bos: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Window:
    """A run of tokens and how many of its last ones it scores."""

    ids: list[int]
    scored: int


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return a text's ids without special tokens, however the tokenizer is set up."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def windows_of(
    ids: Sequence[int], context: int, stride: int, bos: str, bos_id: int | None
) -> Iterator[Window]:
    """Cut a document into windows that score each token but the first once.

    Args:
        ids: Without BOS.
        context: Most tokens of a window, its BOS included.
        stride: Tokens a window scores, but for the first, which scores all it holds.
        bos: "none", "once" (before the document) or "every" (before each window).
        bos_id: The BOS token; None without one.

    Yields:
        Window: In order.
    """
    lead = [] if bos == "none" or bos_id is None else [bos_id]
    # A text may bring its own.
    ids = ids[1:] if lead and list(ids[:1]) == lead else ids
    begin, done = 0, 0
    while done < len(ids):
        first = done == 0
        head = lead if first or bos == "every" else []
        end = min(begin + context - len(head), len(ids))
        scored = end - done - (1 if first and not head else 0)
        if scored > 0:
            yield Window([*head, *ids[begin:end]], scored)
        done = end
        before = context - stride - (len(lead) if bos == "every" else 0)
        begin = max(done - before, 0)


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Any = None,
    *,
    context: int = 1024,
    stride: int | None = None,
    bos: str = "once",
    batch_size: int = 1,
    max_tokens: int | None = None,
) -> PerplexityReport:
    """Measure a model's perplexity by plain forwards.

    Args:
        model: Any causal LM, wrapped or not; sparse attention does not act here, see
            `perplexity_drift`.
        tokenizer: Its tokenizer.
        data: See `read_documents`; None for Python's language reference.
        context: Most tokens of a window.
        stride: Tokens by which windows advance; None for half of `context`.
        bos: "once" puts the tokenizer's BOS token before each document, "every" before each window,
            "none" nowhere. It is never scored, never doubled, and left out where there is none.
        batch_size: Windows per forward, padded on the right: the result does not depend on it.
        max_tokens: Tokens of the text used, from the start; None for all.

    Returns:
        PerplexityReport: With the number of tokens scored.

    Raises:
        ConfigError: If a value is not allowed or nothing can be scored.
    """
    step = context // 2 if stride is None else stride
    if not 1 <= step <= context - 1:
        raise ConfigError(
            f"stride must lie between 1 and context - 1 = {context - 1}; got {step}. A window's "
            "first token has nothing before it."
        )
    if bos not in BOS:
        raise ConfigError(f"bos must be one of {list(BOS)}; got {bos!r}.")
    documents = read_documents(data)
    bos_id = tokenizer.bos_token_id
    windows: list[Window] = []
    left = max_tokens
    for document in documents:
        ids = encode(tokenizer, document)[:left]
        left = None if left is None else left - len(ids)
        windows.extend(windows_of(ids, context, step, bos, bos_id))
    if not windows:
        raise ConfigError("data must hold at least two tokens; got too few to score any.")
    total, scored = 0.0, 0
    for begin in range(0, len(windows), batch_size):
        batch = windows[begin : begin + batch_size]
        losses = _losses(model, batch)
        total += sum(float(loss.double().sum()) for loss in losses)
        scored += sum(window.scored for window in batch)
    nll = total / scored
    return PerplexityReport(
        math.exp(nll), nll, scored, len(documents), len(windows), context, step, bos
    )


def _losses(model: PreTrainedModel, batch: Sequence[Window]) -> list[torch.Tensor]:
    """Return the negative log likelihoods of each window's scored tokens."""
    width = max(len(window.ids) for window in batch)
    device = compat.input_device(model)
    ids = torch.tensor([[*w.ids, *[0] * (width - len(w.ids))] for w in batch], device=device)
    mask = torch.tensor(
        [[1] * len(w.ids) + [0] * (width - len(w.ids)) for w in batch], device=device
    )
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    result = []
    for row, window in enumerate(batch):
        end, first = len(window.ids), len(window.ids) - window.scored
        # The logits at one place are about the token behind it.
        scores = logits[row, first - 1 : end - 1].float()
        wanted = ids[row, first:end].to(scores.device)
        result.append(torch.nn.functional.cross_entropy(scores, wanted, reduction="none"))
    return result
