"""Section "queue": many requests at once, decoded in turn, in batches, and by the queue.

Everything is greedy, and a request's tokens count up to its own end or limit, whatever else a batch
computed behind it. Ways take turns, so that what happens on the machine meanwhile meets all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from dspark_hf.benchmarks import contenders as who
from dspark_hf.benchmarks import prompts as what
from dspark_hf.benchmarks.bench import Bench, SectionResult
from dspark_hf.benchmarks.stats import spread
from dspark_hf.benchmarks.timing import rotated, timed
from dspark_hf.config import DSparkConfig
from dspark_hf.losslessness import end_ids
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.handle import WAITING
from dspark_hf.serving.memory import free_bytes
from dspark_hf.serving.queue import GenerationQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REQUESTS = 16
LIMITS = (128, 16, 64, 32)
"""New tokens the requests may have, in turn."""
MIXES = {"limits of 16 to 128": LIMITS, "own ends, to 128": (128,)}
"""What ends requests where throughput is measured."""
STATIC_BATCHES = (8, 16)
LONG, SHORT = 128, 8
"""New tokens of long and of short requests where they compete."""
COMPETING = 8
"""Requests of each kind."""
LEAST_TURNS = 3
"""Times at least that orders are compared, and single requests with generate()."""
PLACES = 4
"""Rows decoded together where requests compete."""
BEGINNING = 2048
"""Tokens that prompts have in common, or that interrupt others."""
CONTINUOUS_PAGE, CONTINUOUS_STEP = 256, 512
"""Tokens of a page and of a step of Transformers' continuous batching."""
DEFAULTS_TAKE = 18e9
"""Free bytes from which its defaults are tried too: they take most of the memory for a cache."""
INTERACTIVE = 24
"""Requests whose first token is timed under load."""


@dataclass(frozen=True)
class Work:
    """A request: its prompt's ids and the most new tokens."""

    ids: tuple[int, ...]
    limit: int


def queue_section(bench: Bench) -> SectionResult:
    """Measure the queue against sequential calls, static batches and Transformers' own queue.

    Args:
        bench: Its settings may name a drafter; lookup otherwise.

    Returns:
        SectionResult: All in `extra`: "throughput", "order", "first_token", "beginnings",
        "overhead".
    """
    model = who.twin(bench.model)
    wrapped: Any = who.wrapped(
        model, "queue", bench.settings.drafter or "lookup", tokenizer=bench.tokenizer
    ).model
    plain = who.twin(bench.model)
    parts: list[tuple[str, Callable[[], Any]]] = [
        (
            "throughput",
            lambda: [e for mix in MIXES for e in _throughput(bench, plain, wrapped, mix)],
        ),
        ("order", lambda: _order(bench, wrapped)),
        ("first_token", lambda: _first_token(bench, wrapped)),
        ("beginnings", lambda: _beginnings(bench, wrapped)),
        ("overhead", lambda: _overhead(bench, wrapped)),
    ]
    bench.observer.start("queue", len(parts))
    extra = {}
    for name, measure in parts:
        bench.observer.advance(name)
        extra[name] = measure()
    return SectionResult([], {}, extra=extra, adds_all=False)


def requests(bench: Bench, count: int = REQUESTS, limits: Sequence[int] = LIMITS) -> list[Work]:
    """Return unlike requests: prompts of all groups in turn, with limits in turn."""
    items = bench.items(1)
    mixed = what.alternating(items, len(items))
    most = bench.settings.max_new_tokens
    return [
        Work(
            tuple(mixed[i % len(mixed)].inputs["input_ids"][0].tolist()),
            min(limits[i % len(limits)], most),
        )
        for i in range(count)
    ]


def _throughput(bench: Bench, plain: Any, wrapped: Any, mix: str) -> list[dict[str, Any]]:
    """Time the same requests decoded in every way; all are there at the start."""
    works = requests(bench, limits=MIXES[mix])
    undrafted = who.wrapped(bench.model, "undrafted", None).model
    ends = end_ids(plain, {})
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "plain, one by one": lambda: [_alone(plain, work) for work in works],
        **{
            f"hf static batches of {size}": partial(_static, bench, plain, works, size)
            for size in STATIC_BATCHES
        },
        "hf continuous batching": lambda: _continuous(plain, works, _room(works)),
        "dspark queue": lambda: _queued(wrapped, works, QueueConfig(max_rows=REQUESTS)),
        "dspark queue, no drafter": lambda: _queued(
            undrafted, works, QueueConfig(max_rows=REQUESTS)
        ),
    }
    if free_bytes(plain.device) >= DEFAULTS_TAKE:
        ways["hf continuous batching, its defaults"] = lambda: _continuous(plain, works, None)
    excluded: dict[str, str] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(bench.settings.repeats):
        for name in rotated(list(ways), turn):
            if name in excluded:
                continue
            try:
                took = timed(ways[name], bench.clock)
            except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
                # Others' ways may not run with every model; ours must.
                if not name.startswith("hf"):
                    raise
                excluded[name] = str(error).splitlines()[0]
                continue
            seconds[name].append(took.wall_s)
            texts[name] = [
                _own(ids, work, ends) for ids, work in zip(took.result, works, strict=True)
            ]
    first = next(iter(ways))
    entries: list[dict[str, Any]] = []
    for name, times in seconds.items():
        if not times:
            entries.append({"mix": mix, "way": name, "excluded": excluded.get(name, "")})
            continue
        count = sum(map(len, texts[name]))
        base = sum(map(len, texts[first]))
        entries.append(
            {
                "mix": mix,
                "way": name,
                "tokens": count,
                "seconds": spread(times),
                "tokens_per_s": spread(count / s for s in times),
                "ratio": spread(
                    count / s / (base / b) for s, b in zip(times, seconds[first], strict=True)
                ),
                "same_text": sum(a == b for a, b in zip(texts[name], texts[first], strict=True)),
                "requests": len(works),
            }
        )
    return entries


def _order(bench: Bench, wrapped: Any) -> list[dict[str, Any]]:
    """Time short requests that come behind long ones, by both orders."""
    works = requests(bench, 2 * COMPETING)
    most = bench.settings.max_new_tokens
    long = [Work(work.ids, min(LONG, most)) for work in works[:COMPETING]]
    short = [Work(work.ids, min(SHORT, most)) for work in works[COMPETING:]]
    orders = {name: QueueConfig(max_rows=PLACES, order=name) for name in ("fifo", "shortest")}
    times: dict[str, list[list[float]]] = {name: [] for name in orders}
    for turn in range(-1, max(bench.settings.repeats, LEAST_TURNS)):
        for name in rotated(list(orders), turn):
            with GenerationQueue(wrapped, config=orders[name]) as queue:
                handles = [_submit(queue, work) for work in [*long, *short]]
                ended = [handle.result().stats.ended or 0.0 for handle in handles]
            # The first turn warms up.
            if turn >= 0:
                times[name].append(ended)
    return [
        {
            "order": name,
            "patience_s": orders[name].patience_s,
            "mean_s": median(sum(run) / len(run) for run in runs),
            "short_mean_s": median(sum(run[COMPETING:]) / COMPETING for run in runs),
            "longest_s": median(max(run) for run in runs),
        }
        for name, runs in times.items()
    ]


def _first_token(bench: Bench, wrapped: Any) -> list[dict[str, Any]]:
    """Time the first token of short requests while a long prompt is read and long texts decode.

    The load is the same for every request: the next long prompt comes when the one before it has
    its text, and a text that ends is followed by another. Requests come at moments spread over the
    first second of the reading.
    """
    works = requests(bench)
    long_prompt = _beginning(bench)
    most = bench.settings.max_new_tokens
    parts = (None, QueueConfig.prefill_tokens)
    found: dict[int | None, list[float]] = {part: [] for part in parts}
    for part in parts:
        settings = QueueConfig(max_rows=PLACES * 2, prefill_tokens=part, prefix_cache=False)
        with GenerationQueue(wrapped, config=settings) as queue:
            texts = [Work(work.ids, min(LONG, most)) for work in works[:PLACES]]
            load = [_submit(queue, text) for text in texts]
            for turn in range(INTERACTIVE):
                load = [
                    _submit(queue, text) if handle.is_ended else handle
                    for handle, text in zip(load, texts, strict=True)
                ]
                # A long prompt, unlike the others by its first token, and somebody who waits.
                long = _submit(queue, Work((turn + 3, *long_prompt), 4))
                while long.status == WAITING:
                    time.sleep(0.001)
                time.sleep(turn / INTERACTIVE)
                handle = _submit(queue, Work(works[turn % REQUESTS].ids, SHORT), priority=1)
                found[part].append(handle.result().stats.first_token or 0.0)
                long.result()
            for handle in load:
                handle.cancel()
    return [
        {
            "prefill_tokens": part,
            "requests": len(seconds),
            "p50_s": seconds[len(seconds) // 2],
            "p95_s": seconds[min(int(0.95 * len(seconds)), len(seconds) - 1)],
        }
        for part, seconds in ((part, sorted(times)) for part, times in found.items())
    ]


def _beginnings(bench: Bench, wrapped: Any) -> list[dict[str, Any]]:
    """Time requests with the same long beginning, with and without sharing it."""
    beginning = _beginning(bench)
    works = [Work((*beginning, *work.ids), SHORT) for work in requests(bench)]
    entries = []
    for is_shared in (False, True):
        settings = QueueConfig(max_rows=PLACES, prefix_cache=is_shared)
        with GenerationQueue(wrapped, config=settings) as queue:
            # The first one reads the beginning for all.
            begin = time.perf_counter()
            results = [_submit(queue, works[0]).result()]
            results += [h.result() for h in [_submit(queue, work) for work in works[1:]]]
            seconds = time.perf_counter() - begin
            kept = queue.kept_bytes
        asked = sum(len(work.ids) for work in works)
        cached = sum(result.stats.cached_tokens for result in results)
        entries.append(
            {
                "shared": is_shared,
                "prompt_tokens": asked,
                "computed_tokens": asked - cached,
                "seconds": seconds,
                "kept_bytes": kept,
            }
        )
    return entries


def _overhead(bench: Bench, wrapped: Any) -> dict[str, Any]:
    """Compare one request at a time through the queue with generate(), in turns."""
    fixed = DSparkConfig(schedule="fixed", max_draft_tokens=4, never_slower=False)
    before, wrapped.dspark.config = wrapped.dspark.config, fixed
    works = [Work(work.ids, min(32, bench.settings.max_new_tokens)) for work in requests(bench, 8)]
    ratios = []
    try:
        with GenerationQueue(wrapped, config=QueueConfig(prefix_cache=False)) as queue:
            for repeat in range(max(bench.settings.repeats, LEAST_TURNS) + 1):
                for work in works:
                    ways = [
                        lambda w=work: _alone(wrapped, w),
                        lambda w=work: _submit(queue, w).result(),
                    ]
                    took = [timed(way, bench.clock).wall_s for way in ways]
                    # The first pass warms up.
                    if repeat:
                        ratios.append(took[1] / took[0])
    finally:
        wrapped.dspark.config = before
    return {"calls": len(ratios), "ratio": spread(ratios)}


def _beginning(bench: Bench) -> list[int]:
    """Return ids for a long beginning: shipped prompts one behind the other, repeated."""
    ids = [i for item in bench.items(1) for i in item.inputs["input_ids"][0].tolist()]
    length = min(BEGINNING, 16 * bench.settings.max_new_tokens)
    return (ids * (length // len(ids) + 1))[:length]


def _alone(model: Any, work: Work) -> list[int]:
    ids = torch.tensor([work.ids])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=work.limit,
    )
    return list(out[0, len(work.ids) :].tolist())


def _static(bench: Bench, model: Any, works: Sequence[Work], size: int) -> list[list[int]]:
    texts = []
    for start in range(0, len(works), size):
        part = works[start : start + size]
        inputs = what.stacked([torch.tensor(work.ids) for work in part], bench.pad_id)
        longest = max(work.limit for work in part)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=longest)
        texts += out[:, inputs["input_ids"].shape[1] :].tolist()
    return texts


def _room(works: Sequence[Work]) -> ContinuousBatchingConfig:
    """Return settings of Transformers' own continuous batching that suit some requests."""
    pages = sum(-(-(len(w.ids) + w.limit) // CONTINUOUS_PAGE) for w in works)
    return ContinuousBatchingConfig(
        page_size=CONTINUOUS_PAGE, num_blocks=2 * pages, max_batch_tokens=CONTINUOUS_STEP
    )


def _continuous(
    model: Any, works: Sequence[Work], room: ContinuousBatchingConfig | None
) -> list[list[int]]:
    """Use Transformers' own continuous batching, each request with its limit."""
    config = GenerationConfig(
        do_sample=False,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
    )
    manager = model.init_continuous_batching(
        generation_config=config, continuous_batching_config=room
    )
    manager.start()
    try:
        names = [manager.add_request(list(w.ids), max_new_tokens=w.limit) for w in works]
        found: dict[str, list[int]] = {}
        while len(found) < len(works):
            result = manager.get_result(timeout=600)
            if result is None:
                raise RuntimeError("Transformers' continuous batching ended without a result.")
            if result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
    finally:
        manager.stop(block=True)
    return [found[name] for name in names]


def _queued(model: Any, works: Sequence[Work], settings: QueueConfig) -> list[list[int]]:
    with GenerationQueue(model, config=settings) as queue:
        return [handle.result().ids for handle in [_submit(queue, work) for work in works]]


def _submit(queue: GenerationQueue, work: Work, **options: Any) -> Any:
    return queue.submit(list(work.ids), do_sample=False, max_new_tokens=work.limit, **options)


def _waited(queue: GenerationQueue, work: Work) -> Any:
    return _submit(queue, work).result()


def _own(ids: Sequence[int], work: Work, ends: Sequence[int]) -> list[int]:
    """Return a request's tokens up to its own end or limit."""
    kept = list(ids[: work.limit])
    place = next((i for i, token in enumerate(kept) if token in ends), None)
    return kept if place is None else kept[: place + 1]
