"""The benchmark's section about the queue, end to end on a tiny model, and its tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_hf.benchmarks import queueing
from dspark_hf.benchmarks.tables import all_tables
from dspark_hf.cli.app import app
from evaluation_files import save_target


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("bench")
    save_target(root / "target")
    output = root / "queue.json"
    arguments = (
        "bench", "generate", "--model", root / "target", "--output", output, "--section", "queue",
        "--limit", 1, "--repeats", 1, "--max-new-tokens", 6, "--dtype", "float32",
    )  # fmt: skip
    patch = pytest.MonkeyPatch()
    patch.setattr(queueing, "INTERACTIVE", 3)
    patch.setattr(queueing, "COMPETING", 3)
    # With its defaults it would take what other tests need.
    patch.setattr(queueing, "DEFAULTS_TAKE", float("inf"))
    try:
        result = CliRunner().invoke(app, list(map(str, arguments)))
    finally:
        patch.undo()
    assert result.exit_code == 0, result.output
    held: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return held


@pytest.fixture(scope="module")
def extra(results: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = results["runs"]["queue-float32"]["extra"]
    return found


@pytest.mark.parametrize("mix", queueing.MIXES)
def test_every_way_decodes_the_same_requests_to_the_same_texts(
    extra: dict[str, Any], mix: str
) -> None:
    ways = {entry["way"]: entry for entry in extra["throughput"] if entry["mix"] == mix}
    own = ("dspark queue", "dspark queue, no drafter")
    static = ("hf static batches of 8", "hf static batches of 16")
    assert set(ways) == {"plain, one by one", "hf continuous batching", *static, *own}
    plain = ways["plain, one by one"]
    assert plain["ratio"]["p50"] == 1.0
    for name in (*own, *static):
        assert ways[name]["same_text"] == ways[name]["requests"] == queueing.REQUESTS
        assert ways[name]["tokens"] == plain["tokens"] > queueing.REQUESTS


def test_both_orders_first_tokens_and_overhead_are_timed(extra: dict[str, Any]) -> None:
    assert [entry["order"] for entry in extra["order"]] == ["fifo", "shortest"]
    for entry in extra["order"]:
        assert 0 < entry["mean_s"] <= entry["longest_s"]
    assert [entry["prefill_tokens"] for entry in extra["first_token"]] == [None, 256]
    for entry in extra["first_token"]:
        assert 0 < entry["p50_s"] <= entry["p95_s"]
        assert entry["requests"] == 3
    assert extra["overhead"]["calls"] == 8 * queueing.LEAST_TURNS
    assert extra["overhead"]["ratio"]["p50"] > 0


def test_a_shared_beginning_is_computed_once(extra: dict[str, Any]) -> None:
    apart, shared = extra["beginnings"]
    assert apart["computed_tokens"] == apart["prompt_tokens"] == shared["prompt_tokens"]
    beginning = 16 * 6
    saved = apart["computed_tokens"] - shared["computed_tokens"]
    assert saved >= 15 * beginning
    assert apart["kept_bytes"] == 0
    assert shared["kept_bytes"] > 0


def test_its_tables_hold_what_was_measured(results: dict[str, Any], extra: dict[str, Any]) -> None:
    tables = all_tables(results)
    for name in ("queue", "queue-order", "queue-first-token", "queue-beginnings"):
        (table,) = tables[name]
        assert table is tables[f"{name}-float32"][0]
        assert all(len(row) == len(table.header) for row in table.rows)
    (table,) = tables["queue"]
    assert [row[1] for row in table.rows] == [entry["way"] for entry in extra["throughput"]]
    assert "through the queue takes" in table.markdown()


def test_a_way_that_cannot_run_is_shown_with_its_reason(results: dict[str, Any]) -> None:
    run = json.loads(json.dumps(results["runs"]["queue-float32"]))
    run["extra"]["throughput"].append({"mix": "all", "way": "hf other", "excluded": "needs a GPU"})
    (table,) = all_tables({**results, "runs": {"queue-float32": run}})["queue"]
    assert table.rows[-1] == ["all", "hf other", "-", "-", "-", "-", "needs a GPU"]
