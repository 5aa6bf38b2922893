"""Section "sparse": steps over long contexts, read wholly and by pages, one layer and whole model.

Contexts are a text's own keys and values, repeated to the length: what a step attends to is then
as concentrated as in a text, and no prompt of that length has to be read first.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation
from transformers import DynamicCache

from dspark_hf import compat
from dspark_hf.attention.pages import PageSummaries
from dspark_hf.attention.policy import CALM, PRESETS
from dspark_hf.attention.sparse import SparseReading, SparseRow, SparseStats, attend_pages
from dspark_hf.benchmarks import contenders as who
from dspark_hf.benchmarks.bench import Bench, SectionResult
from dspark_hf.benchmarks.self_sparse import self_sparse_run
from dspark_hf.benchmarks.settings import CONTEXTS as SHORT_CONTEXTS
from dspark_hf.benchmarks.stats import spread
from dspark_hf.benchmarks.timing import rotated, timed
from dspark_hf.config import DSparkConfig
from dspark_hf.evaluation.corpus import read_documents
from dspark_hf.targets.flat import FlatTarget, read_prompt
from dspark_hf.values import Feed
from dspark_kernels.ragged_attention.op import pack_mask, packed_attention

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXTS = (2048, 8192, 16384, 32768)
LONGEST = 65536
"""Context up to which one layer is timed as well."""
ROWS, QUERIES = (1, 4), (1, 8)
TEXT_TOKENS = 2048
"""Tokens of text whose keys and values are repeated."""
PASSES = 5
"""Timed steps per way and repeat, after one that warms up."""
DENSE, HF = "dspark dense", "hf default"

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Each layer's keys and values, (Hkv, T, D)."""


@dataclass(frozen=True)
class Case:
    """What is timed: `rows` rows of `context` tokens, `queries` new tokens each."""

    level: str
    context: int
    rows: int
    queries: int


def sparse_section(bench: Bench) -> SectionResult:
    """Time decoding steps and verifications of eight tokens.

    Args:
        bench: Its contexts are used where they are not the section "context"'s own.

    Returns:
        SectionResult: `extra["steps"]` has an entry per case and way.
    """
    model = who.twin(bench.model)
    wrapped: Any = who.wrapped(model, "sparse", None).model
    text = _text_layers(bench, wrapped)
    contexts = bench.settings.contexts
    if contexts == SHORT_CONTEXTS:
        contexts = CONTEXTS
    longest = LONGEST if contexts == CONTEXTS else max(contexts)
    cases = [
        Case("layer", context, rows, queries)
        for context in dict.fromkeys((*contexts, longest))
        for rows in ROWS
        for queries in QUERIES
        if context in contexts or rows == 1
    ]
    cases += [Case("model", c, r, q) for c in contexts for r in ROWS for q in QUERIES]
    bench.observer.start("sparse", len(cases))
    steps = []
    for case in cases:
        bench.observer.advance(f"{case.level} {case.context} x {case.rows}, {case.queries}")
        measure = _layer_ways if case.level == "layer" else _model_ways
        steps += _timed_case(bench, case, measure(bench, wrapped, text, case))
        gc.collect()
    drafted = [self_sparse_run(bench, wrapped, context) for context in contexts[1::2]]
    return SectionResult([], {}, extra={"steps": steps, "self_sparse": drafted}, adds_all=False)


def _timed_case(
    bench: Bench, case: Case, ways: dict[str, tuple[Callable[[], Any], SparseStats | None]]
) -> list[dict[str, Any]]:
    """Let the ways take turns on a case."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, PASSES * bench.settings.repeats):
        for name in rotated(list(ways), turn):
            took = timed(ways[name][0], bench.clock).wall_s
            if turn >= 0:
                seconds[name].append(took)
    entries = []
    for name, times in seconds.items():
        stats = ways[name][1]
        entries.append(
            {
                "level": case.level,
                "context": case.context,
                "rows": case.rows,
                "queries": case.queries,
                "way": name,
                "step_s": spread(times),
                "over_dense": spread(a / b for a, b in zip(seconds[DENSE], times, strict=True)),
                "over_hf": spread(a / b for a, b in zip(seconds[HF], times, strict=True)),
                "mean_pages": stats.mean_pages if stats is not None and stats.calls else None,
                "share": stats.share if stats is not None and stats.calls else None,
            }
        )
    return entries


@torch.no_grad()
def _text_layers(bench: Bench, model: Any) -> Layers:
    """Return the keys and values of a text."""
    limit = bench.model.config.max_position_embeddings
    ids = bench.tokenizer("\n\n".join(read_documents()))["input_ids"][: min(TEXT_TOKENS, limit)]
    target = FlatTarget(model, len(ids))
    read_prompt(target, ids)
    return [(k.clone(), v.clone()) for k, v in target.keys_values(0, len(ids))]


def _repeated(text: Layers, context: int) -> Layers:
    """Return a text's keys and values repeated to a length."""
    times = -(-context // text[0][0].shape[1])
    return [
        (keys.repeat(1, times, 1)[:, :context], values.repeat(1, times, 1)[:, :context])
        for keys, values in text
    ]


def _layer_ways(
    bench: Bench,  # noqa: ARG001 - as of the other measure
    model: Any,
    text: Layers,
    case: Case,
) -> dict[str, tuple[Callable[[], Any], SparseStats | None]]:
    """Return one layer's attention in every way; layers take turns, so that keys come from memory.

    The newest `queries` tokens of the context are attended from, with random queries: those look
    more widely than a text's, so that `quality` reads more than it would.
    """
    shape = compat.attention_shape(model)
    layers = [text[i] for i in (0, len(text) // 3, len(text) // 2, len(text) - 1)]
    held = [
        tuple(t[None].expand(case.rows, -1, -1, -1).contiguous() for t in pair)
        for pair in _repeated(layers, case.context)
    ]
    generator = torch.Generator().manual_seed(0)
    size = (case.rows, shape["num_heads"], case.queries, shape["dim"])
    query = torch.randn(size, generator=generator).to(held[0][0].dtype)
    scale = shape["dim"] ** -0.5
    past = case.context - case.queries
    visible = torch.arange(case.context) <= past + torch.arange(case.queries)[:, None]
    mask = None if case.queries == 1 else visible[None, None]
    packed = None
    if case.queries > 1:
        group = shape["num_heads"] // shape["num_kv"]
        packed = pack_mask(visible.expand(case.rows, -1, -1), group, query.dtype)
    turn = iter(range(1 << 30))

    def next_pair() -> Any:
        return held[next(turn) % len(held)]

    def hf() -> Any:
        keys, values = next_pair()
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )

    def dense() -> Any:
        keys, values = next_pair()
        return packed_attention(query, keys, values, packed, scale=scale)

    ways: dict[str, tuple[Callable[[], Any], SparseStats | None]] = {
        HF: (hf, None), DENSE: (dense, None),
    }  # fmt: skip
    for name, policy in PRESETS.items():
        if policy.tokens >= case.context:
            continue
        stats = SparseStats()
        row = SparseRow(policy, stats, 0, CALM)
        summaries = [PageSummaries() for _ in held]
        for pages, (keys, _) in zip(summaries, held, strict=True):
            # A context is summarised as it is read, not by the step that attends to it.
            for slot in range(case.rows):
                pages.refresh(keys, slot, past)
        ways[name] = (
            partial(_attend_rows, query, held, summaries, row, turn, past, scale),
            stats,
        )
    return ways


def _attend_rows(
    query: torch.Tensor,
    held: list[Any],
    summaries: list[PageSummaries],
    row: SparseRow,
    turn: Any,
    past: int,
    scale: float,
) -> list[torch.Tensor]:
    """Attend every row of a layer by pages."""
    place = next(turn) % len(held)
    keys, values = held[place]
    return [
        attend_pages(
            query[slot], keys, values, summaries[place], row,
            slot=slot, past=past, layer=0, scale=scale,
        )
        for slot in range(len(query))
    ]  # fmt: skip


def _model_ways(
    bench: Bench, model: Any, text: Layers, case: Case
) -> dict[str, tuple[Callable[[], Any], SparseStats | None]]:
    """Return one forward of the whole model in every way, taken back behind it.

    Presets are used as a user gets them: densely where that was measured to be quicker.
    """
    layers = _repeated(text, case.context)
    target = FlatTarget(model, case.context + case.queries)
    for row in range(case.rows):
        target.restore(row, layers)
    readings: dict[str, SparseReading | None] = {DENSE: None}
    for name in PRESETS:
        found = model.dspark.sparse_reading(DSparkConfig(sparse=name))
        # With statistics of its own; the crossover is measured once.
        readings[name] = SparseReading(found.policy, SparseStats(), found.min_context)
    ids = list(range(5, 5 + case.queries))

    @torch.no_grad()
    def ours(reading: SparseReading | None) -> Any:
        for row in range(case.rows):
            read = None if reading is None else replace(reading.row(), signals=CALM)
            target.read_sparsely(row, read)
        out = target.forward([Feed(row, ids, len(ids)) for row in range(case.rows)])
        for row in range(case.rows):
            target.rollback(row, case.context)
        return out

    cache = DynamicCache(config=bench.model.config)
    for layer, (keys, values) in enumerate(layers):
        pair = (t[None].repeat(case.rows, 1, 1, 1) for t in (keys, values))
        cache.update(*pair, layer)
    inputs = torch.tensor([ids] * case.rows)

    @torch.no_grad()
    def hf() -> Any:
        held: Any = {compat.cache_key(bench.model): cache}
        out = bench.model(input_ids=inputs, use_cache=True, **held)
        cache.crop(-len(ids))
        return out

    ways: dict[str, tuple[Callable[[], Any], SparseStats | None]] = {HF: (hf, None)}
    for name, reading in readings.items():
        ways[name] = (partial(ours, reading), None if reading is None else reading.stats)
    return ways
