"""Attending from a prompt in blocks of queries, each to the pages that queries before it point to.

A block reads the sink pages, the pages just before it, of all others those that promise the leaders
(`leaders.py`) most attention, and itself, causally. Blocks begin at multiples of their size in the
row, so that it does not matter in which chunks a prompt is fed.

Source: block lists per tile of queries as in MInference (Jiang et al., arXiv:2407.02490); pages and
their scores as in decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_hf.attention.leaders import LEADERS
from dspark_hf.attention.pages import PAGE
from dspark_hf.attention.policy import CALM
from dspark_hf.attention.predictors import scores_of_tokens
from dspark_hf.attention.sparse import gather_pages
from dspark_kernels.block_sparse_prefill.op import MAX_DIM, block_sparse_prefill
from dspark_kernels.block_sparse_prefill.reference import QUERY_TILE

if TYPE_CHECKING:
    from dspark_hf.attention.leaders import Leaders
    from dspark_hf.attention.pages import PageSummaries
    from dspark_hf.attention.policy import SparsePolicy, SparsePrefill
    from dspark_hf.attention.sparse import SparseRow

MAX_SCORES = 1 << 22
"""Scores held at once, over leaders, heads and pages: 16 MiB."""


def first_in_blocks(prefill: SparsePrefill, leaders: Leaders, past: int, end: int) -> int:
    """Return the position from which a run of a prompt is read in blocks; `end` for nowhere.

    Before it lie the tokens that are always read densely, and blocks without leaders: a row's
    first, and the first ones behind tokens that were not read as a prompt.

    Args:
        prefill: Size of blocks, and which is the first that selects.
        leaders: Of the run and of the block before it.
        past: Tokens of the row before the run.
        end: Tokens of the row with the run.
    """
    led = {position // prefill.block + 1 for position in leaders.positions}
    for block in range(max(past // prefill.block, prefill.first_block), -(-end // prefill.block)):
        if block in led:
            return max(past, block * prefill.block)
    return end


def attend_blocks(
    query: torch.Tensor,  # [Hq, T, D]
    keys: torch.Tensor,  # [slots, Hkv, positions, D]
    values: torch.Tensor,  # [slots, Hkv, positions, Dv]
    summaries: PageSummaries,
    leaders: Leaders,
    row: SparseRow,
    *,
    slot: int,
    past: int,
    first: int,
    layer: int,
    scale: float,
) -> torch.Tensor:  # [T, Hq, Dv]
    """Attend from a prompt's tokens, whose keys are cached, to the pages each block selects.

    Args:
        query: Queries of the tokens from position `first` on.
        keys: The layer's cached keys, contiguous.
        values: The layer's cached values, contiguous.
        summaries: Of the layer's keys.
        leaders: That choose for every block of the tokens.
        row: Policy and statistics of the row; its policy has a `prefill`.
        slot: Of the row.
        past: Tokens that were cached before the forward.
        first: Position of the first token.
        layer: Index of the layer.
        scale: Factor on the dot products.

    Returns:
        torch.Tensor: Of shape (T, Hq, Dv).

    Numerics: softmax in float32; products, on a CPU logits too, in the cache's type.
    """
    prefill = row.policy.prefill
    if prefill is None:
        raise ValueError("row.policy.prefill must be set to read in blocks; got None.")
    size, end = prefill.block, first + query.shape[1]
    blocks = range(first // size, -(-end // size))
    # A forward that failed may have summarised tokens which these replace.
    summaries.rollback(slot, past)
    summary = summaries.refresh(keys, slot, blocks[-1] * size)
    run = _Run(query, keys, values, slot, first, size, scale)
    at_once = max(1, MAX_SCORES // (LEADERS * query.shape[0] * summary.shape[1]))
    outs = []
    for start in range(blocks[0], blocks[-1] + 1, at_once):
        part = range(start, min(start + at_once, blocks[-1] + 1))
        chosen = choose_pages(leaders, summary, row.policy, prefill, part, end, layer, scale)
        num_kv = chosen.shape[1]
        for block, read in zip(part, chosen.sum(dim=(1, 2)).tolist(), strict=True):
            row.stats.prefill.add(read, -(-min((block + 1) * size, end) // PAGE), num_kv)
        outs.append(run.by_op(chosen, part) if run.fits_op else run.block_by_block(chosen, part))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def choose_pages(
    leaders: Leaders,
    summary: torch.Tensor,  # [Hkv, P, 2 D]
    policy: SparsePolicy,
    prefill: SparsePrefill,
    blocks: range,
    end: int,
    layer: int,
    scale: float,
) -> torch.Tensor:  # [blocks, Hkv, pages]
    """Return which pages each block reads, its own included.

    Args:
        leaders: Some of every block before one of `blocks`.
        summary: Of the pages before the last block, at least.
        policy: Predictor, sink and recent pages, factor by layer.
        prefill: Budget.
        blocks: Numbers of the blocks, one behind the other.
        end: Tokens of the row; pages beyond are not read.
        layer: Index of the layer.
        scale: Factor on the dot products.

    Returns:
        torch.Tensor: Bool; its last page holds the last token of the last block, or `end`.
    """
    num_kv, device = summary.shape[0], summary.device
    pages_per_block = prefill.block // PAGE
    num_pages = -(-min(blocks.stop * prefill.block, end) // PAGE)
    summary = summary[:, : blocks[-1] * pages_per_block]
    page = torch.arange(num_pages, device=device)
    starts = torch.arange(blocks[0], blocks.stop, device=device)[:, None] * pages_per_block
    shares = _shares(leaders, summary, policy, prefill.block, blocks, layer, scale)
    ranked = F.pad(shares, (0, num_pages - summary.shape[1]))
    # Shares are at most 1, so these come first; and a block selects among pages before it only.
    is_kept = (page < policy.sink_pages) | (page >= starts - policy.recent_pages)
    ranked = ranked.masked_fill(is_kept[:, None], 2.0)
    ranked = ranked.masked_fill((page >= starts)[:, None], -1.0).flatten(1)
    factor = policy.budget.factor(layer, CALM)
    least = policy.sink_pages + policy.recent_pages
    budget = max(int(prefill.tokens * factor) // PAGE, least) * num_kv
    most = max(int(prefill.ceiling * factor) // PAGE, least) * num_kv
    best = ranked.topk(min(most, ranked.shape[1]))
    wanted = torch.full((len(blocks), 1), budget, device=device)
    if prefill.mass is not None:
        padded = F.pad(shares, (0, num_pages - summary.shape[1])).flatten(1)
        captured = padded.gather(1, best.indices).cumsum(dim=1) / num_kv
        missing = captured < prefill.mass
        wanted = wanted.maximum(missing.sum(dim=1, keepdim=True) + 1)
    rank = torch.arange(best.indices.shape[1], device=device)
    is_read = torch.zeros_like(ranked, dtype=torch.bool)
    is_read.scatter_(1, best.indices, (rank < wanted) & (best.values >= 0))
    is_own = (page >= starts) & (page < starts + pages_per_block)
    return is_read.view(len(blocks), num_kv, -1) | is_own[:, None]


def _shares(
    leaders: Leaders,
    summary: torch.Tensor,  # [Hkv, P, 2 D]
    policy: SparsePolicy,
    size: int,
    blocks: range,
    layer: int,
    scale: float,
) -> torch.Tensor:  # [blocks, Hkv, P]
    """Return each page's share of a block's attention, the mean over the block's leaders."""
    num_kv, device = summary.shape[0], summary.device
    own = leaders.between((blocks[0] - 1) * size, (blocks.stop - 1) * size)
    block = torch.tensor([position // size + 1 - blocks[0] for position in own.positions])
    block = block.to(device)
    query = own.queries.unflatten(0, (num_kv, -1))
    scores = scores_of_tokens(policy.predictor, query, summary, layer, scale)
    page = torch.arange(summary.shape[1], device=device)
    is_later = page >= (block[:, None] + blocks[0]) * (size // PAGE)
    scores = scores.masked_fill(is_later, float("-inf"))
    weights = torch.softmax(scores, dim=-1).mean(dim=1).transpose(0, 1)
    sums = weights.new_zeros(len(blocks), *weights.shape[1:]).index_add_(0, block, weights)
    return sums / torch.bincount(block, minlength=len(blocks))[:, None, None]


@dataclass(frozen=True)
class _Run:
    """Tokens of a prompt that are attended in blocks."""

    query: torch.Tensor  # [Hq, T, D]
    keys: torch.Tensor
    values: torch.Tensor
    slot: int
    first: int
    size: int
    scale: float

    @property
    def fits_op(self) -> bool:
        """Whether there is a kernel for the run."""
        widest = MAX_DIM.get(self.keys.element_size(), 0)
        fits = max(self.keys.shape[3], self.values.shape[3]) <= widest
        return self.query.device.type == "cuda" and fits

    def span(self, blocks: range) -> tuple[int, int]:
        """Return the positions, from and to, of the tokens in some blocks."""
        end = self.first + self.query.shape[1]
        return max(self.first, blocks[0] * self.size), min(end, blocks.stop * self.size)

    def by_op(self, chosen: torch.Tensor, blocks: range) -> torch.Tensor:
        """Attend by the kernels' op, tile by tile from a multiple of the tile's size on.

        Args:
            chosen: Pages to read, bool of shape (blocks, Hkv, pages).
            blocks: Numbers of the blocks.

        Returns:
            torch.Tensor: Of shape (T, Hq, Dv).
        """
        begin, end = self.span(blocks)
        aligned = begin // QUERY_TILE * QUERY_TILE
        query = self.query[:, begin - self.first : end - self.first]
        query = F.pad(query, (0, 0, begin - aligned, 0))[None]
        tiles = torch.arange(aligned, end, QUERY_TILE, device=query.device) // self.size
        is_read = chosen.index_select(0, tiles - blocks[0]).transpose(0, 1)
        page = torch.arange(chosen.shape[2], device=query.device, dtype=torch.int32)
        lists = page.where(is_read, chosen.shape[2]).sort(dim=-1).values[None]
        counts = is_read.sum(dim=-1, dtype=torch.int32)[None]
        slot, past = (torch.tensor([n], device=query.device) for n in (self.slot, aligned))
        out = block_sparse_prefill(
            query, self.keys, self.values, lists.int().contiguous(), counts.contiguous(), slot,
            past, scale=self.scale, page_size=PAGE,
        )  # fmt: skip
        return out[0, :, begin - aligned :].transpose(0, 1)

    def block_by_block(self, chosen: torch.Tensor, blocks: range) -> torch.Tensor:
        """Attend as `by_op`, block by block and head by head: quickest on a CPU."""
        return torch.cat(
            [self._block(pages, block) for pages, block in zip(chosen, blocks, strict=True)]
        )

    def _block(self, chosen: torch.Tensor, block: int) -> torch.Tensor:
        begin, end = self.span(range(block, block + 1))
        num_kv, num_heads = chosen.shape[0], self.query.shape[0]
        head, page = chosen.nonzero(as_tuple=True)
        counts = torch.bincount(head, minlength=num_kv).tolist()
        index = (self.slot * num_kv + head) * (self.keys.shape[2] // PAGE) + page
        keys, values = gather_pages(self.keys, index), gather_pages(self.values, index)
        query = self.query[:, begin - self.first : end - self.first].reshape(
            num_kv, -1, self.query.shape[2]
        )
        # A block's own pages end every head's list; only there may a query come too early.
        num_own = -(-end // PAGE) - block * self.size // PAGE
        place = page[-num_own:, None] * PAGE
        place = (place + torch.arange(PAGE, device=page.device)).flatten()
        newest = torch.arange(begin, end, device=page.device)
        hidden = (place > newest[:, None]).repeat(num_heads // num_kv, 1)
        attend = _attend_by_kernel if query.dtype.itemsize > 2 else _attend_by_products
        outs, start = [], 0
        for packed, count in zip(query, counts, strict=True):
            span = slice(start * PAGE, (start + count) * PAGE)
            outs.append(attend(packed, keys[span], values[span], hidden, self.scale))
            start += count
        return torch.stack(outs).view(num_heads, end - begin, -1).transpose(0, 1)


def _attend_by_kernel(
    query: torch.Tensor,  # [R, D]
    keys: torch.Tensor,  # [S, D]
    values: torch.Tensor,  # [S, Dv]
    hidden: torch.Tensor,  # [R, last positions of S]
    scale: float,
) -> torch.Tensor:  # [R, Dv]
    """Attend by PyTorch's fused kernel: in float32 as quick as products, or quicker."""
    mask = query.new_zeros(len(query), len(keys))
    mask[:, -hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    one = (query[None, None], keys[None, None], values[None, None])
    return F.scaled_dot_product_attention(*one, attn_mask=mask, scale=scale)[0, 0]


def _attend_by_products(
    query: torch.Tensor,  # [R, D]
    keys: torch.Tensor,  # [S, D]
    values: torch.Tensor,  # [S, Dv]
    hidden: torch.Tensor,  # [R, last positions of S]
    scale: float,
) -> torch.Tensor:  # [R, Dv]
    """Attend by two matrix products: in 16 bits up to twice as quick as the fused kernel."""
    logits = torch.mm(query, keys.T).float() * scale
    logits[:, -hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    return torch.mm(torch.softmax(logits, dim=-1).to(values.dtype), values)
