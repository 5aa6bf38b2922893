"""`dspark-hf train` from texts to a drafter that decodes, resumed and over two processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import tiny
from dspark_hf import DSparkForCausalLM
from dspark_hf.cli.app import app
from dspark_hf.drafting.checkpoints.load import load_checkpoint
from dspark_hf.training.data import Text
from dspark_hf.training.finish import write_card
from training_files import byte_llama, save_target, text_file, write_jsonl

HERE = Path(__file__).parents[1]
QUICK = [
    "--layers", "1", "--block-size", "4", "--markov-rank", "8", "--steps", "4", "--batch-size",
    "2", "--anchors", "8", "--warmup-steps", "2", "--validate-every", "2", "--save-every", "1",
    "--top-k", "8", "--dtype", "float32", "--validation-share", "0.2",
]  # fmt: skip
WRITTEN = [
    "--tokens", "150", "--answer-tokens", "12", "--question-tokens", "6", "--rows", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts to calibrate on, few and short."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return str(write_jsonl(path, [{"prompt": text} for text in ("abc", "once", "two", "three")]))


def check_card_follows_calibration(folder):
    """Calibrated anew, a drafter gets a card that tells of it; without a log there is no card."""
    path = folder / "calibration.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "num_prompts": 12345}))
    assert write_card(folder)
    assert "rounds of 12345 prompts" in (folder / "README.md").read_text()
    path.write_text(json.dumps(values))
    assert write_card(folder)
    (folder / "train_log.jsonl").rename(folder / "log")
    assert not write_card(folder)
    (folder / "log").rename(folder / "train_log.jsonl")


def invoke(*args, exit_code=0):
    result = CliRunner().invoke(app, ["train", *map(str, args)], env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


def test_from_nothing_but_a_target_to_a_drafter_with_its_card(target, prompts, tmp_path):
    out = tmp_path / "run"
    command = [
        "--target", target, "--out", out, *QUICK, *WRITTEN, "--draft-vocab-size", "120",
        "--calibration-prompts", prompts, "--calibration-tokens", "24", "--base-model", "o/t",
        "--license", "apache-2.0",
    ]  # fmt: skip
    output = invoke(*command)
    folder = out / "drafter"
    assert str(folder) in output
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "calibration.json", "config.json", "model.safetensors", "target.json",
        "train_log.jsonl", "training.json",
    }  # fmt: skip
    checkpoint = load_checkpoint(folder)
    assert checkpoint.kind == "speculators-dspark"
    assert checkpoint.embed is None
    assert checkpoint.head is None
    assert len(checkpoint.d2t) == 120
    assert all(tensor.dtype == torch.bfloat16 for tensor in checkpoint.tensors.values())
    assert len(checkpoint.calibration["sampled"]["temperatures"]) == 4
    check_card(folder, command)
    check_card_follows_calibration(folder)
    check_card(folder, command)
    check_decoding(target, folder)
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    log = (out / "train_log.jsonl").read_text()
    invoke(*command)
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before
    assert (out / "train_log.jsonl").read_text() == log
    check_going_on(target, out, tmp_path / "on")


def check_going_on(target, earlier, out):
    """A run that goes on from that drafter tells so, and how that one was made."""
    texts = earlier / "texts.jsonl"
    invoke(
        "--target", target, "--out", out, *QUICK, "--data", texts, "--no-calibrate",
        "--from-drafter", earlier / "drafter",
    )  # fmt: skip
    facts = json.loads((out / "drafter" / "training.json").read_text())
    first = json.loads((earlier / "drafter" / "training.json").read_text())
    assert facts["earlier"] == [
        {
            "command": first["command"], "steps": first["settings"]["steps"],
            "texts": first["texts"]["texts"], "tokens": first["texts"]["tokens"],
        }
    ]  # fmt: skip
    card = (out / "drafter" / "README.md").read_text()
    assert first["command"] in card
    assert "went on from a drafter that was trained before" in card
    assert str(out.parent) not in card


def check_card(folder, command):
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "o/t"
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "dspark-hf"
    last = json.loads((folder / "train_log.jsonl").read_text().splitlines()[-1])
    facts = json.loads((folder / "training.json").read_text())
    for number in (
        f"{last['expected_length_sampled']:.2f}", f"{last['acceptance_greedy'][0]:.3f}",
        f"{facts['run']['parameters']:,}", f"{facts['texts']['tokens']:,}",
        f"{last['tokens_per_s']:g}", f"{last['peak_memory_bytes'] / 2**30:.2f} GiB",
    ):  # fmt: skip
        assert number in card.content
    assert facts["command"].startswith("dspark-hf train --target .../")
    assert "--draft-vocab-size 120" in card.content
    # No path of this machine.
    assert str(command[1]) not in card.content


def check_decoding(target, folder):
    model = DSparkForCausalLM.from_pretrained(target, drafter=str(folder), dtype=torch.float32)
    prompt = tiny.prompt(5)
    out = tiny.plain_generate(model, [prompt], max_new_tokens=12)
    assert torch.equal(out, tiny.plain_generate(byte_llama(), [prompt], max_new_tokens=12))


def test_prompts_of_a_dataset_are_answered_and_settings_come_from_a_file(target, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"count to {n}"} for n in range(9)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    config = tmp_path / "train.yaml"
    config.write_text(
        f"target: {target}\ndata: {tmp_path / 'data'}:train\nanswer-tokens: 8\nlayers: 2\n"
        "precision: bf16\nlayout: deepspec\n"
    )
    out = tmp_path / "run"
    invoke("--config", config, "--out", out, "--no-calibrate", *QUICK)
    checkpoint = load_checkpoint(out / "drafter")
    assert checkpoint.spec.num_layers == 1
    assert checkpoint.kind == "deepspec-dspark"
    assert torch.equal(
        checkpoint.embed.float(), byte_llama().get_input_embeddings().weight.detach()
    )
    assert "Not calibrated." in (out / "drafter" / "README.md").read_text()
    assert len((out / "texts.jsonl").read_text().splitlines()) == 9


def test_steps_follow_from_tokens(target, tmp_path):
    texts = text_file(tmp_path / "t.jsonl", [Text(tuple(tiny.prompt(10, seed=i)), 2)
                                             for i in range(8)])  # fmt: skip
    quick = [word if word != "--steps" else "--train-tokens" for word in QUICK]
    quick[quick.index("--train-tokens") + 1] = "100"
    invoke("--target", target, "--data", texts, "--out", tmp_path / "o", *quick, "--no-calibrate")
    run = json.loads((tmp_path / "o" / "run.json").read_text())
    assert run["settings"]["steps"] == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--data", "none.jsonl"], "must be a file that exists"), ([], "tokens must say how much"),
     (["--tokens", "9", "--precision", "fp8"], "precision"),
     (["--tokens", "9", "--taps", "7"], "between -1 and 1"),
     (["--tokens", "9", "--head", "lstm"], "'lstm'"),
     (["--tokens", "9", "--target", "no/such/folder"], "target must be")],
)  # fmt: skip
def test_what_cannot_be_done_ends_in_one_line(target, tmp_path, args, message):
    output = invoke("--target", target, "--out", tmp_path, "--answer-tokens", 8, *args, exit_code=2)
    assert message in output
    assert output.count("\n") <= 2


def start(arguments, launcher=()):
    words = [*launcher, "-m", "dspark_hf.cli.app", "train", *map(str, arguments)]
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1",
             "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_a_killed_command_is_continued_by_itself(target, tmp_path):
    """SIGKILL while it trains; the same command ends in the weights of an unbroken one."""
    texts = text_file(tmp_path / "t.jsonl", [Text(tuple(tiny.prompt(12, seed=i)), 2)
                                             for i in range(10)])  # fmt: skip
    long = [*QUICK, "--no-calibrate"]
    long[long.index("--steps") + 1] = "60"
    common = ["--target", target, "--data", texts, *long]
    process = start([*common, "--out", tmp_path / "killed"])
    for line in process.stdout:
        if line.startswith("step 10:"):
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait(60) == -signal.SIGKILL
    state = torch.load(tmp_path / "killed" / "state.pt", weights_only=True)
    assert 9 <= state["step"] < 60
    for out in ("killed", "whole"):
        invoke(*common, "--out", tmp_path / out)
    first, second = (
        torch.load(tmp_path / out / "state.pt", weights_only=True)["model"]
        for out in ("killed", "whole")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_processes_average_their_gradients_and_write_one_result(target, tmp_path):
    """Texts of one length with all their anchors: the mean of two halves is the whole's."""
    texts = text_file(tmp_path / "t.jsonl", [Text(tuple(tiny.prompt(11, seed=i)), 2)
                                             for i in range(10)])  # fmt: skip
    common = ["--target", target, "--data", texts, "--no-calibrate", *QUICK]
    invoke(*common, "--out", tmp_path / "one")
    common[common.index("--batch-size") + 1] = "1"
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
                str(free_port())]  # fmt: skip
    process = start([*common, "--out", tmp_path / "two"], launcher)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert output.count("The drafter is in") == 1
    one, two = (
        torch.load(tmp_path / out / "state.pt", weights_only=True) for out in ("one", "two")
    )
    assert one["tokens"] == two["tokens"]
    # Adam's first steps turn a rounding error of a tiny gradient into a whole step.
    close = [torch.isclose(t, two["model"][n], atol=1e-4) for n, t in one["model"].items()]
    assert sum(int(c.sum()) for c in close) / sum(c.numel() for c in close) > 0.999
