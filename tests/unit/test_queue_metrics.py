"""A queue's metrics: counted against the requests' own records and against hand-made steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from drafters import RandomDrafter
from dspark_hf import GenerationQueue
from dspark_hf.errors import DeadlineError
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving import bandwidth
from dspark_hf.serving.bandwidth import ForwardBytes, copy_bandwidth, weight_bytes
from dspark_hf.serving.handle import RequestHandle
from dspark_hf.serving.metrics import (
    REMEMBERED_ROWS,
    WINDOW_S,
    QueueMetrics,
    look,
    percentiles,
)
from harness import CONFIG, noisy_copy, wrapped
from served import TOKENIZER, Gate

GREEDY = {"do_sample": False}


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Cached:
    """A target that knows lengths."""

    def __init__(self, **lengths: int) -> None:
        self.lengths = {int(name[1:]): length for name, length in lengths.items()}

    def length(self, row_id: int) -> int:
        return self.lengths.get(row_id, 0)


def row_of(row_id: int, prompt: int, new: int = 0, *, finished: bool = False) -> Any:
    """Stand in for a row."""
    return SimpleNamespace(
        row_id=row_id, ids=[1] * (prompt + new), num_prompt_tokens=prompt, num_new_tokens=new,
        finished=finished, record=SpeculationRecord(new_tokens=new),
    )  # fmt: skip


def advance(row: Any, drafted: int, verified: int, accepted: int, **seconds: float) -> None:
    """Give a row a round."""
    row.record.count_round(drafted, verified, accepted, cut=False)
    row.record.new_tokens += accepted + 1
    row.num_new_tokens += accepted + 1
    for name, value in seconds.items():
        setattr(row.record, name, getattr(row.record, name) + value)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.fixture
def queue(model: Any) -> Iterator[GenerationQueue]:
    with wrapped(model, "lookup", CONFIG):
        queue = GenerationQueue(model, TOKENIZER, QueueConfig(max_rows=3))
        yield queue
        queue.close(drain=False)


@pytest.fixture
def metrics(model: Any) -> QueueMetrics:
    return QueueMetrics(model, 4, Clock())


def snapshot(metrics: QueueMetrics) -> dict[str, Any]:
    """Read metrics of a queue in which nothing runs or waits."""
    tier = SimpleNamespace(num_bytes=0, damaged=0)
    places = SimpleNamespace(
        running=[], waiting=[], rows=[], preemptions=0, held_tokens=lambda: 0,
        size=SimpleNamespace(limit=4), guard=SimpleNamespace(states=dict),
        budget=SimpleNamespace(token_bytes=8, num_tokens=10, num_bytes=80),
        keeper=SimpleNamespace(
            prefix=None,
            store=SimpleNamespace(host=tier, disk=tier, host_bytes=1, disk_bytes=0),
        ),
    )  # fmt: skip
    return metrics.snapshot(places)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
def test_percentiles_are_the_least_value_that_so_many_do_not_exceed(values: list[float]) -> None:
    found = percentiles(values)
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        needed = ceil(share * len(values) / 100)
        assert found[name] == min(v for v in values if sum(w <= v for w in values) >= needed)


def test_percentiles_of_nothing_are_unknown() -> None:
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}


def test_a_step_is_summed_over_its_rows(metrics: QueueMetrics, model: Any) -> None:
    one, two, new = row_of(1, 10, 3), row_of(2, 20, 1), row_of(3, 30)
    target = Cached(r1=12, r2=20, r3=8)
    before = look([one, two], [(new, 16)], target)
    advance(one, 5, 4, 2, draft_s=0.25, verify_s=0.5)
    advance(two, 3, 3, 0, draft_s=0.25, verify_s=0.5)
    new.record.verify_s = 0.5
    metrics.observe(before, seconds=2.0)
    found = snapshot(metrics)
    assert found["total"] == {
        "steps": 1, "seconds": 2.0, "draft_s": 0.5, "verify_s": 1.5, "new_tokens": 4,
        "prompt_tokens": 16, "rounds": 2, "drafted": 8, "verified": 7, "accepted": 2,
    }  # fmt: skip
    assert found["batch"]["utilisation"] == 2 / 4
    assert found["speculation"] == {
        "accepted_length": 4 / 2, "hit_rate": 2 / 8, "verified_per_row": 7 / 2,
    }  # fmt: skip
    assert found["speed"] == {"new_tokens_per_s": 2.0, "prompt_tokens_per_s": 8.0}
    read = ForwardBytes(model).of([12, 20, 8])
    assert found["bandwidth"]["bytes_per_s"] == pytest.approx(read / 1.5)


@pytest.mark.parametrize(
    ("most", "new", "cached", "fed"),
    [(None, 0, 0, 30), (None, 0, 16, 14), (8, 0, 16, 8), (99, 0, 16, 14), (None, 3, 0, 32)],
)
def test_fed_tokens_are_those_not_cached(most: int | None, new: int, cached: int, fed: int) -> None:
    row = row_of(1, 30, new)
    assert look([], [(row, most)], Cached(r1=cached)).prompt_tokens == fed


def test_utilisation_weighs_steps_by_their_seconds(metrics: QueueMetrics) -> None:
    rows = [row_of(i, 5, 1) for i in range(4)]
    metrics.observe(look(rows, [], Cached()), 1.0)
    metrics.observe(look(rows[:1], [], Cached()), 3.0)
    assert snapshot(metrics)["batch"]["utilisation"] == (4 * 1 + 1 * 3) / (4 * 4)


def test_time_per_token_is_shared_by_tokens_that_come_together(metrics: QueueMetrics) -> None:
    row, clock = row_of(1, 5), metrics.clock
    before = look([], [(row, None)], Cached())
    row.record.new_tokens = row.num_new_tokens = 1
    metrics.observe(before, 0.1)
    for gap, accepted in ((0.5, 0), (0.6, 2)):
        before = look([row], [], Cached())
        advance(row, 2, 2, accepted)
        clock.now += gap
        metrics.observe(before, 0.1)
    assert list(metrics._token_s) == pytest.approx([0.5, 0.2, 0.2, 0.2])
    assert snapshot(metrics)["delay_s"]["per_token"]["p50"] == pytest.approx(0.2)


def test_old_steps_leave_the_window_but_not_the_totals(metrics: QueueMetrics) -> None:
    metrics.observe(look([row_of(1, 5, 1)], [], Cached()), 1.0)
    metrics.clock.now += WINDOW_S + 1
    found = snapshot(metrics)
    assert found["batch"]["utilisation"] is None
    assert found["speed"]["new_tokens_per_s"] is None
    assert found["total"]["steps"] == 1


def test_rows_that_never_finish_do_not_pile_up(metrics: QueueMetrics) -> None:
    for row_id in range(REMEMBERED_ROWS + 10):
        row = row_of(row_id, 2)
        before = look([], [(row, None)], Cached())
        row.record.new_tokens = 1
        metrics.observe(before, 0.1)
    assert len(metrics._newest) == REMEMBERED_ROWS
    done = row_of(REMEMBERED_ROWS + 9, 2, 1, finished=True)
    before = look([done], [], Cached())
    advance(done, 0, 0, 0)
    metrics.observe(before, 0.1)
    assert len(metrics._newest) == REMEMBERED_ROWS - 1


def test_outcomes_are_counted_once_each(metrics: QueueMetrics) -> None:
    handles = [RequestHandle(lambda _: None, metrics.end) for _ in range(4)]
    handles[0].end("done")
    handles[0].end("failed", error=ValueError("too late"))
    handles[1].end("failed", error=ValueError("x"))
    handles[2].end("failed", error=DeadlineError("x"))
    handles[3].end("cancelled", error=RuntimeError("x"))
    metrics.refuse()
    assert snapshot(metrics)["ended"] == {
        "done": 1, "failed": 1, "expired": 1, "cancelled": 1, "refused": 1,
    }  # fmt: skip


def test_totals_are_those_of_the_requests_and_of_the_model(model: Any) -> None:
    with (
        wrapped(model, noisy_copy(model), CONFIG),
        GenerationQueue(model, config=QueueConfig(max_rows=3)) as queue,
    ):
        handles = [
            queue.submit(tiny.prompt(6 + i, seed=i), max_new_tokens=10 + 3 * i, **GREEDY)
            for i in range(7)
        ]
        stats = [handle.result(60).stats for handle in handles]
        found, lifetime = queue.metrics(), model.dspark.metrics
    for name in ("new_tokens", "rounds", "drafted", "verified", "accepted"):
        own = sum(getattr(record, name) for s in stats for record in s.records)
        assert found["total"][name] == own == getattr(lifetime, name) > 0, name
    for name in ("draft_s", "verify_s"):
        assert found["total"][name] == pytest.approx(getattr(lifetime, name))
    assert found["speculation"]["accepted_length"] == pytest.approx(lifetime.accepted_length)
    assert found["total"]["prompt_tokens"] == sum(6 + i for i in range(7))
    assert found["total"]["seconds"] >= found["total"]["verify_s"]
    assert (found["ended"]["done"], found["alone"]) == (7, 0)
    assert 0 < found["batch"]["utilisation"] <= 1
    assert found["delay_s"]["queue"] == percentiles([s.started for s in stats])
    assert found["delay_s"]["first_token"] == percentiles([s.first_token for s in stats])


def test_what_runs_and_waits_is_shown_while_it_does(queue: GenerationQueue) -> None:
    gate = Gate()
    ids = torch.tensor([tiny.prompt(5, seed=1), tiny.prompt(5, seed=2)])
    held = queue.submit(
        ids, max_new_tokens=8, priority=3, stopping_criteria=[gate], eos_token_id=0, **GREEDY
    )
    assert gate.reached.wait(60)
    late = [queue.submit(tiny.prompt(4), max_new_tokens=2, **GREEDY) for _ in range(2)]
    found = queue.metrics()
    gate.opened.set()
    for handle in [held, *late]:
        handle.result(60)
    assert found["requests"]["running"] == 1
    assert found["requests"]["waiting"] == 2
    assert 0 < found["requests"]["oldest_s"] < held.stats.ended
    assert [(r["prompt_tokens"], r["priority"], r["status"]) for r in found["rows"]] == [
        (5, 3, "starting")
    ] * 2
    assert found["batch"]["rows"] == 2
    assert found["kv"]["tokens"] == 10, "the prompts are cached, their first tokens are not"
    assert found["kv"]["bytes"]["device"] == 10 * queue._engine.places.budget.token_bytes
    after = queue.metrics()
    assert (after["rows"], after["kv"]["tokens"], after["requests"]["waiting"]) == ([], 0, 0)


def test_calls_in_the_models_own_loop_are_told_apart(queue: GenerationQueue) -> None:
    queue.submit(tiny.prompt(5), max_new_tokens=3, num_beams=2, **GREEDY).result(60)
    queue.submit(tiny.prompt(5), max_new_tokens=3, **GREEDY).result(60)
    found = queue.metrics()
    assert (found["ended"]["done"], found["alone"], found["total"]["new_tokens"]) == (2, 1, 3)


def test_preemptions_and_breakers_are_shown(model: Any) -> None:
    class Fails(RandomDrafter):
        def propose(self, requests: Any) -> Any:
            raise RuntimeError("no idea")

    with wrapped(model, Fails(tiny.VOCAB), CONFIG):
        config = QueueConfig(max_rows=1, drafter_failures=2, drafter_retry_s=3600)
        with GenerationQueue(model, config=config) as queue:
            gate = Gate()
            low = queue.submit(tiny.prompt(5), max_new_tokens=9, stopping_criteria=[gate], **GREEDY)
            assert gate.reached.wait(60)
            high = queue.submit(tiny.prompt(4), max_new_tokens=3, priority=5, **GREEDY)
            gate.opened.set()
            high.result(60)
            low.result(60)
            found = queue.metrics()
    assert found["preemptions"] == low.stats.preemptions == 1
    assert found["breakers"] == {"test": "open"}
    assert found["speculation"]["hit_rate"] is None


def test_shared_beginnings_are_counted(queue: GenerationQueue) -> None:
    beginning = tiny.prompt(40)
    for last in (1, 2):
        queue.submit([*beginning, last], max_new_tokens=2, **GREEDY).result(60)
    found = queue.metrics()
    assert found["prefix"] == {"asked": 82, "found": 32, "hit_rate": 32 / 82}
    assert found["total"]["prompt_tokens"] == 82 - 32
    assert found["kv"]["bytes"]["host"] > 0


def test_metrics_may_be_read_while_steps_run(queue: GenerationQueue) -> None:
    is_over, found = threading.Event(), []

    def read() -> None:
        while not is_over.is_set():
            found.append(queue.metrics()["total"]["new_tokens"])

    reader = threading.Thread(target=read)
    reader.start()
    handles = [queue.submit(tiny.prompt(5, seed=i), max_new_tokens=12, **GREEDY) for i in range(6)]
    try:
        for handle in handles:
            handle.result(60)
    finally:
        is_over.set()
        reader.join()
    assert found == sorted(found)
    assert queue.metrics()["total"]["new_tokens"] == 72


def test_bytes_of_a_forward_are_weights_and_what_windows_leave_of_the_context() -> None:
    full, sliding = tiny.llama(), tiny.gemma3()
    per_layer = 2 * 2 * 8 * 4
    assert ForwardBytes(full).of([100, 7]) == weight_bytes(full) + 3 * 107 * per_layer
    per_layer = 2 * 2 * 16 * 4
    kept = 100 + 2 * tiny.WINDOW
    assert ForwardBytes(sliding).of([100]) == weight_bytes(sliding) + kept * per_layer


def test_an_embedding_counts_where_it_is_the_output_matrix_too() -> None:
    tied, untied = tiny.llama(tie_word_embeddings=True), tiny.llama()
    table = tied.get_input_embeddings().weight.nbytes
    everything = sum(weight.nbytes for weight in untied.parameters())
    assert weight_bytes(untied) == everything - table
    assert weight_bytes(tied) == weight_bytes(untied)


def test_the_machine_is_measured_when_asked_and_once(
    queue: GenerationQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "COPY_BYTES", 2**16)
    assert queue.metrics()["bandwidth"]["machine_bytes_per_s"] is None
    measured = queue.measure_bandwidth()
    assert measured == queue.measure_bandwidth() > 0
    queue.submit(tiny.prompt(5), max_new_tokens=3, **GREEDY).result(60)
    found = queue.metrics()["bandwidth"]
    assert found["machine_bytes_per_s"] == measured
    assert found["share"] == pytest.approx(found["bytes_per_s"] / measured)


def test_copying_moves_bytes_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0, 30.0, 33.0, 40.0, 44.0])
    monkeypatch.setattr(bandwidth, "COPY_BYTES", 1000)
    monkeypatch.setattr(bandwidth, "perf_counter", lambda: next(times))
    assert copy_bandwidth(torch.device("cpu")) == 2 * 1000 / 0.5
