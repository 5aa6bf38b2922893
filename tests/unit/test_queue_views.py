"""A queue's metrics as seen: the live picture, and the text for Prometheus."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tiny
from dspark_hf import GenerationQueue
from dspark_hf.serving.exposition import FAMILIES, PREFIX, exposition
from dspark_hf.serving.watch import MOST_ROWS, render, watching
from harness import CONFIG, wrapped
from made_metrics import metrics, row, samples

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"


def drawn(values: dict[str, Any]) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(render(values))
    return console.export_text()


def test_the_picture_shows_what_the_metrics_say() -> None:
    picture = drawn(metrics())
    for words in (
        "2 rows of 12 (at most 16), utilisation 62%",
        "5 waiting, 2 of them parked, oldest 250 ms; 3 preemptions",
        "40 done, 1 failed, 2 cancelled",
        "81.3 new, - of prompts",
        "accepted length 1.90, hit rate 40%, 2.25 verified per row",
        "4096 tokens, budget 75% used; device 3.0 MiB of 1.0 GiB, host 1.5 KiB of 2.0 MiB",
        "64% of prompt tokens found",
        "2.0 GiB/s read, 25% of what copying moves",
        "block, lookup (open)",
    ):
        assert words in picture, words
    assert re.search(r"in the queue +4 ms +500 ms +1.2 s", picture)
    assert re.search(r"first token +100 ms +900 ms +3.0 s", picture)
    assert re.search(r"per token +- +- +-", picture)
    assert re.search(r"7 +running +0 +31 +12 +1.75 +2.5 s", picture)
    assert re.search(r"8 +starting +0 +31 +0 +0.00 +2.5 s", picture)


def test_rows_beyond_the_screen_are_counted() -> None:
    picture = drawn(metrics(rows=[row(1000 + i) for i in range(MOST_ROWS + 3)]))
    assert "and 3 more" in picture
    assert len(re.findall(r"^ *10\d\d +running", picture, flags=re.MULTILINE)) == MOST_ROWS
    assert "more" not in drawn(metrics(rows=[row(1)]))


def test_a_queue_that_has_done_nothing_is_drawn_and_read_too() -> None:
    with wrapped(tiny.llama(), None, CONFIG) as model, GenerationQueue(model) as queue:
        picture, text = drawn(queue.metrics()), queue.prometheus()
    assert "0 rows of 16 (at most 16), utilisation -" in picture
    assert re.search(r"drafters +none", picture)
    assert "dspark_steps_total 0.0" in text
    assert "dspark_batch_utilisation" not in text, "what is unknown is left out"


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    file = io.StringIO()

    def fail() -> dict[str, Any]:
        raise AssertionError("metrics were asked for")

    with watching(fail, Console(file=file), 100.0):
        pass
    assert file.getvalue() == ""


def test_a_terminal_shows_the_picture_while_the_context_is_open() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with wrapped(tiny.llama(), "lookup", CONFIG) as model, GenerationQueue(model) as queue:
        with queue.watch(console):
            queue.submit(tiny.prompt(5), max_new_tokens=3, do_sample=False).result(60)
        length = len(file.getvalue())
        assert "utilisation" in file.getvalue()
        queue.submit(tiny.prompt(5), max_new_tokens=3, do_sample=False).result(60)
        assert len(file.getvalue()) == length


def test_prometheus_reads_every_value_back() -> None:
    found = samples(exposition(metrics()))
    assert found["dspark_requests_total", "cancelled"] == 2
    assert found["dspark_first_token_seconds", "0.95"] == 0.9
    assert found["dspark_kv_bytes", "host"] == 1536
    assert found["dspark_drafter_breaker", "lookup", "open"] == 1
    assert ("dspark_token_seconds", "0.5") not in found
    assert ("dspark_prompt_tokens_per_second",) not in found
    values, expected = metrics(), {}
    for family in FAMILIES:
        value: Any = values
        for key in family.path:
            value = value[key]
        name = PREFIX + family.name + ("_total" if family.is_counter else "")
        for key, number in value.items() if isinstance(value, dict) else [(None, value)]:
            label = {"p50": "0.5", "p95": "0.95", "p99": "0.99"}.get(key, key)
            if number is not None:
                expected[(name,) if label is None else (name, label)] = number
    breakers = {key for key in found if key[0] == "dspark_drafter_breaker"}
    assert {key: value for key, value in found.items() if key not in breakers} == expected


def test_made_up_metrics_have_the_keys_of_real_ones() -> None:
    with wrapped(tiny.llama(), "lookup", CONFIG) as model, GenerationQueue(model) as queue:
        real = queue.metrics()
    made = metrics()
    assert set(real) == set(made)
    for name in set(made) - {"rows", "breakers"}:
        if isinstance(made[name], dict):
            assert set(real[name]) == set(made[name]), name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_document_names_every_metric(family: Any) -> None:
    name = PREFIX + family.name + ("_total" if family.is_counter else "")
    assert f"`{name}" in DOCUMENT.read_text(encoding="utf-8")


def test_the_document_names_every_key() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    values = metrics()
    keys = {*values, *(key for part in values.values() if isinstance(part, dict) for key in part)}
    keys |= set(row(1))
    for key in keys - set(values["breakers"]):
        assert f"`{key}`" in document, key
