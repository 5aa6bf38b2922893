"""The benchmark's section about sparse attention, end to end on a tiny model; table and plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_hf.attention import policy
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.benchmarks import sparse
from dspark_hf.benchmarks.tables import all_tables
from dspark_hf.cli.app import app
from evaluation_files import save_target

PRESETS = {
    "quality": SparsePolicy(tokens=128, mass=0.9, min_context=0),
    "fast": SparsePolicy(tokens=96, min_context=0),
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    save_target(root / "target")
    found = root / "sparse.json"
    arguments = (
        "bench", "generate", "--model", root / "target", "--output", found, "--section", "sparse",
        "--context", 64, "--context", 256, "--repeats", 1, "--dtype", "float32",
    )  # fmt: skip
    patch = pytest.MonkeyPatch()
    patch.setattr(sparse, "PRESETS", PRESETS)
    patch.setattr(policy, "PRESETS", PRESETS)
    patch.setattr(sparse, "PASSES", 2)
    patch.setattr(sparse, "TEXT_TOKENS", 100)
    try:
        result = CliRunner().invoke(app, list(map(str, arguments)))
    finally:
        patch.undo()
    assert result.exit_code == 0, result.output
    return found


@pytest.fixture(scope="module")
def results(output: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return held


def test_every_case_is_timed_in_every_way(results: dict[str, Any]) -> None:
    steps = results["runs"]["sparse-float32"]["extra"]["steps"]
    cases = {(e["level"], e["context"], e["rows"], e["queries"]) for e in steps}
    assert cases == {
        (level, context, rows, queries)
        for level in ("layer", "model")
        for context in (64, 256)
        for rows in (1, 4)
        for queries in (1, 8)
    }
    for entry in steps:
        ways = {e["way"] for e in steps if all(e[k] == entry[k] for k in ("level", "context"))}
        # A layer below the budget has nothing to leave out.
        sparse_ways = set() if (entry["level"], entry["context"]) == ("layer", 64) else set(PRESETS)
        assert ways == {"hf default", "dspark dense", *sparse_ways}
        assert entry["step_s"]["p50"] > 0
    dense = [e for e in steps if e["way"] == "dspark dense"]
    assert all(e["over_dense"]["p50"] == 1.0 and e["mean_pages"] is None for e in dense)


def test_pages_are_counted_where_they_were_chosen(results: dict[str, Any]) -> None:
    steps = results["runs"]["sparse-float32"]["extra"]["steps"]
    fast = {(e["level"], e["context"]): e for e in steps if e["way"] == "fast" and e["rows"] == 1}
    for level in ("layer", "model"):
        assert 6 <= fast[level, 256]["mean_pages"] <= 8
        assert fast[level, 256]["share"] < 0.6


def test_table_and_plot_show_them(results: dict[str, Any], output: Path, tmp_path: Path) -> None:
    tables = all_tables(results)
    (model,), (layer,) = tables["sparse"], tables["sparse-layer"]
    for table, level in ((model, "model"), (layer, "layer")):
        steps = results["runs"]["sparse-float32"]["extra"]["steps"]
        assert len(table.rows) == sum(e["level"] == level for e in steps)
        assert all(len(row) == len(table.header) for row in table.rows)
    result = CliRunner().invoke(app, ["bench", "plot", str(output), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "sparse-float32.png").stat().st_size > 10_000


def test_self_sparse_drafts_say_what_dense_steps_say(results: dict[str, Any]) -> None:
    (entry,) = results["runs"]["sparse-float32"]["extra"]["self_sparse"]
    assert entry["context"] == 256
    assert entry["same_tokens"] == entry["tokens"] > 0
    assert 1 <= entry["accepted_length"] <= 1 + entry["drafted"]
    assert min(entry["dense_s"], entry["drafted_s"]) > 0
    (table,) = all_tables(results)["self-sparse"]
    assert table.rows[0][0] == "256"
