"""Two replicas in processes of their own: texts are those of generate(), whatever dies."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import tiny
from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.errors import ConfigError, DeadlineError, InputError, QueueClosedError
from dspark_hf.serving import ReplicaConfig, ReplicaQueue
from harness import toy_tokenizer
from made_metrics import samples
from replica_parts import FailAt, HoldAt, no_model

pytestmark = pytest.mark.xdist_group("replicas")

FIXED = DSparkConfig(schedule="fixed", max_draft_tokens=4, never_slower=False)
COUPLED = replace(FIXED, acceptance="coupled", seed=11)
GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 40}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.4, "top_k": 40, "dspark": COUPLED}
HELD = 10
"""Tokens that a held request gets before it waits."""
WAIT_S = 300
"""Far more than anything takes: machines that run tests may be crowded."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tiny.llama()
    model.save_pretrained(tmp_path_factory.mktemp("model"), safe_serialization=True)
    return DSparkForCausalLM.wrap(model, drafter="lookup", config=FIXED)


@pytest.fixture(scope="module")
def replicas(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaQueue]:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.llama().save_pretrained(path)
    load = partial(DSparkForCausalLM.from_pretrained, str(path), drafter="lookup", config=FIXED)
    # A crowded machine may not run a process for seconds; the test of a silent one says less.
    watched = ReplicaConfig(silence_s=2 * WAIT_S, max_restarts=2, num_threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_HF_CACHE", str(tmp_path_factory.mktemp("cache")))
        queue = ReplicaQueue(load, tokenizer=toy_tokenizer(), replica_config=watched)
        yield queue
        assert queue.close(drain=False, timeout=WAIT_S)


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_ready(queue: ReplicaQueue) -> bool:
    return all(replica.state == "ready" for replica in queue.replicas)


def alone(model: Any, ids: Any, **kwargs: Any) -> list[list[int]]:
    prompt = torch.tensor(ids)
    prompt = prompt[None] if prompt.dim() == 1 else prompt
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs)
    return out.tolist()


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """A dozen unlike ones, greedy and coupled."""
    prompts = [tiny.prompt(3 + 5 * i, seed=i) for i in range(12)]
    options: list[dict[str, Any]] = [
        GREEDY,
        {**GREEDY, "max_new_tokens": 3},
        {**GREEDY, "repetition_penalty": 1.3},
        {**GREEDY, "no_repeat_ngram_size": 2, "max_new_tokens": 55},
        {**GREEDY, "eos_token_id": list(range(1, 20))},
        {**GREEDY, "num_beams": 2, "max_new_tokens": 6},
        SAMPLED,
        {**SAMPLED, "dspark": replace(COUPLED, seed=12)},
        {**SAMPLED, "max_new_tokens": 70},
        {**SAMPLED, "num_return_sequences": 2},
        {**SAMPLED, "top_p": 0.8, "min_new_tokens": 9},
        {**SAMPLED, "typical_p": 0.7},
    ]
    return list(zip(prompts, options, strict=True))


def test_every_request_is_what_it_is_alone(model: Any, replicas: ReplicaQueue) -> None:
    expected = [alone(model, ids, **options) for ids, options in requests()]
    handles = [replicas.submit(ids, **options) for ids, options in requests()]
    assert {replica.num_requests > 0 for replica in replicas.replicas} == {True}
    for handle, whole, (ids, _) in zip(handles, expected, requests(), strict=True):
        result = handle.result(WAIT_S)
        assert result.output.tolist() == whole
        assert handle.pieces == result.ids == whole[0][len(ids) :][: len(result.ids)]
        assert result.stats.moves == 0
    assert [len(handle.stats.records) for handle in handles] == [1] * 9 + [2] + [1] * 2
    assert sum(handle.stats.records[0].accepted for handle in handles) > 0


def test_text_comes_in_pieces_and_scores_as_tensors(model: Any, replicas: ReplicaQueue) -> None:
    tokenizer = toy_tokenizer()
    prompt = tiny.prompt(9, seed=3)
    text = tokenizer.decode(prompt)
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    whole = model.generate(torch.tensor([prompt]), **options)
    stop = tokenizer.decode(whole.sequences[0, 20:22])
    answer = replicas.submit(text, **options)
    stopped = replicas.submit(text, stop_strings=[stop], **GREEDY)
    result = answer.result(WAIT_S)
    assert result.text == "".join(answer.pieces) == tokenizer.decode(whole.sequences[0, 9:])
    for mine, theirs in zip(result.output.scores, whole.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert stopped.result(WAIT_S).text.endswith(stop)
    results = replicas.map([text, prompt], progress=False, **GREEDY)
    assert [r.ids for r in results] == [whole.sequences[0, 9:].tolist()] * 2


def test_unseeded_requests_differ_wherever_they_run(replicas: ReplicaQueue) -> None:
    prompt = tiny.prompt(9, seed=3)
    options = {**SAMPLED, "dspark": replace(COUPLED, seed=None)}
    handles = [replicas.submit(prompt, **options) for _ in range(4)]
    texts = {tuple(handle.result(WAIT_S).ids) for handle in handles}
    assert len(texts) == 4


def test_what_is_wrong_is_said_where_it_was_submitted(replicas: ReplicaQueue) -> None:
    prompt = tiny.prompt(9, seed=3)
    with pytest.raises(InputError, match=r"input_ids must lie in 0\.\.159"):
        replicas.submit([1, 2, 500], **GREEDY)
    with pytest.raises(ConfigError, match="schedule is shared by a queue's rows"):
        replicas.submit(prompt, dspark=replace(FIXED, schedule="auto"), **GREEDY)
    with pytest.raises(ValueError, match="temperature"):
        replicas.submit(prompt, **{**SAMPLED, "temperature": -1.0})
    with pytest.raises(ConfigError, match="stopping_criteria must be picklable"):
        replicas.submit(prompt, stopping_criteria=[lambda *_: False], **GREEDY)


def test_a_request_that_fails_fails_alone(model: Any, replicas: ReplicaQueue) -> None:
    prompts = [tiny.prompt(9, seed=s) for s in range(4)]
    for replica in replicas.replicas:
        # An interrupt from the keyboard reaches every process; the front's is what counts.
        os.kill(replica.pid, signal.SIGINT)
    handles = [replicas.submit(ids, **GREEDY) for ids in prompts]
    bad = [replicas.submit(ids, logits_processor=[FailAt(14)], **GREEDY) for ids in prompts]
    for handle, ids in zip(bad, prompts, strict=True):
        with pytest.raises(ArithmeticError, match="at 14 tokens") as found:
            handle.result(WAIT_S)
        assert "replica_parts.py" in str(found.value.__cause__)
        assert handle.pieces == alone(model, ids, **GREEDY)[0][9:14]
    for handle, ids in zip(handles, prompts, strict=True):
        assert handle.result(WAIT_S).output.tolist() == alone(model, ids, **GREEDY)


def test_cancelling_and_deadlines_reach_the_replica(replicas: ReplicaQueue, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    prompt = tiny.prompt(9, seed=3)
    held = replicas.submit(prompt, logits_processor=[HoldAt(gate, 9 + HELD)], **GREEDY)
    until(lambda: len(held.pieces) == HELD)
    assert held.status == "running"
    assert held.cancel()
    gate.unlink()
    until(lambda: not any(replica.num_requests for replica in replicas.replicas))
    told = replicas.metrics()
    assert told["requests"] == 0
    until(lambda: _cancelled(replicas) == 1)
    assert replicas.expected_delay_s == 0.0
    gate.touch()
    late = replicas.submit(
        prompt, deadline_s=0.2, logits_processor=[HoldAt(gate, 9 + HELD)], **GREEDY
    )
    until(lambda: late.stats.since_submitted() > 0.3)
    gate.unlink()
    with pytest.raises(DeadlineError, match="deadline_s passed"):
        late.result(WAIT_S)


def _cancelled(queue: ReplicaQueue) -> int:
    return sum(r["queue"]["ended"]["cancelled"] for r in queue.metrics()["replicas"] if r["queue"])


def hold(queue: ReplicaQueue, gate: Path, seed: int) -> tuple[Any, int, list[int]]:
    """Submit a request that stops halfway; return it, where it went, and its prompt."""
    gate.touch()
    before = [replica.num_requests for replica in queue.replicas]
    prompt = tiny.prompt(9, seed=seed)
    handle = queue.submit(prompt, logits_processor=[HoldAt(gate, 9 + HELD)], **GREEDY)
    after = [replica.num_requests for replica in queue.replicas]
    return handle, next(i for i in range(len(after)) if after[i] > before[i]), prompt


def test_when_a_replica_is_killed_nothing_is_lost_or_said_twice(
    model: Any, replicas: ReplicaQueue, tmp_path: Path
) -> None:
    until(lambda: all_ready(replicas))
    held, place, prompt = hold(replicas, tmp_path / "gate", seed=7)
    handles = [replicas.submit(ids, **options) for ids, options in requests()]
    until(lambda: len(held.pieces) == HELD)
    victim, counted = replicas.replicas[place], replicas.metrics()
    assert counted["total"]["new_tokens"] > 0
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: held.stats.moves == 1)
    (tmp_path / "gate").unlink()
    expected = [alone(model, ids, **options) for ids, options in requests()]
    for handle, whole, (ids, _) in zip(handles, expected, requests(), strict=True):
        result = handle.result(WAIT_S)
        assert result.output.tolist() == whole
        assert handle.pieces == whole[0][len(ids) :][: len(handle.pieces)]
        assert len(handle.pieces) == len(result.ids)
    assert held.result(WAIT_S).output.tolist() == alone(model, prompt, **GREEDY)
    assert held.pieces == held.result().ids
    assert sum(handle.stats.moves for handle in handles) > 0
    # Its place is taken by a new process, which decodes like any other.
    until(lambda: all_ready(replicas))
    now = replicas.replicas[place]
    assert now.pid != victim.pid
    assert now.restarts == victim.restarts + 1
    told, text = replicas.metrics(), samples(replicas.prometheus())
    assert told["total"]["new_tokens"] >= counted["total"]["new_tokens"]
    assert told["ended"]["done"] >= counted["ended"]["done"] + 1
    assert text["dspark_replica_restarts_total", str(place)] == now.restarts
    assert text["dspark_all_new_tokens_total",] >= told["total"]["new_tokens"]


def test_what_replicas_do_is_told_by_replica_and_in_all(replicas: ReplicaQueue) -> None:
    until(lambda: all_ready(replicas))
    before, file = replicas.metrics(), io.StringIO()
    with pytest.raises(InputError):
        replicas.submit([1, 2, 500], **GREEDY)
    with replicas.watch(Console(file=file, force_terminal=True, width=140)):
        replicas.submit(tiny.prompt(9, seed=3), **GREEDY).result(WAIT_S)
        until(lambda: "2 of 2 ready" in file.getvalue())
    told, text = replicas.metrics(), samples(replicas.prometheus())
    assert told["ended"] == {**before["ended"], "done": before["ended"]["done"] + 1}
    assert told["total"]["new_tokens"] == before["total"]["new_tokens"] + 40
    for place, replica in enumerate(told["replicas"]):
        key = "dspark_new_tokens_total", str(place)
        assert text[key] == replica["queue"]["total"]["new_tokens"]
        assert text["dspark_replica_ready", str(place)] == 1
    assert text["dspark_all_requests_total", "done"] == told["ended"]["done"]


def test_a_replica_that_hangs_is_noticed_by_its_silence(
    model: Any, replicas: ReplicaQueue, tmp_path: Path
) -> None:
    until(lambda: all_ready(replicas))
    gates = [tmp_path / "first", tmp_path / "second"]
    held = [hold(replicas, gate, seed=seed) for seed, gate in enumerate(gates)]
    assert {place for _, place, _ in held} == {0, 1}
    handle, place, _ = held[1]
    until(lambda: len(handle.pieces) == HELD)
    # What computes for long, as both do at their gates, goes on giving signs of life.
    hung = replicas._dispatcher.crew.members[place]
    silences = []
    until(lambda: silences.append(hung.heart.silent_s) or len(silences) > 50)
    assert min(silences) < 1.0
    os.kill(hung.pid, signal.SIGSTOP)
    hung.heart.limit_s = 0.8
    until(lambda: handle.stats.moves == 1)
    for gate in gates:
        gate.unlink()
    for each, _, ids in held:
        assert each.result(WAIT_S).output.tolist() == alone(model, ids, **GREEDY)
        assert each.pieces == each.result().ids
    assert not hung.process.is_alive()


def test_when_none_is_left_everyone_is_told_and_closing_ends(
    replicas: ReplicaQueue, tmp_path: Path
) -> None:
    until(lambda: all_ready(replicas))
    gates = [tmp_path / "first", tmp_path / "second"]
    held = [hold(replicas, gate, seed=seed)[0] for seed, gate in enumerate(gates)]
    until(lambda: all(len(handle.pieces) == HELD for handle in held))
    pids = set()

    def none_is_left() -> bool:
        for replica in replicas.replicas:
            if replica.pid is not None and replica.pid not in pids:
                pids.add(replica.pid)
                os.kill(replica.pid, signal.SIGKILL)
        return not replicas.is_open

    until(none_is_left)
    for handle in held:
        assert len(handle.pieces) == HELD
        with pytest.raises(QueueClosedError, match="ended by signal 9"):
            handle.result(WAIT_S)
    with pytest.raises(QueueClosedError, match="the queue ended"):
        replicas.submit([1, 2], **GREEDY)
    assert replicas.close(timeout=WAIT_S)
    assert {replica.state for replica in replicas.replicas} == {"dead"}


def test_what_loading_raises_is_raised_where_the_queue_is_made() -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        ReplicaQueue(no_model, replicas=1)


def test_the_example_loses_no_text(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("queue_replicas", folder / "queue_replicas.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["queue_replicas", "--tiny", "--tokens", "48"])
    script.main()
    printed = capsys.readouterr().out
    assert "texts as generate() gives them: 8 of 8" in printed
    assert "replica 1 was killed" in printed
