"""`dspark-hf serve`: the command up to its server, and the server on a real socket."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import tiny
from dspark_hf import GenerationQueue
from dspark_hf.cli.app import app
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.server import create_app
from harness import CONFIG, toy_tokenizer, wrapped
from training_files import save_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_target(tmp_path_factory.mktemp("target")))


def serve(*words: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["serve", *map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, result.output
    return result.output


def test_the_command_serves_the_model_by_its_settings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def run(served: Any, **settings: Any) -> None:
        client = TestClient(served)
        body = {"messages": [{"role": "user", "content": "tea"}]}
        seen["answer"] = client.post("/v1/chat/completions", json=body).json()
        seen["metrics"] = client.get("/metrics").text
        seen.update(settings)

    monkeypatch.setattr(uvicorn, "run", run)
    config = tmp_path / "serve.yaml"
    config.write_text("schedule: fixed\nqueue:\n  max_rows: 3\n", encoding="utf-8")
    output = serve(
        folder, "--drafter", "lookup", "--dtype", "float32", "--config", config, "--watch",
        "--max-new-tokens", 7, "--port", 8123, "--name", "brew",
    )  # fmt: skip
    assert "brew at http://127.0.0.1:8123" in output
    assert (seen["host"], seen["port"]) == ("127.0.0.1", 8123)
    assert seen["answer"]["model"] == "brew"
    assert seen["answer"]["usage"]["completion_tokens"] == 7
    assert "dspark_batch_rows_max 3.0" in seen["metrics"]
    assert "dspark_machine_bytes_per_second" in seen["metrics"], "--watch measures it"
    assert 'dspark_drafter_breaker{drafter="lookup",state="closed"} 1.0' in seen["metrics"]
    assert not [t for t in threading.enumerate() if t.name == "dspark-queue"]


def test_a_missing_package_is_named_with_what_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    line = serve(folder, exit_code=2)
    assert "uvicorn is not installed" in line
    assert "pip install 'dspark-hf[serve]'" in line


def test_a_missing_prometheus_client_is_named_by_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "dspark_hf.serving.exposition", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with (
        wrapped(tiny.llama()) as model,
        GenerationQueue(model) as queue,
        pytest.raises(Exception, match=r"pip install 'dspark-hf\[serve\]'"),
    ):
        queue.prometheus()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "no/such.yaml"], "--config must be a YAML file"),
        (["--drafter", "no-such-drafter"], "drafter must be one of"),
        (["--dtype", "int3"], "dtype must be one of"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_one_line(folder: Path, words: list[str], said: str) -> None:
    line = serve(folder, *words, exit_code=2)
    assert line.startswith("Error: ")
    assert said in line


@pytest.fixture
def queue() -> Iterator[GenerationQueue]:
    with wrapped(tiny.llama(max_position_embeddings=4096), "lookup", CONFIG) as model:
        queue = GenerationQueue(model, toy_tokenizer(), QueueConfig(max_rows=2))
        yield queue
        queue.close(drain=False)


def post(address: Any, body: dict[str, Any]) -> tuple[HTTPConnection, HTTPResponse]:
    """Ask /generate, and leave the connection open."""
    connection = HTTPConnection(*address, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/generate", json.dumps(body), headers)
    return connection, connection.getresponse()


def test_over_a_socket_pieces_come_one_by_one_and_hanging_up_cancels(
    queue: GenerationQueue,
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = listening.getsockname()
        server = uvicorn.Server(uvicorn.Config(create_app(queue, "tiny", 8), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            ids = tiny.prompt(9)
            body = {"inputs": ids, "max_new_tokens": 8, "do_sample": False}
            connection, response = post(address, body)
            (row,) = json.load(response)["rows"]
            connection.close()
            expected = tiny.plain_generate(queue.model, [ids], max_new_tokens=8)[0, len(ids) :]
            assert row["ids"] == expected.tolist()
            connection, response = post(address, {**body, "max_new_tokens": 4000, "stream": True})
            assert response.readline() == f'data: {{"piece": {row["ids"][0]}}}\n'.encode()
            response.close()
            connection.close()
            deadline = time.monotonic() + 60
            while not queue.metrics()["ended"]["cancelled"]:
                assert time.monotonic() < deadline, "nobody noticed that the client left"
                time.sleep(0.005)
            assert queue.metrics()["ended"]["done"] == 1
        finally:
            server.should_exit = True
            thread.join(60)
