"""What cannot be speculated runs in the model's own loop: the same result, said in the log.

For each such call: tokens, scores and everything else returned equal those of the unwrapped model;
the records say "transformers"; the reason is counted and logged, so that nobody is left wondering.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
    StaticCache,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from harness import drafts_were_verified, generate, paths, wrapped
from tiny import PAD, left_padded, llama, plain_generate, prompt

NEW_TOKENS = 10
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
LONGEST = 14


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@dataclass(frozen=True)
class OwnLoop:
    """Keywords of a call and a part of the reason that must be given for it."""

    kwargs: Callable[[PreTrainedModel], dict[str, Any]]
    reason: str
    attention: str = "sdpa"


CALLS = {
    "hidden_states": OwnLoop(lambda m: {"output_hidden_states": True}, "output_hidden_states"),
    "attentions": OwnLoop(lambda m: {"output_attentions": True}, "output_attentions", "eager"),
    "no_cache": OwnLoop(lambda m: {"use_cache": False}, "use_cache=False"),
    "static_cache": OwnLoop(lambda m: {"cache_implementation": "static"}, "cache_implementation"),
    "guidance": OwnLoop(lambda m: {"guidance_scale": 1.7}, "UnbatchedClassifierFreeGuidance"),
    "synthid": OwnLoop(
        lambda m: {
            "do_sample": True,
            "top_k": 1,
            "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3),
        },
        "SynthIDTextWatermark",
    ),
    "beams": OwnLoop(lambda m: {"num_beams": 3}, "beam"),
    "beam_sequences": OwnLoop(lambda m: {"num_beams": 3, "num_return_sequences": 2}, "beam"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_cannot_be_speculated_gives_the_models_own_result(
    model: PreTrainedModel, call: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    case = CALLS[call]
    model.set_attn_implementation(case.attention)
    kwargs = {"max_new_tokens": NEW_TOKENS, "output_scores": True, **case.kwargs(model)}
    plain = generate(model, PROMPTS[:size], **kwargs)
    with wrapped(model, model):
        out = generate(model, PROMPTS[:size], **kwargs)
        reasons = list(model.dspark.metrics.fallback_reasons)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert all(torch.equal(a, b) for a, b in zip(out.scores, plain.scores, strict=True))
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(out, name), getattr(plain, name)
        assert (ours is None) == (theirs is None)
        for step, expected in zip(ours or (), theirs or (), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, expected, strict=True))
    assert any(case.reason in reason for reason in reasons), reasons
    assert case.reason in caplog.text
    assert paths(out) == {"transformers"}
    assert model.config._attn_implementation == case.attention
    model.set_attn_implementation("sdpa")


def test_a_static_cache_handed_in_is_filled_by_the_models_own_loop(model: PreTrainedModel) -> None:
    caches = [StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
    kwargs = {"max_new_tokens": NEW_TOKENS}
    plain = plain_generate(model, PROMPTS[:1], cache=caches[0], **kwargs)
    with wrapped(model, model):
        out = generate(model, PROMPTS[:1], cache=caches[1], **kwargs)
        assert model.dspark.metrics.fallback_reasons == {"a StaticCache": 1}
    assert out.sequences.tolist() == plain.tolist()
    assert int(caches[1].get_seq_length()) == int(caches[0].get_seq_length())


def test_embeddings_as_prompt_run_in_the_models_own_loop(model: PreTrainedModel) -> None:
    ids, mask = left_padded(PROMPTS)
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
    inputs |= {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = model.generate(**inputs)
    with wrapped(model, model):
        out = model.generate(**inputs, return_dict_in_generate=True)
        assert model.dspark.metrics.fallback_reasons == {"the model input 'inputs_embeds'": 1}
    assert out.sequences.tolist() == plain.tolist()
    assert [record.new_tokens for record in out.speculation] == [NEW_TOKENS] * 3


def test_positions_of_the_callers_run_in_the_models_own_loop(model: PreTrainedModel) -> None:
    ids, mask = left_padded(PROMPTS[2:])
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW_TOKENS}
    shifted = {**inputs, "do_sample": False, "position_ids": torch.arange(5, LONGEST + 5)[None]}
    plain = model.generate(**shifted)
    with wrapped(model, model):
        out = model.generate(**shifted, return_dict_in_generate=True)
        assert list(model.dspark.metrics.fallback_reasons) == [
            "position_ids that do not count from 0"
        ]
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"transformers"}


def test_usual_positions_may_be_passed_and_are_speculated(model: PreTrainedModel) -> None:
    ids, mask = left_padded(PROMPTS)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    inputs |= {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = model.generate(**inputs)
    with wrapped(model, model):
        out = model.generate(**inputs, return_dict_in_generate=True)
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"flat"}
    assert drafts_were_verified(out)


@pytest.mark.parametrize("where", ["hole", "right"])
def test_a_mask_with_holes_or_right_padding_runs_in_the_models_own_loop(
    model: PreTrainedModel, where: str
) -> None:
    ids, mask = left_padded(PROMPTS)
    mask[1, 9:11] = 0
    if where == "right":
        mask[1] = torch.cat([torch.ones(8), torch.zeros(6)])
        ids[1] = torch.tensor([*PROMPTS[1], *[PAD] * 6])
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW_TOKENS}
    plain = model.generate(**inputs, do_sample=False)
    with wrapped(model, model):
        out = model.generate(**inputs, do_sample=False, return_dict_in_generate=True)
        assert list(model.dspark.metrics.fallback_reasons) == [
            "an attention mask with holes or right padding"
        ]
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"transformers"}


def test_the_models_own_loop_counts_a_rows_tokens_up_to_its_stop(model: PreTrainedModel) -> None:
    plain = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    eos = plain[0, LONGEST + 2]
    with wrapped(model, model):
        out = generate(
            model, PROMPTS, max_new_tokens=NEW_TOKENS, use_cache=False, eos_token_id=int(eos)
        )
    stopped = [(row[LONGEST:] == eos).nonzero().flatten().tolist() for row in out.sequences]
    expected = [places[0] + 1 if places else NEW_TOKENS for places in stopped]
    assert expected[0] == 3
    assert [record.new_tokens for record in out.speculation] == expected


def test_an_encoder_decoder_model_keeps_its_own_loop() -> None:
    config = T5Config(
        vocab_size=60,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        initializer_factor=4.0,
    )
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.tensor([prompt(6, seed=1)]) % 60
    kwargs = {"max_new_tokens": 6, "do_sample": False, "decoder_start_token_id": 0}
    plain = model.generate(ids, **kwargs)
    with wrapped(model):
        out = model.generate(ids, **kwargs, return_dict_in_generate=True)
        assert list(model.dspark.metrics.fallback_reasons) == ["encoder-decoder models"]
    assert out.sequences.tolist() == plain.tolist()


def test_a_model_in_training_mode_keeps_its_own_loop_and_its_dropout(
    model: PreTrainedModel,
) -> None:
    dropout = model.config.attention_dropout
    with wrapped(model, "lookup") as ours:
        ours.train()
        for layer in ours.model.layers:
            layer.self_attn.attention_dropout = 0.5
        try:
            out = generate(ours, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
            assert paths(out) == {"transformers"}
            assert any("training mode" in r for r in ours.dspark.metrics.fallback_reasons)
        finally:
            ours.eval()
            for layer in ours.model.layers:
                layer.self_attn.attention_dropout = dropout
