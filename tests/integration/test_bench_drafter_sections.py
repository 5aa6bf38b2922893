"""The benchmark's sections about a drafter: scheduling, drafter and never-slower, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_hf.benchmarks import bench, scheduling, unlike
from dspark_hf.benchmarks.stats import Sample
from dspark_hf.benchmarks.unlike_prompts import KINDS, LONGEST, unlike_prompts
from dspark_hf.cli.app import app
from evaluation_files import save_drafter, save_target


@pytest.fixture(scope="module")
def tokenizer_and_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    root = tmp_path_factory.mktemp("bench")
    model, tokenizer = save_target(root / "target")
    drafter = save_drafter(model, tokenizer, root / "taught")
    output = root / "generate.json"
    patch = pytest.MonkeyPatch()
    patch.setattr(scheduling, "SPLIT_PASSES", 2)
    patch.setattr(bench, "WARM_UP_CALLS", 1)
    patch.setattr(bench, "WARM_UP_TOKENS", 2)
    try:
        run(
            "generate", "--model", root / "target", "--drafter", drafter, "--output", output,
            "--section", "scheduling", "--section", "drafter", "--section", "never-slower",
            "--limit", 1, "--repeats", 1, "--max-new-tokens", 6, "--dtype", "float32", "--rows", 1,
            "--rows", 3,
        )  # fmt: skip
    finally:
        patch.undo()
    return tokenizer, output


@pytest.fixture(scope="module")
def runs(tokenizer_and_results: tuple[Any, Path]) -> dict[str, Any]:
    return json.loads(tokenizer_and_results[1].read_text(encoding="utf-8"))["runs"]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def names(measured: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["contender"] for row in measured["rows"]))


def groups(measured: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(summary["group"] for summary in measured["summary"]))


def test_every_schedule_and_fixed_length_takes_its_turn_at_every_size(runs: dict[str, Any]) -> None:
    measured = runs["scheduling-float32"]
    assert groups(measured) == ["1 row", "3 rows"]
    assert sorted(names(measured)) == sorted(
        ["plain", "auto", "budget", "prefix", "threshold", *(f"fixed-{n}" for n in range(1, 6))]
    )
    assert all(row["differences"] == [] for row in measured["rows"])
    by_name = {(s["group"], s["contender"]): s for s in measured["summary"]}
    for length in range(1, 6):
        counts = by_name["3 rows", f"fixed-{length}"]
        assert counts["verified"] <= length * counts["rounds"]
    assert by_name["3 rows", "fixed-1"]["verified"] < by_name["3 rows", "fixed-5"]["verified"]


def test_splits_of_the_same_tokens_are_timed_in_the_same_passes(runs: dict[str, Any]) -> None:
    splits = runs["scheduling-float32"]["extra"]["splits"]
    assert [split["lengths"] for split in splits] == [list(split) for split in scheduling.SPLITS]
    assert {sum(split["lengths"]) for split in splits} == {7}
    assert splits[0]["ratio"]["p50"] == 1
    assert all(split["step_s"]["p50"] > 0 for split in splits)


def test_a_drafter_is_measured_greedily_and_sampled(runs: dict[str, Any]) -> None:
    measured = runs["drafter-float32"]
    assert groups(measured) == [
        f"{group}, {how}" for how in ("greedy", "T = 1") for group in ("chat", "code", "maths")
    ]
    assert set(names(measured)) == {"plain", "dspark-lookup", "dspark:taught"}
    assert all(row["differences"] == [] for row in measured["rows"])
    greedy = [s for s in measured["summary"] if s["contender"] == "dspark:taught"]
    assert all(s["accepted_length"] >= 1 and s["ratio"]["p50"] > 0 for s in greedy)


def test_speeds_are_pooled_by_kind_of_prompt(runs: dict[str, Any]) -> None:
    measured = runs["never-slower-float32"]
    kinds = [kind for kind, _ in KINDS]
    assert groups(measured) == [*kinds, "all"]
    assert [entry["group"] for entry in measured["extra"]["pooled"]] == [*kinds, "all"]


def test_pooling_weighs_prompts_by_their_seconds() -> None:
    def call(item: str, contender: str, seconds: float, tokens: int) -> Sample:
        return Sample(item, "g", contender, 0, 0, seconds, seconds, 3, tokens)

    samples = [
        call("a", "plain", 1.0, 10), call("b", "plain", 9.0, 90),
        call("a", "mine", 2.0, 10), call("b", "mine", 3.0, 90),
    ]  # fmt: skip
    entry = unlike.pooled_ratios(samples)[0]
    assert (entry["ratio"], entry["share_slower"]) == (2.0, 0.5)


def test_unlike_prompts_repeat_by_seed_and_differ_otherwise(
    tokenizer_and_results: tuple[Any, Path],
) -> None:
    tokenizer = tokenizer_and_results[0]
    prompts = unlike_prompts(tokenizer, 200)
    assert prompts == unlike_prompts(tokenizer, 200)
    assert prompts != unlike_prompts(tokenizer, 200, seed=1)
    assert len({name for name, _, _ in prompts}) == 200
    assert {kind for _, kind, _ in prompts} == {kind for kind, _ in KINDS}
    special = set(tokenizer.all_special_ids)
    for _, kind, ids in prompts:
        assert 1 <= len(ids) <= LONGEST
        assert kind != "random" or special.isdisjoint(ids)


def test_tables_and_the_plot_show_the_sections(
    tokenizer_and_results: tuple[Any, Path], tmp_path: Path
) -> None:
    printed = run("table", tokenizer_and_results[1])
    for key in ("scheduling", "split", "drafter", "never-slower"):
        assert f"## {key}-float32\n" in printed
    assert "verified drafts per row and round" in printed
    assert "| 7 0 0 0 0 0 0 0 |" in printed
    pytest.importorskip("matplotlib")
    run("plot", tokenizer_and_results[1], "--out", tmp_path)
    assert (tmp_path / "scheduling-float32.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--section", "scheduling"], "measures a drafter; got none"),
        (["--section", "drafter"], "measures a drafter; got none"),
        (["--rows", "0"], "rows must be one or more batch sizes"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "generate", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
