"""The HTTP server's refusals have their status and form, and who leaves is dropped."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import StoppingCriteria

import tiny
from dspark_hf import GenerationQueue
from dspark_hf.errors import CapacityError
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.server import create_app
from harness import CONFIG, wrapped
from served import CHAT, CHATS, COMPLETION, DEFAULT, NAME, TEXT, TOKENIZER, Gate, full_batch


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with wrapped(tiny.llama(), "lookup", CONFIG) as model:
        yield model


@pytest.fixture
def queue(model: Any) -> Iterator[GenerationQueue]:
    queue = GenerationQueue(model, TOKENIZER, QueueConfig(max_rows=2, max_pending=2))
    yield queue
    queue.close(drain=False)


@pytest.fixture
def client(queue: GenerationQueue) -> TestClient:
    return TestClient(create_app(queue, NAME, DEFAULT))


BAD: dict[str, tuple[str, Any, str]] = {
    "unknown field": (COMPLETION, {"prompt": TEXT, "logit_bias": {}}, "logit_bias"),
    "unknown field of a message": (
        CHATS,
        {"messages": [{"role": "user", "content": "ab", "name": "x"}]},
        "messages.0.name",
    ),
    "unknown keyword": ("/generate", {"inputs": TEXT, "max_tokens": 3}, "max_tokens"),
    "code to load": ("/generate", {"inputs": TEXT, "custom_generate": "x/y"}, "custom_generate"),
    "no prompt": (COMPLETION, {}, "prompt"),
    "no inputs": ("/generate", {}, "inputs must be given"),
    "no messages": (CHATS, {"messages": []}, "messages"),
    "no tokens": (COMPLETION, {"prompt": TEXT, "max_tokens": 0}, "max_tokens"),
    "text for a number": (COMPLETION, {"prompt": TEXT, "max_tokens": "5"}, "max_tokens"),
    "hot": (COMPLETION, {"prompt": TEXT, "temperature": -1}, "temperature"),
    "nucleus": (COMPLETION, {"prompt": TEXT, "top_p": 1.5}, "top_p"),
    "too many": (COMPLETION, {"prompt": [TEXT] * 5, "n": 4}, "prompts times n"),
    "no prompts": (COMPLETION, {"prompt": []}, "prompts times n"),
    "empty prompt": (COMPLETION, {"prompt": ""}, "at least one token"),
    "foreign ids": ("/generate", {"inputs": [1, 99999]}, "input_ids must lie in"),
    "no inputs of a kind": ("/generate", {"inputs": {"a": 1}}, "inputs must be text"),
    "a list": ("/generate", [1, 2], "body"),
    "a bad setting": (
        "/generate",
        {"inputs": TEXT, "do_sample": True, "temperature": 0.0},
        "temperature",
    ),
    "settings": ("/generate", {"inputs": TEXT, "dspark": {"speed": 9}}, "dspark must be"),
    "shared settings": (
        "/generate",
        {"inputs": TEXT, "dspark": {"max_draft_tokens": 9}},
        "max_draft_tokens is shared",
    ),
    "stream": ("/generate", {"inputs": TEXT, "stream": "yes"}, "stream"),
    "deadline": ("/generate", {"inputs": TEXT, "deadline_s": 0}, "deadline_s"),
    "a template's refusal": (
        CHATS,
        {"messages": [{"role": "system", "content": "x"}]},
        "no system",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_honoured_is_a_400_that_names_it(client: TestClient, case: str) -> None:
    path, body, words = BAD[case]
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_a_body_that_is_no_json_is_a_400(client: TestClient, kind: str) -> None:
    response = client.post(COMPLETION, content='{"prompt": ', headers={"content-type": kind})
    assert response.status_code == 400
    assert "must be JSON" in response.json()["error"]["message"]


def test_another_models_name_is_a_404(client: TestClient) -> None:
    response = client.post(COMPLETION, json={"model": "gpt-9", "prompt": TEXT})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
    assert client.get("/v1/models").json()["data"][0]["id"] == NAME


def test_what_exceeds_the_memory_is_a_400(model: Any) -> None:
    with GenerationQueue(model, TOKENIZER, QueueConfig(kv_budget=50_000)) as queue:
        client = TestClient(create_app(queue, NAME, DEFAULT))
        response = client.post(COMPLETION, json={"prompt": TEXT, "max_tokens": 200})
    assert response.status_code == 400
    assert "kv_budget" in response.json()["error"]["message"]


def test_a_full_queue_is_a_429_and_leaves_nothing_behind(
    queue: GenerationQueue, client: TestClient
) -> None:
    gate, held = full_batch(queue)
    waiting = queue.submit(TEXT, max_new_tokens=4, do_sample=False)
    body = {"prompt": TEXT, "max_tokens": 4, "n": 2}
    response = client.post(COMPLETION, json=body)
    gate.opened.set()
    for handle in (held, waiting):
        handle.result(60)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    ended = queue.metrics()["ended"]
    assert (ended["done"], ended["cancelled"], ended["refused"]) == (2, 1, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_missed_deadline_is_a_504(
    queue: GenerationQueue, client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate, held = full_batch(queue)
    submit = queue.submit

    def late(*args: Any, **kwargs: Any) -> Any:
        handle = submit(*args, **kwargs)
        time.sleep(kwargs["deadline_s"])
        gate.opened.set()
        return handle

    monkeypatch.setattr(queue, "submit", late)
    body = {"prompt": TEXT, "max_tokens": 4, "deadline_s": 0.001, "stream": stream}
    response = client.post(COMPLETION, json=body)
    held.result(60)
    assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")


def test_a_closed_queue_is_a_503(queue: GenerationQueue, client: TestClient) -> None:
    assert client.get("/health").json() == {
        "status": "ok", "model": NAME, "running": 0, "waiting": 0,
    }  # fmt: skip
    queue.close()
    assert client.post(COMPLETION, json={"prompt": TEXT}).status_code == 503
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "closed")


def test_a_fatal_error_is_a_503_that_names_it(
    queue: GenerationQueue, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(queue._engine.places.decoder, "round", fail)
    for response in (client.post(COMPLETION, json={"prompt": TEXT}) for _ in range(2)):
        assert response.status_code == 503
        assert "RuntimeError: out of luck" in response.json()["error"]["message"]
    assert client.get("/health").status_code == 503


def test_an_error_nobody_foresaw_is_a_500_in_the_same_form(
    queue: GenerationQueue, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(queue, "submit", fail)
    response = client.post("/generate", json={"inputs": TEXT})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert response.json()["error"]["message"] == "out of luck"


class Client:
    """An ASGI client that leaves when it is told to."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.app, self.sent = app, []
        self.left = asyncio.Event()
        self.has_text = asyncio.Event()
        self._asked = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
            "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip

    async def receive(self) -> dict[str, Any]:
        if self._asked:
            return self._asked.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.has_text.set()

    def run(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.app(self._scope, self.receive, self.send))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": TEXT, "stream": True, "n": 2}),
        (CHATS, {"messages": CHAT, "stream": True}),
        ("/generate", {"inputs": TEXT, "stream": True}),
        (COMPLETION, {"prompt": TEXT}),
        ("/generate", {"inputs": TEXT}),
    ],
    ids=["stream of two", "chat stream", "native stream", "whole", "native whole"],
)
def test_a_client_that_leaves_cancels_its_requests(
    model: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    queue = GenerationQueue(model, TOKENIZER, QueueConfig(max_rows=2))
    submit, gate, handles = queue.submit, Gate(), []

    def held(*args: Any, **kwargs: Any) -> Any:
        handles.append(submit(*args, **kwargs, stopping_criteria=[gate]))
        return handles[-1]

    monkeypatch.setattr(queue, "submit", held)

    async def leave() -> list[dict[str, Any]]:
        client = Client(create_app(queue, NAME, DEFAULT), path, {**body})
        task = client.run()
        while len(handles) < body.get("n", 1):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(gate.reached.wait, 60)
        client.left.set()
        await task
        return client.sent

    try:
        sent = asyncio.run(leave())
        assert {handle.status for handle in handles} == {"cancelled"}
        assert all(message.get("status", 499) in (200, 499) for message in sent)
        gate.opened.set()
        assert queue.close(timeout=60)
        assert queue.metrics()["ended"]["done"] == 0
    finally:
        gate.opened.set()
        queue.close(drain=False)


def test_an_error_within_a_stream_is_its_last_event(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = GenerationQueue(model, TOKENIZER)
    submit = queue.submit

    class Fails(StoppingCriteria):
        dspark_per_row = True

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if input_ids.shape[1] > 9:
                raise CapacityError("no more room")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def failing(*args: Any, **kwargs: Any) -> Any:
        return submit(*args, **kwargs, stopping_criteria=[Fails()])

    monkeypatch.setattr(queue, "submit", failing)
    with queue:
        client = TestClient(create_app(queue, NAME, DEFAULT))
        ids = TOKENIZER(TEXT)["input_ids"]
        response = client.post("/generate", json={"inputs": ids, "stream": True})
    *pieces, last = [line for line in response.text.split("\n\n") if line]
    assert pieces
    assert json.loads(last.removeprefix("data: "))["error"] == {
        "message": "no more room", "type": "invalid_request_error", "param": None, "code": None,
    }  # fmt: skip
