"""`eval acceptance`, `eval table` and `calibrate` on a tiny target with a drafter on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_hf import DSparkForCausalLM
from dspark_hf.cli.app import app
from dspark_hf.data import load_prompts
from dspark_hf.verification.scaling import Scalings
from evaluation_files import save_drafter, save_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("eval")
    model, tokenizer = save_target(root / "target")
    taught = save_drafter(model, tokenizer, root / "taught")
    return root / "target", taught, save_drafter(model, tokenizer, root / "headless", "none")


@pytest.fixture(scope="module")
def evaluated(
    folders: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    target, taught, headless = folders
    out = tmp_path_factory.mktemp("out")
    printed = run(
        "eval", "acceptance", target, "--drafter", taught, "--against", "lookup", "--against",
        headless, "--out", out, "--limit", 2, "--max-new-tokens", 20, "--dtype", "float32",
        "--no-plots",
    )  # fmt: skip
    return out / "acceptance.json", printed


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def only_run(path: Path) -> dict[str, Any]:
    held = json.loads(path.read_text(encoding="utf-8"))
    assert held["machine"]["cores"] >= 1
    return held["runs"]["acceptance-float32"]


def test_an_evaluation_holds_every_figure_of_one_pass(evaluated: tuple[Path, str]) -> None:
    measured = only_run(evaluated[0])
    assert [(e["temperature"], e["group"]) for e in measured["groups"]] == [
        (t, g) for t in (0.0, 1.0) for g in ("chat", "code", "maths", "rewrite", "all")
    ]  # fmt: skip
    total = measured["groups"][4]
    assert total["prompts"] == 8
    assert total["accepted"] > 0
    assert total["new_tokens"] == 8 * 20
    assert total["accepted_length"] == pytest.approx(
        (total["new_tokens"] - 8) / total["rounds"], abs=1e-4
    )
    assert len(total["positions"]) == len(total["depth"]) == measured["num_drafts"] == 5
    assert total["depth"][-1]["accepted_length"] >= total["depth"][0]["accepted_length"]
    calibration = measured["calibration"]
    assert len(calibration["groups"][-1]["scaling"]["shifts"]) == 5
    assert len(calibration["groups"][-1]["thresholds"]) == 20
    assert {row["drafter"] for row in measured["rows"]} == {"taught", "lookup", "headless"}
    own = [r for r in measured["rows"] if r["drafter"] == "taught" and r["temperature"] == 0]
    assert sum(row["accepted"] for row in own) == total["accepted"]
    shipped = {prompt.id for prompt in load_prompts()}
    assert {row["prompt"] for row in own} < shipped


def test_drafters_are_compared_on_the_same_prompts(evaluated: tuple[Path, str]) -> None:
    measured = only_run(evaluated[0])
    for entries in measured["against"].values():
        assert [e["group"] for e in entries] == [e["group"] for e in measured["groups"]]
    # A greedy text is the target's, whoever drafts.
    lookup = measured["against"]["lookup"]
    assert lookup[4]["new_tokens"] == measured["groups"][4]["new_tokens"]
    assert "d64" not in evaluated[1]
    assert "taught against others" in evaluated[1]


def test_paths_of_the_machine_are_not_in_the_file(
    evaluated: tuple[Path, str], folders: tuple[Path, Path, Path]
) -> None:
    assert str(folders[0].parent) not in evaluated[0].read_text(encoding="utf-8")


def test_tables_are_printed_and_fill_a_document(
    evaluated: tuple[Path, str], tmp_path: Path
) -> None:
    printed = run("eval", "table", evaluated[0])
    for name in ("acceptance", "positions", "depth", "calibration", "threshold", "against"):
        assert f"## {name}\n" in printed
    card = tmp_path / "README.md"
    card.write_text("<!-- eval:against -->\nold\n<!-- /eval -->\n<!-- bench:x --><!-- /bench -->\n")
    run("eval", "table", evaluated[0], "--update", card)
    text = card.read_text(encoding="utf-8")
    assert "| chat | lookup | greedy |" in text
    assert "old" not in text
    assert text.endswith("<!-- bench:x --><!-- /bench -->\n")


def test_calibrating_writes_what_the_drafter_then_uses(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    target, taught, _ = folders
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": p.text, "id": p.id}) + "\n" for p in load_prompts()[:24:3])
    )
    run(
        "calibrate", target, "--drafter", taught, "--prompts", prompts, "--max-new-tokens", 16,
        "--dtype", "float32", "--temperature", 0,
    )  # fmt: skip
    stored = json.loads((taught / "calibration.json").read_text())
    try:
        assert stored["num_prompts"] == 8
        assert stored["sampling"] == [0.0]
        model = DSparkForCausalLM.from_pretrained(str(target), drafter=str(taught))
        assert model.dspark.drafter.scalings == Scalings.from_dict(stored)
        out = tmp_path / "out"
        run(
            "eval", "acceptance", target, "--drafter", taught, "--out", out, "--limit", 1,
            "--max-new-tokens", 8, "--temperature", 0, "--dtype", "float32", "--no-plots",
        )  # fmt: skip
        measured = only_run(out / "acceptance.json")["calibration"]
        assert measured["source"] == "stored with the drafter"
        scaling = measured["groups"][0]["scaling"]
        assert scaling["temperatures"] == stored["greedy"]["temperatures"]
    finally:
        (taught / "calibration.json").unlink()


def test_a_trace_is_written_as_a_page(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, taught, _ = folders
    page = tmp_path / "trace.html"
    command = (
        "generate", "--model", target, "--drafter", taught, "--prompt", "list the <b>", "--prompt",
        "count", "--max-new-tokens", 8, "--dtype", "float32", "--trace",
    )  # fmt: skip
    printed = run(*command, page)
    assert "Every round is in" in printed
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "drafter taught" in text
    assert str(target.parent) not in text
    assert text.count("<h2>") == 2
    assert "the target's own token" in run(*command, "-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "TARGET", "--drafter", "lookup"], "--out must name a file"),
        (["calibrate", "TARGET", "--drafter", "lookup", "--out", "x.json"], "block drafter"),
        (["calibrate", "TARGET", "--drafter", "HEADLESS", "--prompts", "none"], "readable JSONL"),
        (["eval", "acceptance", "TARGET", "--drafter", "none", "--out", "x"], "name one to eval"),
        (["eval", "table", "none.json"], "none.json"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(
    folders: tuple[Path, Path, Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    names = {"TARGET": str(folders[0]), "HEADLESS": str(folders[2])}
    result = CliRunner().invoke(app, [names.get(argument, argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
