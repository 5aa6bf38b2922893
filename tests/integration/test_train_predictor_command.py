"""`dspark-hf train predictor` from a target to a file that sparse attention and its drift use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiny
from dspark_hf import DSparkForCausalLM
from dspark_hf.attention.learned import AttentionShape, LearnedPredictor
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.cli.app import app
from harness import generate
from training_files import byte_llama, save_target, write_jsonl

TEXT = "".join(
    f"It was day {day} of the month, and clocks struck {day % 13}; " for day in range(40)
)
QUICK = [
    "--windows", 2, "--context", 256, "--queries", 6, "--rank", 4, "--steps", 60,
    "--learning-rate", 1e-2, "--dtype", "float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def run(*words: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, (result.output, result.exception)
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def trained(target: str, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A predictor's file and what the command said."""
    out = tmp_path_factory.mktemp("out") / "new" / "pages.safetensors"
    return out, run("train", "predictor", "--target", target, "--data", text, "--out", out, *QUICK)


def test_a_predictor_is_written_told_of_and_fits_its_target(trained: tuple[Path, str]) -> None:
    path, printed = trained
    predictor = LearnedPredictor.load(path)
    assert predictor.shape == AttentionShape.of(byte_llama())
    assert predictor.rank == 4
    assert predictor.gates
    learned = sum(bool(gate.page.any()) for gate in predictor.gates.values())
    assert learned > 0
    assert f"{learned} of 3 layers choose better pages" in printed
    assert str(path) in printed
    assert "captured by 6 pages per key head in the second half of 1 held-out windows" in printed


def test_generate_reads_by_it(trained: tuple[Path, str], target: str) -> None:
    predictor = LearnedPredictor.load(trained[0])
    model = DSparkForCausalLM.from_pretrained(target, drafter=None, dtype=torch.float32)
    prompt = tiny.prompt(200, seed=3)
    policy = SparsePolicy(tokens=96, min_context=0, predictor=predictor)
    with model.dspark.sparse_attention(policy) as stats:
        generate(model, [prompt], max_new_tokens=8)
    assert stats.calls == 3 * 7
    assert stats.share < 1
    everything = SparsePolicy(tokens=4096, min_context=0, predictor=predictor)
    dense = tiny.plain_generate(byte_llama(), [prompt], max_new_tokens=8)
    with model.dspark.sparse_attention(everything):
        out = generate(model, [prompt], max_new_tokens=8)
    assert torch.equal(out.sequences, dense)


def test_its_drift_is_measured_beside_the_bounds(
    trained: tuple[Path, str], target: str, text: Path, tmp_path: Path
) -> None:
    held: dict[str, Any] = {}
    for name in ("bound", "quest", "recent", str(trained[0])):
        out = tmp_path / "drift.json"
        run(
            "eval", "perplexity", target, "--data", text, "--policy", "fast", "--tokens", 96,
            "--predictor", name, "--context", 256, "--scored", 30, "--dtype", "float32",
            "--json", out,
        )  # fmt: skip
        held[name] = json.loads(out.read_text(encoding="utf-8"))
        assert held[name]["predictor"] == Path(name).name
    assert len({each["drift"][0]["ppl_sparse"] for each in held.values()}) == 4
    assert len({each["drift"][0]["ppl_dense"] for each in held.values()}) == 1


@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
def test_texts_may_come_in_rows(kind: str, target: str, text: Path, tmp_path: Path) -> None:
    """Rows of 300 letters, one behind the other, are the text they were cut from."""
    rows = [{"text": TEXT[i : i + 300]} for i in range(0, len(TEXT), 300)]
    if kind == "jsonl":
        data = write_jsonl(tmp_path / "texts.jsonl", rows)
    else:
        datasets = pytest.importorskip("datasets")
        data = tmp_path / "data"
        datasets.Dataset.from_list(rows).save_to_disk(data)
    quick = ["--windows", 1, "--context", 256, "--queries", 2, "--steps", 20, "--dtype", "float32"]
    files = []
    for source in (data, text):
        files.append(tmp_path / f"{len(files)}.safetensors")
        run("train", "predictor", "--target", target, "--data", source, "--out", files[-1], *quick)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--windows", 50], "data must hold 74 windows"),
        (["--context", 8192], "context must be at most the model's 4096 positions"),
        (["--queries", 0], "queries must be at least 1"),
        (["--target", "no/such/folder"], "model must be the path or hub id"),
        (["--data", "none.jsonl"], "must be a file that exists"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_ends_in_one_line(
    options: list[object], words: str, target: str, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.safetensors"
    given = ["--target", target, "--data", text, "--out", out, *QUICK, *options]
    assert words in run("train", "predictor", *given, exit_code=2)
    assert not out.exists()


def test_options_before_the_name_are_not_swallowed(target: str, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    words = ["train", "--seed", 3, "predictor", "--target", target, "--out", out]
    printed = run(*words, exit_code=2)
    assert "options of `train predictor` must come behind its name; got ['seed']" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--predictor", "qest"], "predictor must be one of"),
        (["--predictor", "recent"], "--predictor recent must come with --policy fast"),
        (["--predictor", "bound", "--policy", "none"], "--predictor and another --policy need"),
    ],
    ids=str,
)
def test_predictors_that_do_not_fit_are_refused(
    options: list[object], words: str, target: str
) -> None:
    assert words in run("eval", "perplexity", target, *options, exit_code=2)


def test_another_models_predictor_is_refused(target: str, text: Path, tmp_path: Path) -> None:
    shape = AttentionShape(5, 4, 2, 8)
    path = LearnedPredictor(shape, 4, {}).save(tmp_path / "other.safetensors")
    printed = run(
        "eval", "perplexity", target, "--data", text, "--predictor", path, "--policy", "fast",
        "--tokens", 96, "--context", 256, "--scored", 10, "--dtype", "float32", exit_code=2,
    )  # fmt: skip
    assert f"{shape}; " in printed
    assert "Train one for it: dspark-hf train predictor." in printed
