"""The queue's examples, each on its own model of random weights."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark_hf import DSparkForCausalLM, GenerationQueue
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.engine import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a script by name; scripts find their neighbours in their own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def printed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> str:
    """Run a script on its tiny model; return what it prints."""
    monkeypatch.setattr(sys, "argv", [script.__name__, "--tiny", *words])
    script.main()
    return capsys.readouterr().out


def chat_alone(script: ModuleType, model: Any, tokenizer: Any, topic: str, tokens: int) -> str:
    """Hold a chat by generate(), and return its last answer."""
    messages: list[dict[str, str]] = []
    for question in script.QUESTIONS:
        messages.append({"role": "user", "content": question.format(topic)})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        new = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
        answer = tokenizer.decode(new, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return answer


def test_chats_get_the_answers_they_would_get_alone(example: Any) -> None:
    script = example("queue_chats")
    model, tokenizer = script.tiny_chat()
    alone = [chat_alone(script, model, tokenizer, topic, 8) for topic in script.TOPICS]
    DSparkForCausalLM.wrap(model, drafter="lookup")
    with GenerationQueue(model, tokenizer, QueueConfig(max_rows=4)) as queue:
        assert asyncio.run(script.chats(queue, script.TOPICS, 8)) == alone
    assert len(set(alone)) == len(script.TOPICS)


def test_the_chats_print_every_answer_and_the_figures(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script = example("queue_chats")
    output = printed(script, monkeypatch, capsys, "--chats", "8", "--tokens", "4")
    topics = re.findall(r"^\d\. ([^:]+): ", output, flags=re.MULTILINE)
    assert topics == [*script.TOPICS, *script.TOPICS[:2]]
    assert "16 done" in output


def test_the_mix_parks_for_a_priority_alone_and_changes_no_text(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script = example("queue_mixed")
    ask, step, asked = script.ask, Engine._step, threading.Semaphore(0)

    def asking(*args: Any) -> Any:
        handle = ask(*args)
        asked.release()
        return handle

    def stepping(engine: Engine) -> None:
        # The batch does not end before the short requests have come, however slow they are.
        if engine.steps and not hasattr(engine, "waited"):
            running = engine.places.running
            if any(request.handle.pieces for request in running) or engine.metrics._ended["done"]:
                engine.waited = [asked.acquire(timeout=60) for _ in script.THINGS]
        step(engine)

    monkeypatch.setattr(script, "ask", asking)
    monkeypatch.setattr(Engine, "_step", stepping)
    lines = printed(script, monkeypatch, capsys, "--batch", "6", "--tokens", "32").splitlines()
    assert re.match(r"by arrival: first token after .* parked 0 times", lines[0])
    parked = re.match(r"with priority: first token after .* parked (\d+) times", lines[1])
    assert int(parked[1]) > 0
    assert lines[2] == "texts of the batch are the same: True"


@pytest.mark.parametrize("name", ["queue_chats", "queue_mixed"])
def test_an_example_needs_a_model(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit):
        example(name).main()
    assert "pass --model or --tiny" in capsys.readouterr().err
