"""A wrapped model works where Transformers' models do: pipelines, Accelerate, PEFT, delegation.

Offloaded weights are placeholders until a layer runs, and tied ones all look alike:
https://github.com/huggingface/transformers/issues/36636,
https://github.com/huggingface/accelerate/pull/4083.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, pipeline

from drafters import RandomDrafter
from dspark_hf import DSparkForCausalLM
from harness import (
    CONFIG,
    drafts_were_verified,
    generate,
    noisy_copy,
    paths,
    toy_tokenizer,
    wrapped,
)
from tiny import VOCAB, llama, plain_generate, prompt

NEW_TOKENS = 12
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
UNSAID = 11
"""A token that the plain texts do not contain, to be the end token."""


def texts_of(generator: Any, texts: list[str], **kwargs: Any) -> list[str]:
    """Run a pipeline greedily and return its new texts."""
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **kwargs}
    found = generator(texts, return_full_text=False, **kwargs)
    return [answers[0]["generated_text"] for answers in found]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_pipeline_batches_and_stops_as_with_the_plain_model(batch_size: int) -> None:
    model, tokenizer = llama(), toy_tokenizer(eos=UNSAID)
    model.generation_config.eos_token_id = UNSAID
    texts = [tokenizer.decode(ids) for ids in PROMPTS]
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    free = texts_of(plain, texts)
    stop = free[1][9:12]
    expected = texts_of(plain, texts, stop_sequence=stop, batch_size=batch_size)
    assert expected != free
    with wrapped(model, noisy_copy(model)):
        ours = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        assert texts_of(ours, texts, batch_size=batch_size) == free
        assert texts_of(ours, texts, stop_sequence=stop, batch_size=batch_size) == expected
        assert model.dspark.metrics.fallback_reasons == {}
        assert model.dspark.metrics.rows == 6
        assert model.dspark.metrics.verified > 0


def test_a_pipeline_hands_its_assistant_to_every_call() -> None:
    model, tokenizer = llama(), toy_tokenizer()
    texts = [tokenizer.decode(ids) for ids in PROMPTS]
    free = texts_of(
        pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu"), texts
    )
    with wrapped(model, None):
        ours = pipeline(
            "text-generation",
            model=model,
            tokenizer=tokenizer,
            device="cpu",
            assistant_model=noisy_copy(llama()),
        )
        assert texts_of(ours, texts, batch_size=3) == free
        assert model.dspark.metrics.verified > 0


def offloaded(model: PreTrainedModel, how: str, folder: Path) -> PreTrainedModel:
    """Move a model's weights off its device with Accelerate's hooks."""
    if how == "cpu":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    return disk_offload(model, folder, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("drafter", ["lookup", "in_memory", "offloaded"])
@pytest.mark.parametrize("is_wrapped_first", [False, True])
@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_an_offloaded_model_with_tied_embeddings_says_what_it_says_in_memory(
    how: str, is_wrapped_first: bool, drafter: str, tmp_path: Path
) -> None:
    model = llama(tie_word_embeddings=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    expected = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    drafting: Any = "lookup" if drafter == "lookup" else noisy_copy(model)
    if drafter == "offloaded":
        drafting = offloaded(drafting, how, tmp_path / "drafter")
    if is_wrapped_first:
        DSparkForCausalLM.wrap(model, drafter=drafting, config=CONFIG)
    model = offloaded(model, how, tmp_path / "target")
    assert model.get_input_embeddings().weight.device.type == "meta"
    if not is_wrapped_first:
        DSparkForCausalLM.wrap(model, drafter=drafting, config=CONFIG)
    out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == expected
    assert paths(out) == {"flat"}
    assert sum(record.verified for record in out.speculation) > 0


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "part_on_disk"])
def test_a_model_loaded_with_a_device_map_says_what_the_plain_one_says(
    device_map: Any, tmp_path: Path
) -> None:
    model = llama(tie_word_embeddings=True)
    expected = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    model.save_pretrained(tmp_path / "target")
    noisy_copy(model).save_pretrained(tmp_path / "drafter")
    kwargs = {"device_map": device_map}
    if device_map == "part_on_disk":
        layers = {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
        rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
        kwargs["device_map"] = {**layers, **dict.fromkeys(rest, "cpu")}
        kwargs["offload_folder"] = tmp_path / "offload"
    loaded = DSparkForCausalLM.from_pretrained(
        tmp_path / "target", drafter=tmp_path / "drafter", config=CONFIG, **kwargs
    )
    out = generate(loaded, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == expected
    assert paths(out) == {"flat"}
    assert drafts_were_verified(out)


def with_adapter(model: PreTrainedModel, config: Any) -> Any:
    """Put a model into a PEFT model whose adapter has seeded weights that change the text."""
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name or "prompt" in name:
                weight.copy_(torch.randn_like(weight) * 0.3)
    return adapted


LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("drafter", ["lookup", "random", "base"])
def test_a_lora_adapter_over_a_wrapped_model_equals_one_over_the_plain_model(drafter: str) -> None:
    base = llama()
    unadapted = plain_generate(base, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    plain = with_adapter(llama(), peft.LoraConfig(**LORA))
    expected = plain_generate(plain, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    assert expected != unadapted
    made = {"lookup": "lookup", "random": RandomDrafter(VOCAB), "base": copy.deepcopy(base)}
    DSparkForCausalLM.wrap(base, drafter=made[drafter], config=CONFIG)
    ours = with_adapter(base, peft.LoraConfig(**LORA))
    out = generate(ours, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == expected
    assert paths(out) == {"flat"}
    assert sum(record.verified for record in out.speculation) > 0
    with ours.disable_adapter():
        out = generate(ours, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == unadapted
    assert paths(out) == {"flat"}


def test_the_model_inside_a_lora_adapter_can_be_wrapped_afterwards() -> None:
    plain = with_adapter(llama(), peft.LoraConfig(**LORA))
    expected = plain_generate(plain, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    DSparkForCausalLM.wrap(plain.get_base_model(), drafter=RandomDrafter(VOCAB), config=CONFIG)
    out = generate(plain, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == expected
    assert paths(out) == {"flat"}


@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning"])
def test_a_learned_prompt_runs_in_the_models_own_loop(kind: str) -> None:
    makers = {"prompt_tuning": peft.PromptTuningConfig, "prefix_tuning": peft.PrefixTuningConfig}
    config = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    expected = plain_generate(
        with_adapter(llama(), makers[kind](**config)), PROMPTS[:1], max_new_tokens=NEW_TOKENS
    )
    base = DSparkForCausalLM.wrap(llama(), drafter=RandomDrafter(VOCAB), config=CONFIG)
    ours = with_adapter(base, makers[kind](**config))
    out = generate(ours, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == expected.tolist()
    assert paths(out) == {"transformers"}
    assert base.dspark.metrics.fallback_calls == 1


class Delegating(nn.Module):
    """A module around a model that hands over whatever it does not know itself."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_module_that_delegates_to_a_wrapped_model_generates_with_it() -> None:
    model, tokenizer = llama(), toy_tokenizer()
    expected = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB), config=CONFIG)
    outer = Delegating(model)
    assert plain_generate(outer, PROMPTS, max_new_tokens=NEW_TOKENS).tolist() == expected
    assert outer.dspark.metrics.verified > 0
    generator = pipeline("text-generation", model=outer, tokenizer=tokenizer, device="cpu")
    texts = texts_of(generator, [tokenizer.decode(PROMPTS[2])])
    assert texts == [tokenizer.decode(expected[2][len(PROMPTS[2]) :])]


def test_a_compiled_forward_is_left_to_the_model() -> None:
    """`torch.compile` wraps the model in a module of its own; its generate() is the model's."""
    model = llama()
    expected = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS).tolist()
    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB), config=CONFIG)
    compiled = torch.compile(model, backend="eager")
    assert plain_generate(compiled, PROMPTS, max_new_tokens=NEW_TOKENS).tolist() == expected


def test_resized_embeddings_are_decoded_with_their_new_tokens() -> None:
    model = llama()
    with wrapped(model, RandomDrafter(VOCAB)):
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCAB + 8)
        ids = [[*PROMPTS[0], VOCAB + 3]]
        out = generate(model, ids, max_new_tokens=NEW_TOKENS)
        assert paths(out) == {"flat"}
    assert plain_generate(model, ids, max_new_tokens=NEW_TOKENS).tolist() == out.sequences.tolist()


def test_automodel_knows_nothing_of_wrapping(tmp_path: Path) -> None:
    model = DSparkForCausalLM.wrap(llama())
    model.save_pretrained(tmp_path)
    assert not isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), DSparkForCausalLM)
