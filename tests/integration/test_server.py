"""The HTTP server on a tiny model: texts are generate()'s, errors have their status, who leaves is
dropped."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import StoppingCriteria

import tiny
from dspark_hf import DSparkConfig, GenerationQueue
from dspark_hf.errors import CapacityError
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.server import create_app
from harness import CONFIG, toy_tokenizer, wrapped

NAME, DEFAULT = "tiny", 12
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system')"
    " }}{% endif %}{{ message.content }}{% endfor %}"
)
TOKENIZER = toy_tokenizer()
TOKENIZER.chat_template = TEMPLATE
TEXT = "abacadaeafag"
CHAT = [{"role": "user", "content": "abac"}, {"role": "user", "content": "adaeafag"}]
"""The template makes of it the same as TEXT."""


class Gate(StoppingCriteria):
    """Holds a row before its second token until it is opened."""

    dspark_per_row = True

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.reached.set()
        self.opened.wait(60)
        return torch.zeros(len(input_ids), dtype=torch.bool)


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


def full_batch(queue: GenerationQueue) -> tuple[Gate, Any]:
    """Fill a queue of two rows with a request that does not end before the gate is opened."""
    gate, ids = Gate(), TOKENIZER([TEXT, TEXT], return_tensors="pt")["input_ids"]
    held = queue.submit(ids, max_new_tokens=4, do_sample=False, stopping_criteria=[gate])
    assert gate.reached.wait(60)
    return gate, held


def generated(model: Any, text: str, num_tokens: int, **kwargs: Any) -> tuple[list[int], str]:
    """Return what generate() adds to a text: ids and text."""
    ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    kwargs = {"do_sample": False, "max_new_tokens": num_tokens, **kwargs}
    out = model.generate(ids, tokenizer=TOKENIZER, **kwargs)[0, ids.shape[1] :].tolist()
    return out, TOKENIZER.decode(out, skip_special_tokens=True)


def events(response: Any) -> list[Any]:
    """Return the chunks of a stream that ended as it should."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", {"messages": CHAT})],
    ids=["completions", "chat"],
)
def test_answers_are_what_generate_says_whole_and_streamed(
    client: TestClient, model: Any, path: str, asked: dict[str, Any]
) -> None:
    ids, text = generated(model, TEXT, 20)
    body = {**asked, "model": NAME, "max_tokens": 20, "temperature": 0}
    whole = client.post(path, json=body).json()
    choice = whole["choices"][0]
    said = choice["message"]["content"] if "chat" in path else choice["text"]
    assert (said, choice["finish_reason"]) == (text, "length")
    prompt = len(TOKENIZER(TEXT)["input_ids"])
    usage = {"prompt_tokens": prompt, "completion_tokens": 20, "total_tokens": prompt + 20}
    assert whole["usage"] == usage
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post(path, json={**body, **options}))
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], usage)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    if "chat" in path:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        pieces = [choice["delta"].get("content", "") for choice in choices]
    else:
        pieces = [choice["text"] for choice in choices]
    assert "".join(pieces) == text
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len(ids) == 20


def test_a_request_that_does_not_say_gets_the_servers_length_and_the_models_settings(
    client: TestClient, model: Any
) -> None:
    answer = client.post("/v1/completions", json={"prompt": TEXT}).json()
    assert answer["choices"][0]["text"] == generated(model, TEXT, DEFAULT)[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_is_cut_off_even_where_it_spans_tokens(
    client: TestClient, model: Any, stream: bool
) -> None:
    _, text = generated(model, TEXT, 20)
    stop = text[9:12]
    assert text.index(stop) == 9
    body = {"prompt": TEXT, "max_tokens": 20, "temperature": 0, "stop": ["zz", stop]}
    response = client.post("/v1/completions", json={**body, "stream": stream})
    choices = [c["choices"][0] for c in (events(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == text[:9]
    assert choices[-1]["finish_reason"] == "stop"


def test_an_end_token_is_a_stop_and_no_text(model: Any, client: TestClient) -> None:
    ids, _ = generated(model, TEXT, 20)
    end = ids[7]
    first = ids.index(end)
    row = client.post(
        "/generate",
        json={"inputs": TEXT, "max_new_tokens": 20, "do_sample": False, "eos_token_id": end},
    ).json()["rows"][0]
    assert row["ids"] == ids[: first + 1]
    model.generation_config.eos_token_id = end
    try:
        queue = GenerationQueue(model, TOKENIZER)
        with queue, TestClient(create_app(queue, NAME, DEFAULT)) as client:
            body = {"prompt": TEXT, "max_tokens": first + 1, "temperature": 0}
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
    finally:
        model.generation_config.eos_token_id = None
    assert choice["finish_reason"] == "stop"


def test_a_seed_repeats_choices_and_each_has_its_own(client: TestClient, model: Any) -> None:
    body = {"prompt": TEXT, "max_tokens": 16, "temperature": 5.0, "seed": 3, "n": 3}
    answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    for place, text in enumerate(texts[0]):
        config = DSparkConfig(
            schedule="fixed", max_draft_tokens=5, never_slower=False, seed=3 + place,
            acceptance="coupled",
        )  # fmt: skip
        sampled = {"do_sample": True, "temperature": 5.0, "dspark": config}
        assert text == generated(model, TEXT, 16, **sampled)[1]
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}))
    for place, text in enumerate(texts[0]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == place]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] for choice in own][-1] == "length"


def test_several_prompts_are_answered_in_order(client: TestClient, model: Any) -> None:
    prompts = [TEXT, "bcbdbebf"]
    body = {"prompt": prompts, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json=body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [generated(model, prompt, 8)[1] for prompt in prompts]


@pytest.mark.parametrize("inputs", [TEXT, TOKENIZER(TEXT)["input_ids"], CHAT], ids=str)
def test_generate_takes_text_ids_and_chats_with_any_keyword(
    client: TestClient, model: Any, inputs: Any
) -> None:
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    ids, text = generated(model, TEXT, 16, **settings)
    body = {"inputs": inputs, "max_new_tokens": 16, "do_sample": False, **settings}
    answer = client.post("/generate", json=body).json()
    is_ids = isinstance(inputs[0], int)
    (row,) = answer["rows"]
    assert (row["ids"], row["text"]) == (ids, None if is_ids else text)
    assert answer["stats"]["prompt_tokens"] == len(TOKENIZER(TEXT)["input_ids"])
    *pieces, outcome = events(client.post("/generate", json={**body, "stream": True}))
    said = [piece["piece"] for piece in pieces]
    assert said == ids if is_ids else "".join(said) == text
    assert outcome["rows"][0]["ids"] == ids


def test_generate_returns_every_row(client: TestClient) -> None:
    body = {
        "inputs": TEXT, "max_new_tokens": 10, "do_sample": True, "temperature": 5.0,
        "num_return_sequences": 3, "dspark": {"seed": 1, "acceptance": "coupled"},
    }  # fmt: skip
    rows = client.post("/generate", json=body).json()["rows"]
    assert [len(row["ids"]) for row in rows] == [10, 10, 10]
    assert [row["text"] for row in rows] == [TOKENIZER.decode(row["ids"]) for row in rows]
    assert len({row["text"] for row in rows}) == 3


def test_a_call_for_the_models_own_loop_is_answered_too(client: TestClient, model: Any) -> None:
    body = {"inputs": TEXT, "max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    (row,) = client.post("/generate", json=body).json()["rows"]
    assert row["ids"] == generated(model, TEXT, 8, num_beams=2)[0]


COMPLETION, CHATS = "/v1/completions", "/v1/chat/completions"
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


def test_metrics_are_for_prometheus(client: TestClient) -> None:
    client.post(COMPLETION, json={"prompt": TEXT, "max_tokens": 5})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'dspark_requests_total{outcome="done"} 1.0' in response.text
    assert "dspark_new_tokens_total 5.0" in response.text


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
