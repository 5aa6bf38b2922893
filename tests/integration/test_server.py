"""The HTTP server on a tiny model: what it answers is what generate() says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

import tiny
from dspark_hf import DSparkConfig, GenerationQueue
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.server import create_app
from harness import CONFIG, wrapped
from served import CHAT, COMPLETION, DEFAULT, NAME, TEXT, TOKENIZER, events, generated


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with wrapped(tiny.llama(), "lookup", CONFIG) as model:
        yield model


@pytest.fixture
def queue(model: Any) -> Iterator[GenerationQueue]:
    queue = GenerationQueue(model, TOKENIZER, QueueConfig(max_rows=2))
    yield queue
    queue.close(drain=False)


@pytest.fixture
def client(queue: GenerationQueue) -> TestClient:
    return TestClient(create_app(queue, NAME, DEFAULT))


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


def test_metrics_are_for_prometheus(client: TestClient) -> None:
    client.post(COMPLETION, json={"prompt": TEXT, "max_tokens": 5})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'dspark_requests_total{outcome="done"} 1.0' in response.text
    assert "dspark_new_tokens_total 5.0" in response.text
