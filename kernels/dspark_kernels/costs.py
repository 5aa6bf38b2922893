"""What each kernel must move and compute, by formula, and the time a GPU needs for that at least.

The floor is the larger of bytes over measured copy bandwidth and flops over peak; a kernel's own
intermediate results count, what a cache serves again does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark_kernels.tiles import PAGE_SIZE, ceil_div

COPY_BANDWIDTH = 4.3e12
"""Bytes per second an H200 was measured to copy (the project's issue 4)."""
PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H200, from NVIDIA's data sheet; not measured."""
ELEMENT = 2
"""Bytes of a bfloat16."""
SPLIT_LISTED, SPLIT_DENSE, VOCABULARY_BLOCK = 256, 512, 128
"""Tokens per split of paged and ragged attention, entries per program of the Markov step; a test
holds them to the kernels' own."""


@dataclass(frozen=True)
class Shape:
    """A model and a step; the default is like Llama 3 8B decoding at 32k tokens.

    Attributes:
        rows: Rows of the step.
        tokens: New tokens per row (1 decodes, 8 verifies).
        heads: Query heads.
        kv_heads: Key heads.
        dim: Head width.
        context: Cached tokens per row.
        kept: Tokens attended per key head when sparse.
        vocabulary: Entries of the vocabulary.
        rank: Rank of the Markov head.
    """

    rows: int = 1
    tokens: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    context: int = 32_768
    kept: int = 2_048
    vocabulary: int = 128_256
    rank: int = 256

    @property
    def pages(self) -> int:
        """Pages in use per row."""
        return ceil_div(self.context, PAGE_SIZE)

    @property
    def queries(self) -> int:
        """Queries of all heads."""
        return self.rows * self.heads * self.tokens


@dataclass(frozen=True)
class Cost:
    """Work of one call.

    Attributes:
        bytes_moved: Read and written in memory.
        flops: Multiplications and additions.
    """

    bytes_moved: float
    flops: float

    @property
    def intensity(self) -> float:
        """Flops per byte; above 230 an H200 is limited by arithmetic."""
        return self.flops / self.bytes_moved

    @property
    def floor_us(self) -> float:
        """Microseconds an H200 needs at least."""
        return 1e6 * max(self.bytes_moved / COPY_BANDWIDTH, self.flops / PEAK_FLOPS)


def page_summary(shape: Shape) -> Cost:
    """Read the touched pages' keys, write two vectors a page."""
    pages = shape.rows * shape.kv_heads * ceil_div(shape.tokens + PAGE_SIZE - 1, PAGE_SIZE)
    moved = pages * (PAGE_SIZE + 2) * shape.dim * ELEMENT
    return Cost(moved, 2 * pages * PAGE_SIZE * shape.dim)


def page_score(shape: Shape) -> Cost:
    """Read both vectors of every page; write and read float32 scores; write the weights."""
    summaries = 2 * shape.rows * shape.kv_heads * shape.pages * shape.dim * ELEMENT
    scores = 2 * shape.queries * shape.pages * 4
    weights = shape.rows * shape.kv_heads * shape.pages * 4
    return Cost(summaries + scores + weights, 4 * shape.queries * shape.pages * shape.dim)


def page_select(shape: Shape) -> Cost:
    """Read the weights; write and read the choice as bytes; write the lists."""
    candidates = shape.rows * shape.kv_heads * shape.pages
    lists = shape.rows * shape.kv_heads * (shape.kept // PAGE_SIZE + 1) * 4
    return Cost(candidates * (4 + 2) + lists, candidates)


def paged_attention(shape: Shape) -> Cost:
    """Read the listed keys and values, the queries; write and read the splits' results."""
    cached = 2 * shape.rows * shape.kv_heads * shape.kept * shape.dim * ELEMENT
    parts = 2 * ceil_div(shape.kept, SPLIT_LISTED) * shape.queries * (shape.dim + 1) * 4
    ends = 2 * shape.queries * shape.dim * ELEMENT
    return Cost(cached + parts + ends, 4 * shape.queries * shape.kept * shape.dim)


def merge_lse(shape: Shape) -> Cost:
    """Read the splits of paged attention, write the result."""
    parts = ceil_div(shape.kept, SPLIT_LISTED) * shape.queries
    moved = parts * (shape.dim + 1) * 4 + shape.queries * (shape.dim * ELEMENT + 4)
    return Cost(moved, 2 * parts * shape.dim)


def block_sparse_prefill(shape: Shape) -> Cost:
    """Attend a prompt of `context` tokens to `kept` each; keys and values once from memory."""
    cached = 2 * shape.kv_heads * shape.context * shape.dim * ELEMENT
    ends = 2 * shape.heads * shape.context * shape.dim * ELEMENT
    flops = 4 * shape.heads * shape.context * shape.kept * shape.dim
    return Cost(shape.rows * (cached + ends), shape.rows * flops)


def ragged_attention(shape: Shape) -> Cost:
    """Read all keys and values; write and read the splits' results."""
    cached = 2 * shape.rows * shape.kv_heads * shape.context * shape.dim * ELEMENT
    parts = 2 * ceil_div(shape.context, SPLIT_DENSE) * shape.queries * (shape.dim + 1) * 4
    ends = 2 * shape.queries * shape.dim * ELEMENT
    return Cost(cached + parts + ends, 4 * shape.queries * shape.context * shape.dim)


def markov_step(shape: Shape) -> Cost:
    """Read the low-rank matrix once and the base scores; write and read five values a block."""
    parts = 2 * 20 * shape.rows * ceil_div(shape.vocabulary, VOCABULARY_BLOCK)
    moved = (shape.rank + shape.rows) * shape.vocabulary * ELEMENT + parts
    return Cost(moved, 2 * shape.rows * shape.vocabulary * shape.rank)


def rejection_sampling(shape: Shape) -> Cost:
    """Read one position's float32 probabilities of target and drafter."""
    moved = shape.rows * shape.vocabulary * 2 * 4
    return Cost(moved, 3 * shape.rows * shape.vocabulary)


COSTS = {
    "page_summary": page_summary,
    "page_score": page_score,
    "page_select": page_select,
    "paged_attention": paged_attention,
    "merge_lse": merge_lse,
    "ragged_attention": ragged_attention,
    "block_sparse_prefill": block_sparse_prefill,
    "markov_step": markov_step,
    "rejection_sampling": rejection_sampling,
}
"""By folder of the op."""
