"""Metrics of replicas and of a router's groups: for Prometheus, as a picture, and summed."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from dspark_hf.errors import DeadlineError, InputError
from dspark_hf.serving.exposition import FAMILIES, exposition
from dspark_hf.serving.handle import CANCELLED, DONE, FAILED, RequestHandle
from dspark_hf.serving.states import OF_GROUPS, OF_REPLICAS
from dspark_hf.serving.sums import COUNTERS, CounterSums, Outcomes
from dspark_hf.serving.watch_many import render_groups, render_replicas
from made_metrics import metrics, of_replicas, of_router, samples

DOCUMENT = Path(__file__).parents[2] / "docs" / "queue-replicas.md"


def drawn(picture: Any) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(picture)
    return console.export_text()


def labelled(text: str) -> list[tuple[str, dict[str, str], float]]:
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def test_a_replicas_metrics_are_those_of_its_queue_with_its_label() -> None:
    own, text = exposition(metrics()), exposition(of_replicas())
    found = labelled(text)
    for name, labels, value in labelled(own):
        assert (name, {**labels, "replica": "0"}, value) in found, name
    found = samples(text)
    assert ("dspark_steps_total", "1") not in found, "it did not answer"
    two = of_replicas()
    two["replicas"][1]["queue"] = metrics(preemptions=44)
    assert samples(exposition(two))["dspark_preemptions_total", "1"] == 44


def test_counters_in_all_have_names_of_their_own_so_that_no_sum_counts_twice() -> None:
    found = samples(exposition(of_replicas()))
    assert found["dspark_all_requests_total", "done"] == 30
    assert found["dspark_all_requests_total", "refused"] == 5
    assert found["dspark_all_preemptions_total",] == 8
    assert found["dspark_all_new_tokens_total",] == 1200
    assert found["dspark_new_tokens_total", "0"] == 120
    names = {key[0].removeprefix("dspark_all_") for key in found if "_all_" in key[0]}
    assert names == {f"{family.name}_total" for family in FAMILIES if family.is_counter}
    assert not any("_all_" in key[0] for key in samples(exposition(metrics())))


def test_states_of_replicas_are_gauges() -> None:
    found = samples(exposition(of_replicas()))

    def told(name: str) -> list[float]:
        return [found[f"dspark_replica_{name}", str(place)] for place in range(3)]

    assert told("alive") == [1, 1, 0]
    assert told("ready") == [1, 0, 0]
    assert told("restarting") == [0, 1, 0]
    assert told("answers") == [1, 0, 0]
    assert told("requests") == [4, 4, 0]
    assert told("restarts_total") == [0, 2, 0]
    assert (found["dspark_moves_total",], found["dspark_requests_present",]) == (2, 9)
    first = of_replicas()
    first["replicas"][1]["restarts"] = 0
    assert samples(exposition(first))["dspark_replica_restarting", "1"] == 0, "its first start"


def test_a_routers_groups_have_their_label_and_replicas_theirs_beside_it() -> None:
    found = samples(exposition(of_router()))
    assert found["dspark_kv_bytes", "flash", "", "host"] == 1536
    assert found["dspark_kv_bytes", "pro", "0", "host"] == 1536
    assert found["dspark_drafter_breaker", "lookup", "flash", "", "open"] == 1
    assert found["dspark_replica_alive", "pro", "2"] == 0
    assert found["dspark_moves_total", "pro"] == 2
    assert found["dspark_all_requests_total", "flash", "done"] == 40
    assert found["dspark_all_requests_total", "pro", "done"] == 30
    assert found["dspark_group_decisions_total", "flash", "class"] == 7
    states = ("open", "left", "expected_delay_seconds")
    assert [found[f"dspark_group_{name}", "flash"] for name in states] == [1, 1, 2.5]
    assert [found[f"dspark_group_{name}", "pro"] for name in states] == [0, 0, float("inf")]
    assert found["dspark_group_breaker", "pro", "open"] == 1
    assert found["dspark_group_breaker", "flash", "closed"] == 1


def test_groups_that_tell_nothing_of_a_queue_are_named_all_the_same() -> None:
    strange = of_router(groups={"flash": {"taken": 3}, "pro": {"taken": 4}})
    found = samples(exposition(strange))
    assert found["dspark_group_open", "flash"] == 1
    assert not any(
        key[0].startswith(("dspark_steps", "dspark_all", "dspark_repl")) for key in found
    )
    assert re.search(r"flash +open, left +- +- +-", drawn(render_groups(strange)))


def test_the_picture_of_replicas_has_a_line_each_and_one_of_all() -> None:
    picture = drawn(render_replicas(of_replicas()))
    assert re.search(r"^ *0 +ready +8 +2 +5 +81\.3 +1\.90 +40% +3\.0 MiB +- +0", picture, re.M)
    assert re.search(r"^ *1 +loading +4 +- +- +- +- +- +- +- +2", picture, re.M)
    assert re.search(r"^ *2 +dead +0 +-", picture, re.M)
    assert re.search(r"^ *all +1 of 3 ready +9 +2 +5 +81\.3 +- +- +3\.0 MiB +- +2", picture, re.M)
    assert "ended  30 done, 1 failed, 3 cancelled, 5 refused; 2 moves" in picture


def test_the_picture_of_a_router_has_a_line_per_group_and_replica() -> None:
    picture = drawn(render_groups(of_router()))
    assert re.search(r"^ *flash +open, left +8 +2 +5 +81\.3 .* 2\.5 s +9", picture, re.M)
    assert re.search(
        r"^ *pro +closed, breaker open +9 +2 +5 .* 1$", picture.replace(" \n", "\n"), re.M
    )
    assert re.search(r"^ *pro/0 +ready", picture, re.M)
    assert re.search(r"^ *pro/2 +dead", picture, re.M)
    assert "flash: 40 done, 1 failed, 2 cancelled; pro: 30 done" in picture


def test_sums_do_not_fall_when_a_replica_starts_again_at_zero() -> None:
    sums, zero = CounterSums(), dict.fromkeys(metrics()["total"], 0)
    assert sums.totals()["total"]["steps"] == 0
    sums.note(0, 0, metrics())
    sums.note(1, 0, metrics(preemptions=5))
    assert sums.totals()["preemptions"] == 8
    assert sums.totals()["total"]["new_tokens"] == 240
    sums.note(0, 1, metrics(preemptions=0, total=zero))
    assert sums.totals()["preemptions"] == 8
    assert sums.totals()["total"]["new_tokens"] == 240
    sums.note(0, 1, metrics(preemptions=2, total={**zero, "new_tokens": 7}))
    # An answer that comes late says less than what is known.
    sums.note(0, 1, metrics(preemptions=1, total=zero))
    assert sums.totals()["preemptions"] == 10
    assert sums.totals()["total"]["new_tokens"] == 247
    assert sums.totals()["prefix"] == {"asked": 300, "found": 192}


def test_everything_that_counts_is_summed() -> None:
    counters = {family.path for family in FAMILIES if family.is_counter}
    assert counters == {*COUNTERS, ("ended",)}


def test_requests_are_counted_by_how_they_end() -> None:
    outcomes = Outcomes()
    ends = [
        (DONE, None), (FAILED, InputError("no")), (FAILED, DeadlineError("late")),
        (CANCELLED, None), (DONE, None),
    ]  # fmt: skip
    for status, error in ends:
        RequestHandle(lambda _: None, outcomes.end).end(status, error=error)
    outcomes.refuse()
    assert outcomes.counts() == {"done": 2, "failed": 1, "expired": 1, "cancelled": 1, "refused": 1}


@pytest.mark.parametrize(
    "name",
    [
        *(f"dspark_{name}" for name, _, _ in [*OF_REPLICAS, *OF_GROUPS]),
        "dspark_replica_restarts_total", "dspark_moves_total", "dspark_requests_present",
        "dspark_group_left", "dspark_group_breaker", "dspark_group_decisions_total", "dspark_all_",
    ],
)  # fmt: skip
def test_the_document_names_every_metric(name: str) -> None:
    assert f"`{name}" in DOCUMENT.read_text(encoding="utf-8")
