"""How requests and queues end: cancelled in every state, mapped, closed, interrupted, forgotten.

Field cases: giving up on the waiting side did not stop the work; a cancelled request stayed in a
shared prefill; cancelling all left waiting ones to start (cubist38/mlx-openai-server issue 321,
Blaizzy/mlx-vlm issue 2147).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from dspark_hf import GenerationQueue, QueueConfig
from dspark_hf.compat import attention_configs
from dspark_hf.errors import (
    InputError,
    QueueClosedError,
    QueueFullError,
    RequestCancelledError,
)
from harness import counted_forwards, wrapped
from queues import FIXED, WAIT_S, assert_nothing_is_left, assert_same, greedy, stepped
from tiny import plain_generate, prompt

PROMPTS = [prompt(n, seed=n) for n in (3, 9, 1, 14, 6)]
LONG, ENDLESS = 60, 100_000
"""New tokens; no machine gets through the latter while a test looks."""


@pytest.fixture(params=["llama", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    with wrapped(tiny.ARCHITECTURES[request.param](), "lookup", FIXED) as model:
        yield model


def test_cancelling_frees_the_row_within_a_step_and_spares_the_neighbours(model: Any) -> None:
    """Two places, five long requests: one cancelled while it runs, one while it waits."""
    asked = [greedy(ids, LONG) for ids in PROMPTS]
    alone = [one.alone(model) for one in asked]
    with counted_forwards(model) as seen:
        with stepped(model, max_rows=2) as queue:
            for one in asked:
                queue.submit(one)
            queue.finish()
        everything = sum(seen)
        seen.clear()
        with stepped(model, max_rows=2, order="fifo") as queue:
            handles = [queue.submit(one) for one in asked]
            queue.step(3)
            assert [h.status for h in handles] == ["running"] * 2 + ["waiting"] * 3
            assert handles[0].cancel()
            assert handles[3].cancel()
            queue.step()
            # Its place went to the next one in the same step.
            assert [h.status for h in handles[1:3]] == ["running", "running"]
            quick = queue.submit(greedy(PROMPTS[0], 1), priority=1)
            queue.step()
            assert quick.status == "done"
            results = queue.finish()
        assert sum(seen) < 0.8 * everything
    for place in (0, 3):
        assert isinstance(results[place], RequestCancelledError)
    for place in (1, 2, 4):
        assert_same(results[place], alone[place])
    assert handles[3].pieces == []
    assert alone[0].ids[: len(handles[0].pieces)] == handles[0].pieces != []


def test_cancelling_in_a_shared_prefill_takes_the_row_out_of_it(model: Any) -> None:
    asked = [greedy(PROMPTS[0], 30), greedy(prompt(40, seed=8)), greedy(prompt(50, seed=9))]
    alone = [one.alone(model) for one in asked]
    with stepped(model, prefill_tokens=6) as queue:
        first = queue.submit(asked[0])
        queue.until(lambda: bool(first.pieces))
        handles = [queue.submit(one) for one in asked[1:]]
        queue.step(2)
        assert [h.status for h in handles] == ["starting", "starting"]
        handles[0].cancel()
        with counted_forwards(model) as seen:
            results = queue.finish()
        assert sum(seen) < 50 + 30 * (FIXED.max_draft_tokens + 1) * 2
    assert isinstance(results[1], RequestCancelledError)
    assert handles[0].pieces == []
    for place in (0, 2):
        assert_same(results[place], alone[place])


def test_a_step_that_feeds_a_request_is_not_made_longer_by_lower_ones(model: Any) -> None:
    asked = [greedy(PROMPTS[0], 30), greedy(prompt(50, seed=8), 2), greedy(prompt(9, seed=9), 2)]
    alone = [one.alone(model) for one in asked]
    with stepped(model, prefill_tokens=40) as queue:
        first = queue.submit(asked[0])
        queue.until(lambda: bool(first.pieces))
        queue.submit(asked[1])
        queue.submit(asked[2], priority=1)
        most = FIXED.max_draft_tokens + 1
        # Nine prompt tokens beside one row that decodes; then a part of the lower prompt.
        for fed, decoding in ((9, 1), (40, 2)):
            with counted_forwards(model) as seen:
                queue.step()
            assert fed < sum(seen) <= fed + decoding * most
        results = queue.finish()
    for result, expected in zip(results, alone, strict=True):
        assert_same(result, expected)


def test_a_parked_request_can_be_cancelled(model: Any) -> None:
    with stepped(model, max_rows=1) as queue:
        first = queue.submit(greedy(PROMPTS[0], LONG))
        queue.until(lambda: bool(first.pieces))
        queue.submit(greedy(PROMPTS[1], 3), priority=1)
        queue.step()
        assert first.status == "parked"
        assert first.cancel()
        results = queue.finish()
    assert isinstance(results[0], RequestCancelledError)
    assert len(results[1].ids) == 3


def test_map_keeps_the_order_and_takes_a_stream(model: Any) -> None:
    prompts = [*PROMPTS, *PROMPTS[:2]]
    alone = [greedy(ids, 5).alone(model) for ids in prompts]
    with GenerationQueue(model, config=QueueConfig(max_rows=2, max_pending=2)) as queue:
        options = {"max_new_tokens": 5, "do_sample": False, "progress": False}
        assert list(queue.map([], **options)) == []
        for source in (prompts, iter(prompts), (ids for ids in prompts)):
            for result, one in zip(queue.map(source, **options), alone, strict=True):
                assert_same(result, one)


def test_map_gives_a_result_that_is_there_before_it_reads_further(model: Any) -> None:
    order: list[str] = []
    ended = threading.Event()

    def source() -> Iterator[list[int]]:
        for place, ids in enumerate(PROMPTS):
            order.append(f"read {place}")
            yield ids
            ended.wait(WAIT_S)

    with GenerationQueue(model) as queue:
        submit = queue._submit

        def noting(*args: Any, **kwargs: Any) -> Any:
            handle = submit(*args, **kwargs)
            handle.follow(lambda status: ended.set() if status == "done" else None)
            return handle

        queue._submit = noting  # type: ignore[method-assign]
        results = queue.map(source(), max_new_tokens=4, do_sample=False, progress=False)
        for place, _ in enumerate(results):
            order.append(f"result {place}")
    assert order.index("result 0") < order.index("read 2")
    assert order[-1] == f"result {len(PROMPTS) - 1}"


def test_leaving_map_early_cancels_the_rest(model: Any) -> None:
    everything_is_read = threading.Event()

    def source() -> Iterator[list[int]]:
        yield from [PROMPTS[0], *PROMPTS * 3]
        everything_is_read.set()

    def waits(ids: Any, scores: Any) -> Any:
        assert everything_is_read.wait(WAIT_S)
        return scores

    with GenerationQueue(model, config=QueueConfig(max_rows=1)) as queue:
        options = {"max_new_tokens": 5, "do_sample": False, "logits_processor": [waits]}
        results = queue.map(source(), progress=False, **options)
        next(results)
        results.close()
        assert len(greedy(PROMPTS[1], 3).submit(queue).result(WAIT_S).ids) == 3
        ended = queue.metrics()["ended"]
    assert ended["cancelled"] + ended["done"] == 17
    assert_nothing_is_left(queue)


def test_map_raises_what_a_request_failed_with_where_its_result_would_come(model: Any) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "progress": False}
    with GenerationQueue(model) as queue:
        results = queue.map([PROMPTS[0], PROMPTS[1], [], PROMPTS[2]], **options)
        assert len(next(results).ids) == len(next(results).ids) == 4
        with pytest.raises(InputError, match="at least one token"):
            next(results)

        def broken() -> Iterator[list[int]]:
            yield PROMPTS[0]
            raise LookupError("the source broke")

        results = queue.map(broken(), **options)
        assert len(next(results).ids) == 4
        with pytest.raises(LookupError, match="the source broke"):
            next(results)


def test_a_closed_queue_takes_nothing_and_has_done_everything(model: Any) -> None:
    alone = [greedy(ids, 8).alone(model) for ids in PROMPTS]
    queue = GenerationQueue(model, config=QueueConfig(max_rows=2))
    handles = [greedy(ids, 8).submit(queue) for ids in PROMPTS]
    assert queue.close(timeout=WAIT_S)
    with pytest.raises(QueueClosedError, match=r"the queue is closed\. Make a new one"):
        queue.submit(PROMPTS[0])
    for handle, one in zip(handles, alone, strict=True):
        assert_same(handle.result(0), one)
    assert queue.close()


def test_closing_without_draining_cancels_what_runs_and_what_waits(model: Any) -> None:
    # In this order the first one runs: it may have begun before the others were submitted.
    queue = GenerationQueue(model, config=QueueConfig(max_rows=2, order="fifo"))
    handles = [greedy(ids, ENDLESS).submit(queue) for ids in PROMPTS]
    next(iter(handles[0]))
    assert queue.close(drain=False, timeout=WAIT_S)
    for handle in handles:
        with pytest.raises(RequestCancelledError, match="the queue was closed"):
            handle.result(0)
    assert_nothing_is_left(queue)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_block_left_by_an_interrupt_leaves_the_model_usable(model: Any, error: Any) -> None:
    before = {c._attn_implementation for c in attention_configs(model)}
    plain = plain_generate(model, [PROMPTS[1]], max_new_tokens=9).tolist()
    queue = GenerationQueue(model)
    handles = [greedy(ids, ENDLESS).submit(queue) for ids in PROMPTS]
    next(iter(handles[0]))
    with pytest.raises(error), queue:
        raise error
    assert all(handle.status == "cancelled" for handle in handles)
    assert not queue._engine._thread.is_alive()
    assert {c._attn_implementation for c in attention_configs(model)} == before
    assert plain_generate(model, [PROMPTS[1]], max_new_tokens=9).tolist() == plain
    assert_nothing_is_left(queue)


def test_an_interrupt_while_it_drains_ends_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any, timeout: float | None = None) -> None:
        if timeout != 0:
            raise KeyboardInterrupt

    queue = GenerationQueue(model)
    handle = greedy(PROMPTS[0], ENDLESS).submit(queue)
    thread = queue._engine._thread
    with monkeypatch.context() as patch:
        patch.setattr(type(thread), "join", interrupted)
        with pytest.raises(KeyboardInterrupt), queue:
            pass
    with pytest.raises(RequestCancelledError):
        handle.result(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_queue_that_nobody_holds_ends_when_its_work_is_done(model: Any) -> None:
    queue = GenerationQueue(model)
    handle, thread = greedy(PROMPTS[0], 5).submit(queue), queue._engine._thread
    del queue
    gc.collect()
    assert len(handle.result(WAIT_S).ids) == 5
    thread.join(WAIT_S)
    assert not thread.is_alive()


FORGETFUL = """
import tiny
from dspark_hf import DSparkForCausalLM, GenerationQueue
queue = GenerationQueue(DSparkForCausalLM.wrap(tiny.llama()))
handle = queue.submit([5, 6, 7], max_new_tokens=100_000, do_sample=False)
print(next(iter(handle)) >= 0)
"""


def test_a_program_that_forgets_to_close_ends_well() -> None:
    """A thread that computes while Python ends aborts the process."""
    path = os.pathsep.join([str(Path(tiny.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_generate_beside_a_queue_takes_its_turn_between_steps(model: Any) -> None:
    plain = plain_generate(model, [PROMPTS[1]], max_new_tokens=6).tolist()
    with GenerationQueue(model) as queue:
        handle = greedy(PROMPTS[0], ENDLESS).submit(queue)
        next(iter(handle))
        assert plain_generate(model, [PROMPTS[1]], max_new_tokens=6).tolist() == plain
        # It did not have to wait for the end of what the queue does.
        assert not handle.is_ended
        handle.cancel()


def test_a_streamer_may_submit_and_cancel_from_the_queues_own_thread(model: Any) -> None:
    later: list[Any] = []

    class Curious:
        def put(self, value: Any) -> None:
            if value.dim() == 1 and not later:
                later.append(greedy(PROMPTS[2], 3).submit(queue.queue))
                later.append(greedy(PROMPTS[3], 3).submit(queue.queue))
                later[1].cancel()

        def end(self) -> None:
            later.append("ended")

    with stepped(model) as queue:
        queue.submit(greedy(PROMPTS[0], 5, streamer=Curious()))
        queue.finish()
        assert len(later[0].result(0).ids) == 3
        assert later[1].status == "cancelled"
        assert later[2] == "ended"


def test_the_queues_own_thread_is_refused_where_others_wait_for_room(model: Any) -> None:
    """It would wait for what only it can do."""

    class Eager:
        def put(self, value: Any) -> None:
            if value.dim() == 1:
                for _ in range(2):
                    greedy(PROMPTS[2], 3).submit(queue)

        def end(self) -> None:
            pass

    settings = QueueConfig(max_pending=1, max_rows=1, when_full="block")
    with GenerationQueue(model, config=settings) as queue:
        handle = greedy(PROMPTS[0], 5, streamer=Eager()).submit(queue)
        with pytest.raises(QueueFullError, match="max_pending requests, 1, wait already"):
            handle.result(WAIT_S)
