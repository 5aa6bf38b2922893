"""perplexity_drift: what sparse attention costs in quality, on the path that generate() takes.

Steps: a prompt is read densely; then its continuation is fed step by step, once densely and once by
the policy, over the same cached prompt. Scoring a whole text in one forward would show no drift at
all, as steps are what selects. Prompts that select are another path with a drift of its own: a
window is read as a prompt, once densely and once in blocks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dspark_hf.attention.policy import SparsePolicy, resolve_policy
from dspark_hf.attention.sparse import SparseRow, SparseStats
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.windows import leading_bos, spread_windows
from dspark_hf.targets.flat import FlatTarget, read_prompt
from dspark_hf.targets.select import choose_target
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dspark_hf.attention.sparse import PageCounts

BLOCK_TOKENS = 32
"""Neighbouring tokens drawn together by the bootstrap: their differences are alike."""
RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
PATHS = ("steps", "prefill")
"""What may be measured: decoding steps behind a dense prompt, or a prompt read in blocks."""


@dataclass(frozen=True)
class DriftReport:
    """Dense and sparse reading of the same tokens.

    Attributes:
        ppl_dense: Perplexity of dense decoding steps, or of dense prompts.
        ppl_sparse: Of those by the policy.
        drift: ppl_sparse / ppl_dense - 1.
        drift_interval: 95 % bootstrap interval of the drift, over blocks of tokens, paired.
        kl: Mean Kullback-Leibler divergence of sparse from dense distributions, in nats.
        top1: Share of tokens with the same likeliest next one.
        overlap: Mean probability mass shared: what a sampled draft would be accepted with.
        mean_pages: Pages of 16 tokens read per layer, step or block, and key head.
        spread_pages: Their standard deviation.
        share: Pages read of those there were.
        sparse_calls: Attention calls that read selected pages; never 0.
        scored: Tokens scored.
        windows: Windows.
        context: Tokens of a window, its BOS included.
        step_tokens: Tokens per decoding step, or block of a prompt; they share a selection.
        dense_s: Seconds of the dense steps or prompts.
        sparse_s: Seconds of the sparse ones.
        path: "steps" or "prefill".
        bos: "every" or "none": whether windows begin with the BOS token.
    """

    ppl_dense: float
    ppl_sparse: float
    drift: float
    drift_interval: tuple[float, float]
    kl: float
    top1: float
    overlap: float
    mean_pages: float
    spread_pages: float
    share: float
    sparse_calls: int
    scored: int
    windows: int
    context: int
    step_tokens: int
    dense_s: float
    sparse_s: float
    path: str
    bos: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def perplexity_drift(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Any = None,
    policy: SparsePolicy | str = "quality",
    **options: Any,
) -> DriftReport:
    """Measure how much a sparse policy raises perplexity.

    Args:
        model: A causal LM that runs on the flat target, wrapped or not.
        tokenizer: Its tokenizer.
        data: See `corpus.read_documents`; None for Python's language reference.
        policy: A `SparsePolicy`, "quality" or "fast". Its `min_context` is not applied to steps:
            what is asked for is the drift of sparse ones. That of its `prefill` is, to prompts.
        options: See `perplexity_drifts`.

    Returns:
        DriftReport: Perplexities, drift with its interval, and what was read.

    Raises:
        ConfigError: See `perplexity_drifts`.
        NotImplementedError: If the model does not run on the flat target.
    """
    return perplexity_drifts(model, tokenizer, data, {"": policy}, **options)[""]


@torch.inference_mode()
def perplexity_drifts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Any,
    policies: Mapping[str, SparsePolicy | str],
    *,
    context: int = 8192,
    scored: int = 4096,
    scored_per_window: int = 512,
    step_tokens: int = 1,
    path: str = "steps",
    bos: str = "auto",
    seed: int = 0,
    observer: Callable[[int], None] | None = None,
) -> dict[str, DriftReport]:
    """Measure several policies against the same dense reading, which is done once.

    Args:
        model: A causal LM that runs on the flat target, wrapped or not.
        tokenizer: Its tokenizer.
        data: See `corpus.read_documents`; None for Python's language reference.
        policies: By name; see `perplexity_drift`.
        context: Tokens of a window, prompt and continuation, its BOS included.
        scored: Tokens scored in all, at most; windows are spread evenly over the text.
        scored_per_window: Last tokens of a window, which are scored; at most `scored`.
        step_tokens: Tokens per step.
        path: "steps" reads a window's prompt densely and feeds its last tokens step by step;
            "prefill" reads the whole window as a prompt, sparsely by the policy's `prefill`.
        bos: "every" puts the tokenizer's BOS token before each window, "none" before none, "auto"
            before each if the tokenizer puts it before texts by itself. It is never scored, never
            doubled, and left out where there is none.
        seed: Of the bootstrap.
        observer: Told 1 after every window.

    Returns:
        dict[str, DriftReport]: By the policies' names.

    Raises:
        ConfigError: If a value is not allowed, the text is shorter than a window, a policy has no
            `prefill` for that path, or one read nothing sparsely: nothing would be measured then.
        CheckpointError: If a policy's predictor was trained for a model of another shape.
        NotImplementedError: If the model does not run on the flat target.
    """
    chosen = {name: _resolved(policy, path) for name, policy in policies.items()}
    scored_per_window = min(scored_per_window, scored)
    if not 0 < scored_per_window < context:
        raise ConfigError(
            f"scored_per_window must lie between 1 and context - 1 = {context - 1}; got "
            f"{scored_per_window}."
        )
    choose_target(model).require_sparse(model, "Measure it with perplexity().")
    for policy in chosen.values():
        policy.require_fit(model)
    windows = spread_windows(tokenizer, data, context, max(1, scored // scored_per_window), bos)
    facts = {
        "windows": len(windows),
        "context": context,
        "step_tokens": step_tokens,
        "bos": "every" if leading_bos(tokenizer, bos) else "none",
    }
    measured = {name: _Measured(policy) for name, policy in chosen.items()}
    score = _score_prompt if path == "prefill" else _score_steps
    for ids in windows:
        score(model, ids, scored_per_window, step_tokens, list(measured.values()))
        if observer is not None:
            observer(1)
    return {name: one.report(path, seed, **facts) for name, one in measured.items()}


def _resolved(policy: SparsePolicy | str | None, path: str) -> SparsePolicy:
    """Return the policy to measure on a path."""
    chosen = resolve_policy(policy)
    if chosen is None:
        raise ConfigError("policy must be a SparsePolicy, 'quality' or 'fast'; got None.")
    if path not in PATHS:
        raise ConfigError(f"path must be one of {list(PATHS)}; got {path!r}.")
    if path == "prefill" and chosen.prefill is None:
        raise ConfigError(
            "path='prefill' needs a policy that reads prompts sparsely; got one with prefill None. "
            "Set its prefill=SparsePrefill()."
        )
    return chosen


class _Measured:
    """One policy: what it read, and what it and dense reading said per scored token."""

    def __init__(self, policy: SparsePolicy) -> None:
        self.policy = policy
        self.stats = SparseStats()
        self.dense: list[float] = []
        self.sparse: list[float] = []
        self.kl: list[float] = []
        self.same: list[float] = []
        self.overlap: list[float] = []
        self.seconds = [0.0, 0.0]

    def row(self) -> SparseRow:
        """Return what makes a target's row read by the policy."""
        return SparseRow(self.policy, self.stats, 0)

    def add(self, dense: torch.Tensor, sparse: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compare log probabilities (T, V) about wanted tokens (T,)."""
        rows = torch.arange(len(wanted), device=wanted.device)
        self.dense += (-dense[rows, wanted]).tolist()
        self.sparse += (-sparse[rows, wanted]).tolist()
        p, q = dense.exp(), sparse.exp()
        self.kl += (p * (dense - sparse)).sum(dim=-1).tolist()
        self.same += (dense.argmax(dim=-1) == sparse.argmax(dim=-1)).float().tolist()
        self.overlap += torch.minimum(p, q).sum(dim=-1).tolist()

    def add_all(
        self,
        dense: torch.Tensor,
        sparse: torch.Tensor,
        ids: list[int],
        first: int,
        seconds: tuple[float, float],
    ) -> None:
        """Compare logits (T, V) of both ways about the tokens behind position `first`."""
        self.seconds = [so_far + more for so_far, more in zip(self.seconds, seconds, strict=True)]
        wanted = torch.tensor(ids[first + 1 :], device=dense.device).split(BLOCK_TOKENS)
        blocks = zip(dense.split(BLOCK_TOKENS), sparse.split(BLOCK_TOKENS), wanted, strict=True)
        for a, b, tokens in blocks:
            self.add(torch.log_softmax(a, dim=-1), torch.log_softmax(b, dim=-1), tokens)

    def report(self, path: str, seed: int, **facts: Any) -> DriftReport:
        """Sum up what was measured on a path."""
        prefill = self.policy.prefill
        stats: PageCounts = self.stats
        if path == "prefill" and prefill is not None:
            stats, facts["step_tokens"] = self.stats.prefill, prefill.block
        if not stats.calls:
            raise ConfigError(
                f"the policy must act to be measured; with {facts['context']} tokens of context "
                "nothing was read selectively. Raise context, or lower the policy's tokens."
            )
        dense, sparse = np.array(self.dense), np.array(self.sparse)
        return DriftReport(
            ppl_dense=math.exp(dense.mean()),
            ppl_sparse=math.exp(sparse.mean()),
            drift=math.expm1((sparse - dense).mean()),
            drift_interval=_interval(sparse - dense, seed),
            kl=float(np.mean(self.kl)),
            top1=float(np.mean(self.same)),
            overlap=float(np.mean(self.overlap)),
            mean_pages=stats.mean_pages,
            spread_pages=stats.spread_pages,
            share=stats.share,
            sparse_calls=stats.calls,
            scored=len(dense),
            dense_s=self.seconds[0],
            sparse_s=self.seconds[1],
            path=path,
            **facts,
        )


def _interval(differences: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the bootstrap interval of exp(mean) - 1, drawing blocks of neighbouring tokens."""
    count = max(1, len(differences) // BLOCK_TOKENS)
    blocks = np.array([part.mean() for part in np.array_split(differences, count)])
    drawn = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    means = np.expm1(blocks[drawn].mean(axis=1))
    low, high = np.percentile(means, INTERVAL)
    return float(low), float(high)


def _score_steps(
    model: PreTrainedModel,
    ids: list[int],
    num_scored: int,
    step_tokens: int,
    measured: Sequence[_Measured],
) -> None:
    """Decode a window's last tokens densely, go back, and decode them by each policy."""
    target = FlatTarget(model, len(ids) + step_tokens)
    first = len(ids) - num_scored - 1
    read_prompt(target, ids[:first])
    dense, dense_s = _steps(target, ids, first, step_tokens)
    for one in measured:
        target.rollback(0, first)
        target.read_sparsely(0, one.row())
        sparse, sparse_s = _steps(target, ids, first, step_tokens)
        one.add_all(dense, sparse, ids, first, (dense_s, sparse_s))


def _steps(
    target: FlatTarget, ids: list[int], first: int, step_tokens: int
) -> tuple[torch.Tensor, float]:
    """Feed ids[first:-1] step by step; return the logits (T, V) and the seconds."""
    parts, seconds = [], 0.0
    for begin in range(first, len(ids) - 1, step_tokens):
        fed = ids[begin : min(begin + step_tokens, len(ids) - 1)]
        start = perf_counter()
        logits = target.forward([Feed(0, fed, len(fed))])[0]
        seconds += perf_counter() - start
        parts.append(logits)
    return torch.cat(parts), seconds


def _score_prompt(
    model: PreTrainedModel,
    ids: list[int],
    num_scored: int,
    _step_tokens: int,
    measured: Sequence[_Measured],
) -> None:
    """Read a window as a prompt, as generate() does, densely and then in blocks."""
    target, first = FlatTarget(model, len(ids)), len(ids) - num_scored - 1
    dense, dense_s = _prompt(target, ids, num_scored)
    for one in measured:
        target.read_sparsely(0, one.row())
        sparse, sparse_s = _prompt(target, ids, num_scored)
        one.add_all(dense, sparse, ids, first, (dense_s, sparse_s))


def _prompt(target: FlatTarget, ids: list[int], num_scored: int) -> tuple[torch.Tensor, float]:
    """Read a prompt and take it back; return the last tokens' logits (T, V) and the seconds."""
    start = perf_counter()
    logits = target.forward([Feed(0, ids[:-1], num_scored, is_prompt=True)])[0]
    seconds = perf_counter() - start
    target.rollback(0, 0)
    return logits, seconds
