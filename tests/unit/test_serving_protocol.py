"""What the server makes of requests and pieces, without a model or a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_hf import DSparkConfig
from dspark_hf.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InputError,
    QueueClosedError,
    QueueError,
    QueueFullError,
    RequestCancelledError,
)
from dspark_hf.serving.handle import DONE, FAILED, RequestHandle, RequestResult, RequestStats
from dspark_hf.serving.protocol import ChatBody, CompletionBody, Message, TextPart, status_of
from dspark_hf.serving.streaming import ClientGoneError, StopCutter, merged, unless_gone

TEXTS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """Cut a whole text before the earliest place where a stop begins."""
    ends = [i for i in range(len(text)) if any(text.startswith(stop, i) for stop in stops)]
    return text[: min(ends)] if ends else text


@given(st.lists(TEXTS, max_size=6), STOPS)
def test_pieces_are_cut_as_the_text_that_is_shown_would_be(
    pieces: list[str], stops: list[str]
) -> None:
    cutter, shown, seen = StopCutter(stops), "", ""
    for piece in pieces:
        shown += cutter.add(piece)
        seen += piece
        assert cut(seen, stops).startswith(shown)
        if cutter.is_met:
            break
    shown += cutter.end()
    assert shown == cut(seen, stops)
    assert cutter.is_met == (cut(seen, stops) != seen)


def test_nothing_is_held_back_that_cannot_become_a_stop() -> None:
    cutter = StopCutter(["</s>", "END"])
    assert [cutter.add(piece) for piece in ("one <", "b> E", "N", "d", "<", "/s> more", "x")] == [
        "one ", "<b> ", "", "ENd", "", "", "",
    ]  # fmt: skip
    assert cutter.is_met
    assert cutter.end() == ""
    assert StopCutter([]).add("anything") == "anything"


CONFIG = DSparkConfig(schedule="fixed", max_draft_tokens=3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_new_tokens": 99}),
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"temperature": 0}, {"max_new_tokens": 99, "do_sample": False}),
        ({"temperature": 0.0, "top_p": 0.5}, {"max_new_tokens": 99, "do_sample": False}),
        ({"temperature": 1.5}, {"max_new_tokens": 99, "do_sample": True, "temperature": 1.5}),
        ({"top_p": 0.5}, {"max_new_tokens": 99, "do_sample": True, "top_p": 0.5}),
        ({"stop": "x"}, {"max_new_tokens": 99, "stop_strings": ["x"]}),
        ({"stop": ["x", "", "y"]}, {"max_new_tokens": 99, "stop_strings": ["x", "y"]}),
        ({"stop": ""}, {"max_new_tokens": 99}),
    ],
    ids=str,
)
def test_fields_become_keywords_of_generate(fields: Any, expected: Any) -> None:
    assert CompletionBody(prompt="x", **fields).keywords(CONFIG, 99, 0) == expected


def test_a_seed_counts_up_over_choices_and_keeps_the_models_other_settings() -> None:
    found = CompletionBody(prompt="x", seed=4).keywords(CONFIG, 9, 2)["dspark"]
    assert (found.seed, found.acceptance) == (6, "coupled")
    assert (found.schedule, found.max_draft_tokens) == ("fixed", 3)


def test_a_chat_is_joined_from_its_parts_and_takes_the_newer_name_of_its_length() -> None:
    parts = [TextPart(type="text", text="one "), TextPart(type="text", text="two")]
    messages = [Message(role="system", content="be"), Message(role="user", content=parts)]
    body = ChatBody(messages=messages, max_tokens=5, max_completion_tokens=7)
    assert body.inputs == [
        [{"role": "system", "content": "be"}, {"role": "user", "content": "one two"}]
    ]
    assert body.keywords(CONFIG, 9, 0)["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError, 400), (InputError, 400), (CapacityError, 400), (QueueFullError, 429),
        (QueueClosedError, 503), (RequestCancelledError, 503), (DeadlineError, 504),
        (QueueError, 500), (RuntimeError, 500), (KeyError, 500),
    ],
)  # fmt: skip
def test_every_kind_of_error_has_a_status(error: type[Exception], status: int) -> None:
    assert status_of(error("x")) == status


def test_handles_are_read_as_they_go_and_the_first_failure_ends_it() -> None:
    handles = [RequestHandle(lambda _: None) for _ in range(3)]

    found: list[tuple[int, Any]] = []

    async def read() -> None:
        async for event in merged(handles):
            found.append(event)
            if event == (0, "a"):
                handles[1].add("b")
            elif event == (1, "b"):
                handles[0].end(DONE, result=RequestResult(None, [1], "a", RequestStats()))
            elif event == (0, None):
                handles[2].end(FAILED, error=InputError("x"))

    handles[0].add("a")
    with pytest.raises(InputError):
        asyncio.run(asyncio.wait_for(read(), 60))
    assert found == [(0, "a"), (1, "b"), (0, None)]


def test_work_ends_when_the_client_leaves_and_not_before() -> None:
    async def scene() -> str:
        left, ended = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def work() -> str:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()
            return "done"

        async def quick() -> str:
            return "done"

        assert await unless_gone(receive, quick()) == "done"
        task = asyncio.create_task(unless_gone(receive, work()))
        await asyncio.sleep(0)
        left.set()
        with pytest.raises(ClientGoneError):
            await task
        await ended.wait()
        return "dropped"

    assert asyncio.run(asyncio.wait_for(scene(), 60)) == "dropped"
