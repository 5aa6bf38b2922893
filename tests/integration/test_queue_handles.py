"""What a caller holds of a request: results and pieces, in threads and event loops.

Field cases: a shared output queue whose readers starve each other, iterators that never end, a
worker that crashes when it is started idle (huggingface/transformers issues 42943 and 48303).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiny
from dspark_hf import GenerationQueue, QueueConfig
from dspark_hf.errors import (
    ConfigError,
    DeadlineError,
    QueueClosedError,
    QueueFullError,
    RequestCancelledError,
)
from dspark_hf.serving.handle import CANCELLED, FAILED, RequestHandle
from dspark_hf.serving.request import TextPieces
from harness import toy_tokenizer, wrapped
from queues import FIXED, WAIT_S, Asked, assert_nothing_is_left, assert_same, greedy, stepped
from tiny import prompt

PROMPTS = [prompt(n, seed=n) for n in (3, 9, 1, 14, 6, 22, 5, 11)]
TOKENIZER = toy_tokenizer()


@pytest.fixture
def model() -> Iterator[Any]:
    with wrapped(tiny.llama(), "lookup", FIXED) as model:
        yield model


def in_threads(calls: list[Any]) -> list[Any]:
    """Make calls at once, in the order given; return what they return."""
    found: dict[int, Any] = {}

    def make(place: int) -> None:
        found[place] = calls[place]()

    threads = [threading.Thread(target=make, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [found[place] for place in range(len(calls))]


def test_eight_threads_reading_in_reverse_order_each_get_their_own(model: Any) -> None:
    alone = [greedy(ids).alone(model) for ids in PROMPTS]
    with GenerationQueue(model) as queue:
        handles = [greedy(ids).submit(queue) for ids in PROMPTS]
        results = in_threads([lambda h=h: h.result(WAIT_S) for h in reversed(handles)])
        pieces = in_threads([lambda h=h: list(h) for h in reversed(handles)])
    for result, said, one in zip(reversed(results), reversed(pieces), alone, strict=True):
        assert_same(result, one)
        assert said == one.ids


def test_an_idle_queue_starts_waits_ends_and_gives_its_memory_back(model: Any) -> None:
    with GenerationQueue(model) as queue:
        for ids in PROMPTS[:2]:
            assert_same(greedy(ids).submit(queue).result(WAIT_S), greedy(ids).alone(model))
    assert queue._engine.places._decoder is None
    assert_nothing_is_left(queue)
    with GenerationQueue(model) as empty:
        assert empty.is_open
    assert not empty.is_open


def test_several_readers_of_one_handle_each_get_everything(model: Any) -> None:
    one = greedy(PROMPTS[0], 20)
    with GenerationQueue(model) as queue:
        handle = one.submit(queue)
        readers = [lambda: list(handle)] * 3 + [lambda: handle.result(WAIT_S).ids] * 2
        found = in_threads(readers)
    assert found == [one.alone(model).ids] * 5
    assert handle.pieces == found[0]


def test_pieces_come_before_the_end_and_the_iterator_ends_with_it(model: Any) -> None:
    with stepped(model) as queue:
        handle = queue.submit(greedy(PROMPTS[1], 30))
        reading = iter(handle)
        queue.step(3)
        said = handle.pieces
        assert 3 <= len(said) < 30
        assert [next(reading) for _ in said] == said
        assert not handle.is_ended
        (result,) = queue.finish()
        assert said + list(reading) == result.ids


def test_an_iterator_gives_what_was_said_and_then_the_error(model: Any) -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 6:
            raise ArithmeticError("no more")
        return scores

    with stepped(model) as queue:
        failing = queue.submit(greedy(PROMPTS[0], 20, logits_processor=[fails]))
        cancelled = queue.submit(greedy(PROMPTS[1], 20))
        queue.step(2)
        cancelled.cancel()
        queue.finish()
    for handle, kind, status in (
        (failing, ArithmeticError, FAILED),
        (cancelled, RequestCancelledError, CANCELLED),
    ):
        said: list[int] = []
        with pytest.raises(kind):
            said.extend(handle)
        assert said == handle.pieces != []
        assert handle.status == status


def test_await_and_async_for_do_not_block_the_loop(model: Any) -> None:
    one = greedy(PROMPTS[2], 20)
    alone = one.alone(model)

    async def read(handle: RequestHandle) -> list[int]:
        return [piece async for piece in handle]

    async def main(queue: GenerationQueue) -> None:
        handles = [one.submit(queue) for _ in range(3)]
        found = await asyncio.wait_for(
            asyncio.gather(*handles, read(handles[0]), read(handles[0]), read(handles[2])), WAIT_S
        )
        for result in found[:3]:
            assert_same(result, alone)
        assert found[3:] == [alone.ids] * 3
        # After the end too.
        assert await read(handles[1]) == alone.ids
        assert (await handles[1]).ids == alone.ids

    with GenerationQueue(model) as queue:
        asyncio.run(main(queue))


def test_a_cancelled_task_leaves_the_request_and_a_cancelled_request_wakes_its_tasks(
    model: Any,
) -> None:
    async def main(queue: Any) -> None:
        handle = queue.submit(greedy(PROMPTS[0], 30))
        waits, reads = asyncio.ensure_future(handle), asyncio.ensure_future(anext(aiter(handle)))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert not handle.is_ended
        queue.step(2)
        assert await asyncio.wait_for(reads, WAIT_S) == handle.pieces[0]
        waits = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        handle.cancel()
        with pytest.raises(RequestCancelledError):
            await asyncio.wait_for(waits, WAIT_S)
        assert not handle._wakers

    with stepped(model) as queue:
        asyncio.run(main(queue))


def test_a_loop_that_closed_meanwhile_harms_nobody(model: Any) -> None:
    with stepped(model) as queue:
        handle = queue.submit(greedy(PROMPTS[0], 4))
        loop = asyncio.new_event_loop()
        task = loop.create_task(handle._change(None))
        loop.run_until_complete(asyncio.sleep(0))
        assert handle._wakers
        loop._ready.clear()
        loop.close()
        (result,) = queue.finish()
    assert len(result.ids) == 4
    assert not task.done()
    task._log_destroy_pending = False


def test_a_wait_that_times_out_leaves_the_request_and_cancelling_it_leaves_no_work(
    model: Any,
) -> None:
    with stepped(model) as queue:
        handle = queue.submit(greedy(PROMPTS[0], 100))
        queue.step(2)
        with pytest.raises(TimeoutError, match=r"the request is running after 0 s\. Wait longer"):
            handle.result(0)
        assert handle.status == "running"
        assert handle.cancel()
        assert handle.status == "cancelled"
        # Asked again, it says the same; what it had said stays.
        assert handle.cancel()
        assert handle.pieces
        queue.step()
        assert not queue.places.running


def test_cancelling_what_has_ended_says_so(model: Any) -> None:
    with stepped(model) as queue:
        handle = queue.submit(greedy(PROMPTS[0], 2))
        (result,) = queue.finish()
        assert not handle.cancel()
        assert handle.status == "done"
        assert handle.result(0) is result
        # As if it had ended while cancel() was on its way.
        queue.queue._engine.cancel(handle)
        assert handle.status == "done"
        assert not queue.queue._engine._cancelled


def test_text_ids_tensors_and_chats_are_taken(model: Any) -> None:
    ids = PROMPTS[3]
    text = TOKENIZER.decode(ids)
    TOKENIZER.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": text}]
    alone = greedy(ids).alone(model)
    with GenerationQueue(model, TOKENIZER) as queue:
        inputs = [text, chat, ids, tuple(ids), torch.tensor(ids), torch.tensor([ids])]
        results = [Asked(i, greedy(ids).options).submit(queue).result(WAIT_S) for i in inputs]
        for result in results:
            assert_same(result, alone)
        said = TOKENIZER.decode(alone.ids, skip_special_tokens=True)
        assert [r.text for r in results] == [said, said, None, None, None, None]
        assert [str(r) for r in results[1:3]] == [said, str(alone.ids)]
        handle = queue.submit(text, max_new_tokens=12, do_sample=False)
        assert "".join(handle) == said


def test_pieces_of_text_join_to_it_where_tokens_depend_on_those_before() -> None:
    """A tokenizer that drops the first space, as sentencepiece does, and bytes of characters."""

    class Backend:
        words = ("<s>", " a", " b", "\n", "c", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", " ")

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            parts = [self.words[i] for i in ids if i]
            content = b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)
            return content.decode(errors="replace").removeprefix(" ")

    for ids in (
        [1, 2, 0, 1, 3, 2, 1, 4],
        [0, 0, 1, 5, 6, 2, 7, 8, 4],
        [5, 6, 5, 6, 9, 1, 0],
        [4, 7],
        [5, 1, 3, 0, 2],
        [],
    ):
        given: list[str] = []
        whole = Backend().decode(ids, skip_special_tokens=True)
        pieces = TextPieces(Backend(), given.append)  # type: ignore[arg-type]
        for token in ids:
            pieces.put(token)
            assert whole.startswith("".join(given))
        pieces.end()
        assert "".join(given) == whole
        assert all(given)


def test_a_full_queue_refuses_or_waits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: Any) -> None:
        raise AssertionError("what is refused was prepared, in the time of those that are decoded")

    with stepped(model, max_rows=1, max_pending=2) as queue:
        for ids in PROMPTS[:2]:
            queue.submit(greedy(ids, 3))
        with monkeypatch.context() as patch:
            patch.setattr("dspark_hf.serving.queue.prepare", prepare)
            with pytest.raises(QueueFullError, match="max_pending requests, 2, wait already"):
                queue.submit(greedy(PROMPTS[2], 3))
        assert queue.queue.metrics()["ended"]["refused"] == 1
        queue.step()
        queue.submit(greedy(PROMPTS[2], 3))
        assert len(queue.finish()) == 3
    asked = [greedy(ids, 3) for ids in PROMPTS]
    alone = [one.alone(model) for one in asked]
    settings = QueueConfig(max_rows=1, max_pending=1, when_full="block")
    with GenerationQueue(model, config=settings) as queue:
        handles = [one.submit(queue) for one in asked]
        for handle, one in zip(handles, alone, strict=True):
            assert_same(handle.result(WAIT_S), one)


def test_who_waits_to_submit_is_woken_when_the_queue_closes(model: Any) -> None:
    settings = {"max_rows": 1, "max_pending": 1, "when_full": "block"}
    with stepped(model, **settings) as queue:
        queue.submit(greedy(PROMPTS[0], 3))
        failed = threading.Event()

        def submit() -> None:
            with pytest.raises(QueueClosedError):
                greedy(PROMPTS[1], 3).submit(queue.queue)
            failed.set()

        thread = threading.Thread(target=submit, daemon=True)
        thread.start()
        queue.queue.close(drain=False)
        assert failed.wait(WAIT_S)


def test_a_missed_deadline_fails_a_request_wherever_it_is(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepped(model, max_rows=1) as queue:
        handles = [queue.submit(greedy(ids, 60), deadline_s=1000) for ids in PROMPTS[:2]]
        queue.step(2)
        assert [handle.status for handle in handles] == ["running", "waiting"]
        request = "dspark_hf.serving.request.time.monotonic"
        now = handles[0].stats.submitted + 1001
        with monkeypatch.context() as patch:
            patch.setattr(request, lambda: now)
            queue.step()
        assert [handle.status for handle in handles] == ["failed", "failed"]
        assert not queue.places.running
        for handle in handles:
            with pytest.raises(DeadlineError, match="deadline_s passed"):
                handle.result(0)
        assert handles[0].pieces


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "1", True])
def test_a_deadline_is_a_number_above_zero(model: Any, bad: Any) -> None:
    with stepped(model) as queue, pytest.raises(ConfigError, match="deadline_s must be above 0"):
        queue.submit(greedy(PROMPTS[0]), deadline_s=bad)
    with stepped(model) as queue, pytest.raises(ConfigError, match="priority must be an integer"):
        queue.submit(greedy(PROMPTS[0]), priority=1.5)
