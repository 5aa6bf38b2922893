"""`dspark-hf convert` says what it found and what it wrote, and ends in one line otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from checkpoint_files import GOLDEN, drafter_of, golden_tensors
from dspark_hf.cli.app import app
from dspark_hf.drafting.checkpoints.load import load_checkpoint


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def error_of(result: Result) -> str:
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.output
    return lines[0]


def test_convert_there_and_back_keeps_every_tensor(tmp_path: Path) -> None:
    there = run(drafter_of("rnn_b4"), tmp_path / "there", "--to", "speculators")
    assert there.exit_code == 0, there.output
    for fact in ("deepspec-dspark", "0, 1, 4 of 6", "4 rows, 4 drafts", "rnn, rank 16", "64,545"):
        assert fact in there.output
    assert f"wrote {tmp_path / 'there' / 'config.json'}" in there.output
    back = run(tmp_path / "there", tmp_path / "back", "--to", "deepspec")
    assert back.exit_code == 0, back.output
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(written[k], v) for k, v in golden_tensors("rnn_b4").items())


def test_convert_copies_embedding_and_head_from_the_target(tmp_path: Path) -> None:
    target = GOLDEN / "speculators_pruned_b5" / "target"
    source = drafter_of("speculators_rnn_maskfill_b6")
    result = run(source, tmp_path / "out", "--to", "speculators", "--target", target)
    assert result.exit_code == 0, result.output
    assert "embedding and head" in result.output
    made = load_checkpoint(tmp_path / "out")
    assert made.spec.num_target_layers == 6
    assert made.embed is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("speculators_pruned_b5", ["--to", "deepspec"], "draft vocabulary of 96"),
        ("vanilla_b5", ["--to", "gguf"], "--to must be one of"),
        ("vanilla_b5", ["--to", "deepspec", "--target", "/no/target"], "'/no/target' is no folder"),
    ],
)
def test_convert_ends_in_one_line_that_says_why(
    name: str, options: list[str], message: str, tmp_path: Path
) -> None:
    assert message in error_of(run(drafter_of(name), tmp_path / "out", *options))
    assert not (tmp_path / "out").exists()


def test_convert_refuses_an_ordinary_model_and_a_used_folder(tmp_path: Path) -> None:
    model = GOLDEN / "vanilla_b5" / "target"
    message = error_of(run(model, tmp_path / "out", "--to", "speculators"))
    assert "ordinary config.json" in message
    (tmp_path / "note.txt").write_text("mine")
    message = error_of(run(drafter_of("vanilla_b5"), tmp_path, "--to", "speculators"))
    assert "new or empty folder" in message
