"""Attending from a few queries of one row to selected pages of its cached context."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import StepSignals
from dspark_hf.attention.predictors import page_weights

if TYPE_CHECKING:
    from dspark_hf.attention.policy import SparsePolicy

LEAST, TINY = -1e30, 1e-30
"""Stand for the largest logit and the sum of nothing where they are subtracted and divided by."""
NOWHERE = 1 << 40
"""Page behind every token, for padding."""
MOST_PADDING = 2.0
"""Pages gathered for each that is read, up to which heads are attended together: few calls of
larger products are quicker than many of small ones."""


@dataclass
class PageCounts:
    """Pages read by attention that selects.

    Attributes:
        calls: Times pages were selected.
        pages_read: Pages read, over key heads.
        pages_held: Pages there were.
        squares: Sum of squared pages per call and key head, for the spread.
        means: Sum of pages per call and key head.
    """

    calls: int = 0
    pages_read: int = 0
    pages_held: int = 0
    squares: float = 0.0
    means: float = 0.0

    def add(self, read: int, held: int, num_heads: int) -> None:
        """Count a call."""
        self.calls += 1
        self.pages_read += read
        self.pages_held += held * num_heads
        self.means += read / num_heads
        self.squares += (read / num_heads) ** 2

    @property
    def mean_pages(self) -> float:
        """Mean pages read per call and key head."""
        return self.means / max(self.calls, 1)

    @property
    def spread_pages(self) -> float:
        """Standard deviation of the pages read per call and key head."""
        variance = self.squares / max(self.calls, 1) - self.mean_pages**2
        return math.sqrt(max(variance, 0.0))

    @property
    def share(self) -> float:
        """Pages read of those there were."""
        return self.pages_read / max(self.pages_held, 1)


@dataclass
class SparseStats(PageCounts):
    """What sparse attention read; counts over layers and decoding steps, and prompts apart.

    Attributes:
        extensions: Times a step read more pages than budgeted.
        prefill: The same of prompts, where a call is a block of queries in a layer.
    """

    extensions: int = 0
    prefill: PageCounts = field(default_factory=PageCounts)

    @property
    def prefill_calls(self) -> int:
        """Blocks of prompts that read selected pages, over layers."""
        return self.prefill.calls


@dataclass
class SparseRow:
    """A row that is read sparsely.

    Attributes:
        policy: How.
        stats: Where reads are counted.
        min_context: Shorter contexts are read densely, in tokens.
        signals: What budgets follow.
        entropies: Of the distributions behind the newest tokens, where the budget wants them.
    """

    policy: SparsePolicy
    stats: SparseStats
    min_context: int
    signals: StepSignals = field(default_factory=StepSignals)
    entropies: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SparseReading:
    """How a call's rows are read: what every one of them gets a `SparseRow` from.

    Attributes:
        policy: How.
        stats: Where all reads are counted.
        min_context: Shorter contexts are read densely, in tokens.
    """

    policy: SparsePolicy
    stats: SparseStats
    min_context: int

    def row(self) -> SparseRow:
        """Return a new row's."""
        return SparseRow(self.policy, self.stats, self.min_context)


def attend_pages(
    query: torch.Tensor,  # [Hq, T, D]
    keys: torch.Tensor,  # [slots, Hkv, positions, D]
    values: torch.Tensor,  # [slots, Hkv, positions, Dv]
    summaries: PageSummaries,
    row: SparseRow,
    *,
    slot: int,
    past: int,
    layer: int,
    scale: float,
) -> torch.Tensor:  # [T, Hq, Dv]
    """Attend from a row's newest T tokens, whose keys are cached, to selected pages.

    Args:
        query: Queries, T at most the recent pages' tokens.
        keys: The layer's cached keys, contiguous.
        values: The layer's cached values, contiguous.
        summaries: Of the layer's keys.
        row: Policy, signals and statistics of the row.
        slot: Of the row.
        past: Tokens cached before the newest T.
        layer: Index of the layer.
        scale: Factor on the dot products.

    Returns:
        torch.Tensor: Of shape (T, Hq, Dv).

    Numerics: logits and softmax in float32; products in the cache's type.
    """
    num_heads, num_queries, dim = query.shape
    num_kv = keys.shape[1]
    length, policy = past + num_queries, row.policy
    packed = query.reshape(num_kv, -1, dim)
    # A forward that failed may have summarised tokens which these replace.
    summaries.rollback(slot, past)
    # The first of the tokens selects for all: were the others heard, a draft that is verified would
    # move the distributions of the tokens before it.
    summary = summaries.refresh(keys, slot, past + 1)
    leaders = query[:, 0].reshape(num_kv, -1, dim)
    scores = policy.predictor.scores(leaders, summary, layer, scale)
    num_pages = -(-length // PAGE)
    extra = num_pages - scores.shape[2]
    scores = F.pad(scores, (0, extra), value=float("-inf"))
    factor = policy.budget.factor(layer, row.signals)
    step = max(int(policy.tokens * factor) // PAGE, policy.sink_pages + policy.recent_pages)
    most = step if policy.mass is None else max(int(policy.ceiling * factor) // PAGE, step)
    # Pages begun by later tokens come on top, so that the first reads what it would alone.
    order = best_pages(
        page_weights(scores),
        (most + extra) * num_kv,
        policy.sink_pages,
        policy.recent_pages + extra,
    )
    taken = min((step + extra) * num_kv, order.numel())
    masses = None if policy.mass is None else scores.new_full(scores.shape, float("-inf"))
    reader = _Reader(packed, keys, values, slot, past, num_queries, scale, masses)
    out, total = reader.read(order[:taken], num_pages)
    while policy.mass is not None and masses is not None and taken < order.numel():
        if missing_mass(scores, masses, order[:taken]) <= 1 - policy.mass:
            break
        end = min(taken + step * num_kv, order.numel())
        out, total = merge(out, total, *reader.read(order[taken:end], num_pages))
        taken = end
        row.stats.extensions += 1
    row.stats.add(taken, num_pages, num_kv)
    out = out.view(num_kv, -1, num_queries, values.shape[3])
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1).to(query.dtype)


def best_pages(
    weights: torch.Tensor, count: int, sink_pages: int, recent_pages: int
) -> torch.Tensor:
    """Return the (head, page) pairs to read, best first: those always read, then by weight.

    Args:
        weights: Of shape (Hkv, P).
        count: How many, over all heads; all there are if fewer.
        sink_pages: First pages, always read.
        recent_pages: Last pages, always read.

    Returns:
        torch.Tensor: int64 of shape (count,), each h * P + p.
    """
    ranked = weights.clone()
    # Shares are at most 1, so these come first.
    ranked[:, :sink_pages] = 2.0
    ranked[:, max(weights.shape[1] - recent_pages, 0) :] = 2.0
    ranked = ranked.flatten()
    return ranked.topk(min(count, ranked.numel())).indices


def merge(
    out: torch.Tensor, total: torch.Tensor, other: torch.Tensor, other_total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over two disjoint sets of keys by their log-sum-exps.

    Args:
        out: Of shape (..., Dv).
        total: Log-sum-exp of its logits, of shape (...).
        other: As `out`, over other keys.
        other_total: As `total`.
    """
    joint = torch.logaddexp(total, other_total)
    share = (total - joint).exp()[..., None]
    rest = (other_total - joint).exp()[..., None]
    # A head that read nothing has log-sum-exp -inf and no output to speak of.
    return torch.nan_to_num(out) * share + torch.nan_to_num(other) * rest, joint


def missing_mass(scores: torch.Tensor, masses: torch.Tensor, read: torch.Tensor) -> float:
    """Estimate the share of attention on pages not read, the mean over queries.

    The scores of pages not read become masses by what scores were off, head by head, on the last
    quarter of those read: of all pages that are known these are most like them.

    Args:
        scores: Of the predictor, of shape (Hkv, R, P).
        masses: Log-sum-exp of the logits of every page read, -inf for others, of the same shape.
        read: Pages read as of `best_pages`, best first.

    Source: measured in docs/sparse.md.
    """
    is_like = torch.zeros_like(scores[:, 0], dtype=torch.bool)
    is_like.view(-1)[read[3 * len(read) // 4 :]] = True
    nothing = float("-inf")
    known = masses.masked_fill(~is_like[:, None], nothing).logsumexp(dim=-1)
    guessed = scores.masked_fill(~is_like[:, None], nothing).logsumexp(dim=-1)
    error = guessed - known
    # A head none of whose pages is among them is taken to be off as the others are.
    has_like = torch.isfinite(error)
    if not has_like.any():
        return 1.0
    error = error.where(has_like, error[has_like].mean())
    unread = scores.masked_fill(masses > nothing, nothing).logsumexp(dim=-1) - error
    total = masses.logsumexp(dim=-1)
    return float((unread - torch.logaddexp(unread, total)).exp().mean())


@dataclass(frozen=True)
class _Reader:
    """Reads pages of one row and attends to them, head by head."""

    packed: torch.Tensor  # [Hkv, R, D]
    keys: torch.Tensor
    values: torch.Tensor
    slot: int
    past: int
    num_queries: int
    scale: float
    masses: torch.Tensor | None  # [Hkv, heads of a group, P], of the first query; filled in

    def read(self, chosen: torch.Tensor, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to (head, page) pairs.

        Returns:
            tuple: Output (Hkv, R, Dv) and log-sum-exp (Hkv, R), both float32.
        """
        num_kv = self.packed.shape[0]
        chosen = chosen.sort().values
        head, page = chosen // num_pages, chosen % num_pages
        index = (self.slot * num_kv + head) * (self.keys.shape[2] // PAGE) + page
        counts = torch.bincount(head, minlength=num_kv)
        if num_kv * int(counts.max()) <= MOST_PADDING * len(chosen):
            return self.attend_padded(head, page, index, counts)
        return self.attend_by_head(head, page, index, counts)

    def attend_padded(
        self, head: torch.Tensor, page: torch.Tensor, index: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with all heads at once, each padded to the pages of the widest."""
        num_kv, _, dim = self.packed.shape
        place = torch.arange(len(head), device=head.device) - (counts.cumsum(0) - counts)[head]
        shape = (num_kv, int(counts.max()))
        places = index.new_zeros(shape).index_put_((head, place), index).flatten()
        pages = page.new_full(shape, NOWHERE).index_put_((head, place), page)
        keys = gather_pages(self.keys, places).view(num_kv, -1, dim)
        values = gather_pages(self.values, places).view(num_kv, -1, self.values.shape[3])
        logits = torch.bmm(self.packed, keys.transpose(1, 2)).float().mul_(self.scale)
        hidden = self._hidden(pages)[:, None]
        logits.view(num_kv, -1, *hidden.shape[2:]).masked_fill_(hidden, float("-inf"))
        # A head none of whose pages is read has -inf only, and no output.
        top = logits.amax(dim=-1).clamp_min(LEAST)
        shares = torch.exp_(logits.sub_(top[..., None]))
        if self.masses is not None:
            first = shares[:, :: self.num_queries].unflatten(2, (-1, PAGE)).sum(dim=-1)
            first = first.log_().add_(top[:, :: self.num_queries, None])
            self.masses[head, :, page] = first[head, :, place]
        sums = shares.sum(dim=-1)
        out = torch.bmm(shares.to(values.dtype), values).float()
        return out.div_(sums.clamp_min(TINY)[..., None]), top + sums.log()

    def attend_by_head(
        self, head: torch.Tensor, page: torch.Tensor, index: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend head by head, where one reads so many pages that padding others costs more."""
        num_kv, rows, _ = self.packed.shape
        out = self.packed.new_zeros(num_kv, rows, self.values.shape[3], dtype=torch.float32)
        total = out.new_full((num_kv, rows), float("-inf"))
        for h, count in enumerate(counts.tolist()):
            if count:
                own = head == h
                alone = dataclasses.replace(
                    self,
                    packed=self.packed[h : h + 1],
                    masses=None if self.masses is None else self.masses[h : h + 1],
                )
                found = alone.attend_padded(head[own] - h, page[own], index[own], counts[h : h + 1])
                out[h], total[h] = found[0][0], found[1][0]
        return out, total

    def _hidden(self, pages: torch.Tensor) -> torch.Tensor:
        """Tell which tokens of pages (..., P) lie behind each new token; (..., T, P x 16)."""
        place = pages[..., None] * PAGE + torch.arange(PAGE, device=pages.device)
        newest = self.past + torch.arange(self.num_queries, device=pages.device)
        return place.flatten(-2)[..., None, :] > newest[:, None]


def gather_pages(cached: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copy pages of a layer's cache as (tokens, D): whole pages are quickest to gather on a CPU.

    Args:
        cached: Keys or values, contiguous, of shape (slots, Hkv, positions, D).
        index: Pages, each counted over all slots and heads.
    """
    dim = cached.shape[3]
    return cached.view(-1, PAGE * dim).index_select(0, index).view(-1, dim)
