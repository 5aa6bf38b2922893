"""`bench generate` and `bench table` end to end, on a tiny model with a toy tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import tiny
from dspark_hf.cli.app import app
from dspark_hf.data import load_prompts


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    words = Tokenizer(models.WordLevel(unk_token="?"))  # noqa: S106 - a token of text
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=tiny.VOCAB, special_tokens=["_", "?"])
    words.train_from_iterator([prompt.text for prompt in load_prompts()], trainer)
    special = {"pad_token": "_", "unk_token": "?"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    tiny.llama(max_position_embeddings=512).save_pretrained(folder)
    return folder


def bench(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def measure(folder: Path, output: Path, *options: object) -> dict[str, Any]:
    bench(
        "generate", "--model", folder, "--output", output, "--limit", 1, "--repeats", 1,
        "--max-new-tokens", 8, *options,
    )  # fmt: skip
    return json.loads(output.read_text(encoding="utf-8"))


def names(run: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["contender"] for row in run["rows"]))


def test_every_section_in_both_dtypes_lands_in_one_file(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "generate.json"
    measure(tiny_checkpoint, output, "--dtype", "float32")
    held = measure(tiny_checkpoint, output, "--section", "recheck", "--section", "prompts")
    runs = held["runs"]
    assert sorted(runs) == [
        "batch-float32", "context-float32", "prompts-bfloat16", "prompts-float32",
        "recheck-bfloat16",
    ]  # fmt: skip
    assert names(runs["prompts-float32"]) == ["plain", "hf-lookup", "dspark-none", "dspark-lookup"]
    assert names(runs["batch-float32"]) == ["plain", "dspark-none", "dspark-lookup"]
    assert [row["item"] for row in runs["context-float32"]["rows"]] == [
        "context 256", "context 256", "context 479", "context 479",
    ]  # fmt: skip
    assert names(runs["recheck-bfloat16"])[1:] == [
        "dspark-none", "dspark-lookup", "dspark-lookup-recheck",
    ]  # fmt: skip
    assert runs["recheck-bfloat16"]["extra"]["recheck_over_plain_verify"]["p50"] > 0
    exact = [row for key in runs if key.endswith("float32") for row in runs[key]["rows"]]
    assert all(row["differences"] == [] for row in exact)
    assert {row["new_tokens"] for row in runs["prompts-float32"]["rows"]} == {8}
    assert all(row["wall_s"] > 0 and row["cpu_s"] > 0 for row in exact)
    assert str(tiny_checkpoint.parent) not in output.read_text(encoding="utf-8")


def test_a_drafting_model_is_measured_in_both_loops(tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "generate.json"
    options = ["--dtype", "float32", "--section", "prompts", "--drafter", tiny_checkpoint]
    run = measure(tiny_checkpoint, output, *options)["runs"]["prompts-float32"]
    own = f"dspark:{tiny_checkpoint.name}"
    assert set(names(run)) >= {"hf-assisted", own}
    assert all(row["differences"] == [] for row in run["rows"])
    counts = [row["speculation"] for row in run["rows"] if row["contender"] == own]
    assert [count["path"] for count in counts] == ["flat"] * 4


def test_tables_are_printed_and_written_into_a_document(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    output, document = tmp_path / "generate.json", tmp_path / "README.md"
    measure(tiny_checkpoint, output, "--dtype", "float32", "--section", "prompts")
    printed = bench("table", output)
    assert "## prompts-float32\n" in printed
    assert "| chat | plain |" in printed
    document.write_text("before\n<!-- bench:overview -->\nold\n<!-- /bench -->\nafter\n")
    bench("table", output, "--update", document)
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- bench:overview -->\n| generate() |")
    assert text.endswith("\n<!-- /bench -->\nafter\n")
    assert "old" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--section", "poems"], "section must be one of"),
        (["generate", "--model", "no/such/folder", "--output", "none.json"], "must be the path"),
        (["table", "none.json"], "none.json"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
