"""`dspark-hf generate` with what cannot be honoured: one line that names option and remedy.

Broken files are made of a good checkpoint, one fault each; what reads them raises errors of many
kinds, none of which may reach the user as a traceback.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from dspark_hf.cli.app import app
from training_files import byte_tokenizer, save_target

PROMPT = "tea cup tea cup tea"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_target(tmp_path_factory.mktemp("good")))


@pytest.fixture
def broken(good: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to break."""
    return Path(shutil.copytree(good, tmp_path / "broken"))


def run(model: Path, *options: object, prompts: tuple[str, ...] = (PROMPT,)) -> tuple[int, str]:
    words = ["generate", "--model", model, "--dtype", "float32", "--max-new-tokens", 3]
    words += [word for prompt in prompts for word in ("--prompt", prompt)]
    result = CliRunner().invoke(app, [*map(str, words), *map(str, options)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def refusal(model: Path, *options: object, prompts: tuple[str, ...] = (PROMPT,)) -> str:
    """Return the one line of a command that must be refused."""
    exit_code, output = run(model, *options, prompts=prompts)
    assert exit_code == 2
    assert output.startswith("Error: ")
    assert output.count("\n") == 1
    return output


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("more", [(), ("--seed", 1), ("--compare",)], ids=str)
def test_a_temperature_that_cannot_be_sampled_at_is_refused(
    good: Path, value: str, more: tuple[object, ...]
) -> None:
    line = refusal(good, "--sample", "--temperature", value, *more)
    assert f"--temperature must be a finite number above 0 to sample at; got {value}" in line
    assert "leave --sample out" in line


def test_a_temperature_says_nothing_without_sampling(good: Path) -> None:
    assert run(good, "--temperature", 0)[0] == run(good, "--sample", "--temperature", 1e-6)[0] == 0


@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_a_number_of_tokens_below_one_is_refused(good: Path, value: str) -> None:
    exit_code, output = run(good, "--max-new-tokens", value)
    assert exit_code == 2
    assert "Invalid value for '--max-new-tokens'" in output


@pytest.mark.parametrize("place", ["", ".", "file/page.html"])
def test_a_page_that_cannot_be_written_is_refused_before_the_model_loads(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a folder", encoding="utf-8")
    line = refusal(Path("no-such-model"), "--trace", place)
    assert "--trace must be a file that can be written" in line
    assert "Name another file" in line


@pytest.mark.parametrize("compare", [(), ("--compare",)], ids=str)
@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (("",), "input_ids must hold at least one token per row"),
        (("", "a b"), r"rows [0] have none"),
    ],
    ids=["alone", "in a batch"],
)
def test_a_prompt_of_no_tokens_is_refused(
    good: Path, prompts: tuple[str, ...], words: str, compare: tuple[str, ...]
) -> None:
    assert words in refusal(good, "--no-chat", *compare, prompts=prompts)


@pytest.mark.parametrize("compare", [(), ("--compare",)], ids=str)
def test_prompts_the_model_has_no_room_for_are_refused(
    tmp_path: Path, compare: tuple[str, ...]
) -> None:
    model = tiny.gpt2()
    model.resize_token_embeddings(258)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    line = refusal(tmp_path, *compare, prompts=("tea " * 100,))
    assert "a prompt must fit the model's 256 learned positions" in line


@pytest.mark.parametrize("compare", [(), ("--compare",)], ids=str)
def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, compare: tuple[str, ...]) -> None:
    tiny.llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    line = refusal(tmp_path, *compare, prompts=("é",))
    assert "input_ids must lie in 0..159" in line


def _change(path: Path, **values: Any) -> None:
    held = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**held, **values}), encoding="utf-8")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "model_type"),
    "half a config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "a list as config": (lambda f: (f / "config.json").write_text("[]"), "mapping"),
    "unknown kind": (lambda f: _change(f / "config.json", model_type="odd"), "odd"),
    "no causal LM": (lambda f: _change(f / "config.json", model_type="t5"), "AutoModelForCausalLM"),
    "text for a size": (lambda f: _change(f / "config.json", hidden_size="big"), "hidden_size"),
    "other heads": (lambda f: _change(f / "config.json", num_key_value_heads=4), "k_proj"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "half the weights": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-9]
        ),
        "SafetensorError",
    ),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "SafetensorError"),
    "junk for weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin").write_bytes(b"junk"),
        "unpack",
    ),
    "no tokenizer": (
        lambda f: [(f / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        "tokenizer",
    ),
    "an empty tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "KeyError"),
    "half a tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "double quotes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_be_read_is_refused_with_the_reason(broken: Path, fault: str) -> None:
    damage, word = FAULTS[fault]
    damage(broken)
    line = refusal(broken)
    assert line.startswith("Error: model must ")
    assert str(broken) in line
    assert word in line.replace(str(broken), "")


def test_weights_of_other_shapes_are_named_with_both(broken: Path) -> None:
    _change(broken / "config.json", num_key_value_heads=4)
    line = refusal(broken)
    assert "model.layers.0.self_attn.k_proj.weight" in line
    assert "is (16, 32), not (32, 32)" in line


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no system turn') }}"])
def test_a_chat_template_that_fails_is_refused_and_may_be_left_out(
    broken: Path, template: str
) -> None:
    (broken / "chat_template.jinja").write_text(template, encoding="utf-8")
    line = refusal(broken)
    assert "--chat needs a chat template" in line
    assert "Use --no-chat" in line
    assert run(broken, "--no-chat")[0] == 0


def test_a_batch_without_any_token_to_pad_with_is_refused(broken: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(broken)
    line = refusal(broken, prompts=("tea", "a cup of tea"))
    assert "got 2 prompts" in line
    assert "one prompt at a time" in line
    assert run(broken)[0] == 0
