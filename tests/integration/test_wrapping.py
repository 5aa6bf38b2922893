"""Wrapping a model changes how it generates and nothing else; unwrapping leaves no trace.

Also what is done to models besides generating: saving, copying, pickling, moving, casting, and
using one from several threads, or several in one process.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from drafters import RandomDrafter
from dspark_hf import DSparkConfig, DSparkForCausalLM
from harness import (
    CONFIG,
    KNOWS_NOTHING,
    Recorder,
    drafts_were_verified,
    generate,
    noisy_copy,
    paths,
    wrapped,
)
from tiny import ARCHITECTURES, VOCAB, left_padded, llama, plain_generate, prompt

NEW_TOKENS = 12
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return plain_generate(llama(), PROMPTS, max_new_tokens=NEW_TOKENS).tolist()


@pytest.fixture
def model() -> PreTrainedModel:
    return llama()


def new_text(model: PreTrainedModel) -> Any:
    """Return the text of the prompts, checked to come from this package's loop."""
    out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert paths(out) == {"flat"}
    assert drafts_were_verified(out)
    return out.sequences.tolist()


def test_a_wrapped_model_is_of_both_classes_under_its_own_name(model: PreTrainedModel) -> None:
    assert DSparkForCausalLM.wrap(model) is model
    assert isinstance(model, DSparkForCausalLM)
    assert isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert type(model).__module__ == LlamaForCausalLM.__module__
    assert type(model) is type(DSparkForCausalLM.wrap(llama(6)))
    assert not isinstance(llama(), DSparkForCausalLM)


def test_a_wrapped_model_generates_the_plain_text(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB), config=CONFIG)
    assert new_text(model) == plain


def test_wrapping_again_replaces_drafter_and_settings(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    with wrapped(model, "lookup"):
        first_class = type(model)
        second, settings = RandomDrafter(VOCAB), DSparkConfig(max_draft_tokens=2, schedule="fixed")
        DSparkForCausalLM.wrap(model, drafter=second, config=settings)
        assert type(model) is first_class
        assert model.dspark.drafter is second
        assert model.dspark.config is settings
        out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
        assert out.sequences.tolist() == plain
        assert all(record.drafted <= 2 * record.rounds for record in out.speculation)
        assert model.dspark.metrics.rows == 3


def test_unwrapping_restores_class_attributes_hooks_and_attention(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    before = set(vars(model))
    hooks = {name: len(vars(model)[name]) for name in before if name.endswith("_hooks")}
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB), config=CONFIG)
    assert new_text(model) == plain
    assert DSparkForCausalLM.unwrap(model) is model
    assert type(model) is LlamaForCausalLM
    assert set(vars(model)) == before
    assert {name: len(vars(model)[name]) for name in hooks} == hooks
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation_config
    assert model.config._attn_implementation == "sdpa"
    assert plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS).tolist() == plain


def test_unwrapping_a_plain_model_changes_nothing(model: PreTrainedModel) -> None:
    assert DSparkForCausalLM.unwrap(model) is model
    assert type(model) is LlamaForCausalLM


def test_wrapping_adds_no_weights_and_no_modules(model: PreTrainedModel) -> None:
    names, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    DSparkForCausalLM.wrap(model, drafter=noisy_copy(model))
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
def test_a_saved_model_loads_as_a_plain_one_with_the_same_weights(
    name: str, tmp_path: Path
) -> None:
    model = ARCHITECTURES[name]()
    expected = plain_generate(model, PROMPTS[:1], max_new_tokens=4).tolist()
    with wrapped(model, noisy_copy(model)):
        generate(model, PROMPTS[:1], max_new_tokens=4)
        model.save_pretrained(tmp_path)
        weights = {key: value.clone() for key, value in model.state_dict().items()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.architectures == [type(model).__name__]
    assert "dspark" not in (tmp_path / "config.json").read_text()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(loaded.state_dict()[key], weights[key]) for key in weights)
    assert plain_generate(loaded, PROMPTS[:1], max_new_tokens=4).tolist() == expected


def test_a_folder_can_be_loaded_wrapped_and_through_a_wrapped_class(
    model: PreTrainedModel, plain: list[list[int]], tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "target")
    noisy_copy(model).save_pretrained(tmp_path / "drafter")
    loaded = DSparkForCausalLM.from_pretrained(
        tmp_path / "target",
        drafter=tmp_path / "drafter",
        config=CONFIG,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    assert new_text(loaded) == plain
    assert loaded.config._attn_implementation == "eager"
    again = type(loaded).from_pretrained(tmp_path / "target")
    assert type(again) is LlamaForCausalLM


def test_a_deep_copy_is_wrapped_and_independent(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    DSparkForCausalLM.wrap(model, drafter=noisy_copy(model), config=CONFIG)
    assert new_text(model) == plain
    twin = copy.deepcopy(model)
    assert isinstance(twin, DSparkForCausalLM)
    assert twin.dspark is not model.dspark
    assert twin.dspark.model is twin
    assert twin.dspark.drafter.model is not model.dspark.drafter.model
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert new_text(twin) != plain
    assert new_text(model) == plain
    assert (model.dspark.metrics.rows, twin.dspark.metrics.rows) == (6, 6)


@pytest.mark.parametrize("drafter", ["none", "lookup", "model", "itself"])
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize("has_generated", [False, True])
def test_a_pickled_model_arrives_wrapped_and_generates_the_same(
    model: PreTrainedModel, plain: list[list[int]], how: str, drafter: str, has_generated: bool
) -> None:
    made: Any = {"none": None, "lookup": "lookup", "itself": model}.get(drafter)
    if drafter == "model":
        made = noisy_copy(model)
    DSparkForCausalLM.wrap(model, drafter=made, config=CONFIG)
    if has_generated:
        generate(model, PROMPTS, max_new_tokens=3)
    if how == "pickle":
        arrived = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        arrived = torch.load(file, weights_only=False)
    assert isinstance(arrived, DSparkForCausalLM)
    assert arrived.dspark.config == CONFIG
    assert arrived.dspark.model is arrived
    out = generate(arrived, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == plain
    assert paths(out) == {"flat"}
    if drafter == "itself":
        assert arrived.dspark.drafter.model is arrived


def test_casting_a_model_casts_its_drafting_model_too(model: PreTrainedModel) -> None:
    drafting = noisy_copy(model)
    DSparkForCausalLM.wrap(model, drafter=drafting, config=CONFIG)
    assert model.to(torch.bfloat16) is model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in drafting.parameters()} == {torch.bfloat16}
    out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert paths(out) == {"flat"}
    assert drafts_were_verified(out)


def test_a_model_that_drafts_for_itself_can_be_cast(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    DSparkForCausalLM.wrap(model, drafter=model, config=CONFIG)
    assert new_text(model) == plain
    model.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert new_text(model) == plain


def test_a_model_is_checked_again_after_its_attention_was_changed(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB), config=CONFIG)
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        assert new_text(model) == plain
        assert model.config._attn_implementation == name


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_model_generates_in_any_gradient_mode(
    model: PreTrainedModel, plain: list[list[int]], context: Any
) -> None:
    DSparkForCausalLM.wrap(model, drafter=noisy_copy(model), config=CONFIG)
    ids, mask = left_padded(PROMPTS)
    with context():
        first = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert first.tolist() == plain
    # And in another mode afterwards: nothing kept from before may stand in the way.
    assert new_text(model) == plain


def test_a_model_in_training_mode_stays_in_it(model: PreTrainedModel) -> None:
    model.train()
    with wrapped(model, RandomDrafter(VOCAB)):
        generate(model, PROMPTS, max_new_tokens=4)
        assert model.training
    loss = model(torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss
    loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_two_wrapped_models_do_not_touch_each_other(plain: list[list[int]]) -> None:
    first, second = llama(), ARCHITECTURES["mistral"]()
    other = plain_generate(second, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    shared = RandomDrafter(VOCAB)
    DSparkForCausalLM.wrap(first, drafter=shared, config=CONFIG)
    DSparkForCausalLM.wrap(second, drafter=shared, config=DSparkConfig(max_draft_tokens=2))
    for _ in range(2):
        assert generate(first, PROMPTS, max_new_tokens=NEW_TOKENS).sequences.tolist() == plain
        assert generate(second, PROMPTS, max_new_tokens=NEW_TOKENS).sequences.tolist() == other
    assert first.dspark.metrics.rows == second.dspark.metrics.rows == 6
    DSparkForCausalLM.unwrap(first)
    assert generate(second, PROMPTS, max_new_tokens=NEW_TOKENS).sequences.tolist() == other


def test_models_that_draft_for_each_other_are_both_right(plain: list[list[int]]) -> None:
    first, second = llama(), noisy_copy(llama())
    other = plain_generate(second, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    DSparkForCausalLM.wrap(first, drafter=second, config=CONFIG)
    DSparkForCausalLM.wrap(second, drafter=first, config=CONFIG)
    assert new_text(first) == plain
    assert new_text(second) == other


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_threads_that_generate_at_once_all_get_the_right_text(
    model: PreTrainedModel, drafter: str
) -> None:
    prompts = [prompt(length, seed=70 + length) for length in (3, 8, 12, 5)]
    alone = [plain_generate(model, [ids], max_new_tokens=20).tolist() for ids in prompts]
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        for _ in range(2):
            kwargs = {"max_new_tokens": 20}
            results.setdefault(index, []).append(
                plain_generate(model, [prompts[index]], **kwargs).tolist()
            )

    with wrapped(model, noisy_copy(model) if drafter == "model" else drafter):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert model.dspark.metrics.rows == 2 * len(prompts)
    assert results == {i: [alone[i], alone[i]] for i in range(len(prompts))}
    assert model.config._attn_implementation == "sdpa"


def test_a_streamer_may_generate_with_the_same_model_while_it_is_fed(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    class Nested(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.pieces) == 4:
                inner = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
                assert inner.tolist() == plain

    DSparkForCausalLM.wrap(model, drafter=noisy_copy(model), config=CONFIG)
    out = generate(model, PROMPTS[2:], max_new_tokens=NEW_TOKENS, streamer=Nested())
    assert out.sequences.tolist() == plain[2:]


def test_settings_of_a_call_hold_for_that_call_and_that_model_only(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    other = DSparkForCausalLM.wrap(llama(), drafter=RandomDrafter(VOCAB), config=CONFIG)
    drafted = []

    class Asking(Recorder):
        def put(self, value: torch.Tensor) -> None:
            if not drafted:
                inner = generate(other, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
                drafted.append(inner.speculation[0])

    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB), config=CONFIG)
    short = DSparkConfig(schedule="fixed", max_draft_tokens=1)
    kwargs = {"max_new_tokens": NEW_TOKENS, "streamer": Asking(), "dspark": short}
    out = generate(model, PROMPTS[2:], **kwargs)
    assert out.sequences.tolist() == plain[2:]
    assert out.speculation[0].drafted <= out.speculation[0].rounds
    assert drafted[0].drafted > drafted[0].rounds, "the other model took over this call's settings"
    assert model.dspark.config == CONFIG


def test_a_model_made_by_hand_of_the_swapped_class_decodes_plainly() -> None:
    swapped = type(DSparkForCausalLM.wrap(llama()))
    assert swapped.__mro__[1] is DSparkForCausalLM
    fresh = swapped(llama().config).eval()
    assert fresh.dspark.drafter is None
    out = generate(fresh, PROMPTS[:1], max_new_tokens=3)
    assert out.speculation[0].drafted == 0
    assert KNOWS_NOTHING.freed == []
