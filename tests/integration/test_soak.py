"""A soak of seconds: all is well in it, and what is not well is said."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from dspark_hf import GenerationQueue
from dspark_hf.serving.handle import DONE, RequestHandle, RequestResult
from harness import wrapped
from queues import FIXED, WAIT_S, greedy
from served import TOKENIZER
from soak.__main__ import main
from soak.asking import Question, rows_alone
from soak.clients import HANGING, OTHERWISE, Client, Flight, Tally, check, difference
from soak.report import MOST_GROWTH_BYTES, problems, sentence
from soak.run import Soak, SoakSettings
from soak.samples import MIB, Sample, slope_per_hour
from soak.subject import subject_of
from tiny import prompt

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "soak.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.llama().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.mark.parametrize("is_named", [False, True], ids=["its own model", "a checkpoint"])
def test_a_soak_of_seconds_is_well(is_named: bool, checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--minutes", "0.1", "--output", str(tmp_path / "soak.json"), "--faults", "8"]
    arguments += ["--model", str(checkpoint)] if is_named else []
    before = threading.active_count()
    assert main(arguments) == 0
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["problems"] == []
    assert result["requests"]["done"] > 0
    assert result["distinct"] >= 16
    # On a crowded machine there is hardly time for more.
    assert len(result["samples"]) >= 2
    assert result["samples"][-1]["rows"] == result["samples"][-1]["slots"] == 0
    assert str(tmp_path) not in json.dumps(result)
    assert str(checkpoint.parent) not in json.dumps(result)
    assert threading.active_count() == before


def test_a_text_that_is_not_that_of_its_run_alone_is_told() -> None:
    subject, asked = subject_of(None), greedy(prompt(7), 6)
    rows = rows_alone(subject, asked)
    other = rows.clone()
    other[0, 4] += 1
    with GenerationQueue(subject.model, TOKENIZER) as queue:
        handle = asked.submit(queue)
        result = handle.result(WAIT_S)
    assert difference(Question(1, asked, rows, "", runs_alone=False), handle, result) is None
    wrong = difference(Question(1, asked, other, "", runs_alone=False), handle, result)
    assert wrong == f"request 1 is {rows.tolist()}, alone {other.tolist()}"
    lost = RequestHandle(lambda _: None)
    assert "pieces []" in difference(Question(1, asked, rows, "", runs_alone=False), lost, result)


def test_what_hangs_or_ends_as_it_must_not_is_told() -> None:
    def ended(error: Exception | None = None, **flight: Any) -> tuple[str, str | None]:
        handle = RequestHandle(lambda _: None)
        rows = torch.tensor([[5, 6]], dtype=torch.int32)
        question = Question(1, greedy([1]), rows, "", runs_alone=False)
        result = RequestResult(torch.tensor([[1, 5, 6]]), [5, 6], None, handle.stats)
        for token in [5, 6]:
            handle.add(token)
        handle.end("failed" if error else DONE, result=None if error else result, error=error)
        return check(Flight(question, handle, **flight))

    assert ended() == (DONE, None)
    assert ended(ArithmeticError(), fails_with=ArithmeticError) == ("failed as injected", None)
    assert "must fail" in ended(fails_with=ArithmeticError)[1]
    assert "ArithmeticError" in ended(ArithmeticError())[1]
    tally = Tally()
    with wrapped(tiny.llama(), None, FIXED) as model, GenerationQueue(model) as queue:
        client = Client(queue, None, tally, seed=1, bound_s=0.0)
        client.flights = [Flight(None, RequestHandle(lambda _: None))]
        client.look()
        assert client.flights == []
        # A library that is none: the client's own end is told as well.
        client.start()
        client.join(WAIT_S)
    assert tally.wrong.as_dict() == {OTHERWISE: 1, HANGING: 1}
    assert [what.split(":")[0] for what in tally.told] == [HANGING, OTHERWISE]


def made(**changes: Any) -> Soak:
    """Return a soak of half an hour that went well."""
    values: dict[str, Any] = {"minute": 0.0, "rss_bytes": 100 * MIB, "threads": 1, "descriptors": 6}
    before = Sample(**values)
    samples = [Sample(**{**values, "minute": float(n), "done": 10 * n}) for n in range(31)]
    soak = Soak(SoakSettings(9.0), None, Tally(), before, samples, before)
    for name, value in changes.items():
        setattr(soak, name, value)
    return soak


def test_growth_and_what_is_left_are_problems() -> None:
    assert problems(made()) == []
    more = Sample(0.0, 100 * MIB, threads=2, descriptors=7)
    assert problems(made(after=more)) == [
        "threads: 1 before the queue, 2 after", "descriptors: 6 before the queue, 7 after",
    ]  # fmt: skip
    assert problems(made(left=["a file"])) == ["a file"]
    assert problems(made(after=None)) == ["the soak did not come to its end"]
    grown = [*made().samples, Sample(31.0, 100 * MIB + MOST_GROWTH_BYTES + MIB, 1, 6, done=3)]
    assert problems(made(samples=grown)) == ["memory grew by 25.0 MiB after the warm-up"]
    long = problems(made(settings=SoakSettings(30.0)))
    assert "never happened: no memory in a forward" in long


def test_the_slope_is_that_of_the_memory_over_time() -> None:
    samples = [Sample(float(n), 100 * MIB + n * MIB // 2, 1, 6) for n in range(10)]
    assert slope_per_hour(samples) == pytest.approx(30 * MIB)
    assert slope_per_hour(samples[:2]) is None


def test_runs_alone_are_those_of_transformers_own_generate() -> None:
    subject = subject_of(None)
    assert type(subject.plain) is type(tiny.llama())
    assert all(
        mine is theirs
        for mine, theirs in zip(subject.plain.parameters(), subject.model.parameters(), strict=True)
    )
    ids = torch.tensor([prompt(9)])
    plain = AutoModelForCausalLM.from_config(subject.plain.config)
    plain.load_state_dict(tiny.llama().state_dict())
    plain.generation_config = subject.plain.generation_config
    whole = plain.eval().generate(ids, max_new_tokens=5, do_sample=False)
    assert rows_alone(subject, greedy(prompt(9), 5)).tolist() == whole[:, 9:].tolist()


@pytest.mark.skipif(not RESULT.exists(), reason="no soak was recorded")
def test_the_document_quotes_the_recorded_soak() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    text = " ".join((ROOT / "docs" / "queue.md").read_text(encoding="utf-8").split())
    assert result["problems"] == []
    assert sentence(result) in text
