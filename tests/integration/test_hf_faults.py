"""Where Transformers' own speculation is wrong, refuses or is silently dropped, ours is exact.

Two ways to ask for each case: as a call to Transformers would (`prompt_lookup_num_tokens=`,
`assistant_model=`), and with the drafter the model was wrapped with. The expectation is always
plain decoding, without any speculation, of the unwrapped model.

The text of the target here repeats itself, so that lookup has long blocks accepted, and a stop
that only completes in the second repetition lies inside one. Reports:
https://github.com/huggingface/transformers/issues/48039 (criteria inside a block),
https://github.com/huggingface/transformers/pull/31644 (caches handed in),
https://github.com/huggingface/transformers/issues/32165 (batches),
https://github.com/huggingface/transformers/pull/46790 (lookup without an end token).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from dspark_hf import DSparkForCausalLM
from dspark_hf.compat import OUTPUT_CACHE_NAME
from harness import CONFIG, counted_forwards, generate, noisy_copy, paths, toy_tokenizer
from tiny import VOCAB, left_padded, llama, plain_generate

PERIOD = 7
NEW_TOKENS = 24
PROMPTS = [[150, 3], [151, 20, 9, 152], [80, 153, 60, 31, 16]]
"""Each ends in another cycle of tokens, preceded by tokens that are not part of it."""
UNSAID = 111
"""A token of none of the texts."""
STEPS = range(PERIOD + 2, PERIOD + 9)
"""New tokens after which a stop completes: every place of a block of six, and one more."""


def repetitive_llama() -> PreTrainedModel:
    """Build a Llama whose next token is nearly always the next one of a cycle of PERIOD tokens.

    Its layers still matter a little, so the whole prefix is in the scores.
    """
    model = llama()
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.006
            layer.mlp.down_proj.weight *= 0.006
        for token in range(1, VOCAB):
            start = token - (token - 1) % PERIOD
            following = start + (token - start + 1) % min(PERIOD, VOCAB - start)
            head[following] = embedding[token] / embedding[token].norm() * 6
    return model


@dataclass(frozen=True)
class Subject:
    """The target, one that drafts exactly like it, one that sometimes differs, and its text."""

    model: PreTrainedModel
    twin: PreTrainedModel
    noisy: PreTrainedModel
    new: list[list[int]]


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = repetitive_llama()
    twin, noisy = copy.deepcopy(model), noisy_copy(model, scale=0.6)
    longest = max(map(len, PROMPTS))
    text = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)[:, longest:].tolist()
    assert all(row[:PERIOD] == row[PERIOD : 2 * PERIOD] for row in text)
    DSparkForCausalLM.wrap(model, drafter=None, config=CONFIG)
    return Subject(model, twin, noisy, text)


@dataclass(frozen=True)
class Asked:
    """A way to ask for speculation: how the model is wrapped and what the call says."""

    drafter: Any
    kwargs: dict[str, Any]


WAYS = ("lookup", "twin", "noisy", "call_lookup", "call_twin", "call_noisy")


@pytest.fixture(params=WAYS)
def asked(request: pytest.FixtureRequest, subject: Subject) -> Asked:
    return {
        "lookup": Asked("lookup", {}),
        "twin": Asked(subject.twin, {}),
        "noisy": Asked(subject.noisy, {}),
        "call_lookup": Asked(None, {"prompt_lookup_num_tokens": 5}),
        "call_twin": Asked(None, {"assistant_model": subject.twin}),
        "call_noisy": Asked(None, {"assistant_model": subject.noisy}),
    }[request.param]


def run(subject: Subject, asked: Asked, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, Any]:
    """Decode plainly on an unwrapped model, then as asked; return both outputs."""
    kwargs = {"max_new_tokens": NEW_TOKENS, **kwargs}
    plain = generate(subject.twin, prompts, **kwargs)
    DSparkForCausalLM.wrap(subject.model, drafter=asked.drafter, config=CONFIG)
    out = generate(subject.model, prompts, **{**kwargs, **asked.kwargs})
    return plain, out


@dataclass
class StopAtLength(StoppingCriteria):
    """Stops every row at a length; knows nothing of blocks."""

    length: int

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_stop_strings_end_the_text_where_they_complete(subject: Subject, asked: Asked) -> None:
    tokenizer = toy_tokenizer()
    cuts = 0
    for step in STEPS:
        stop = tokenizer.decode(subject.new[0][: step + 1])[:-1]
        plain, out = run(subject, asked, PROMPTS[:1], stop_strings=[stop], tokenizer=tokenizer)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert out.speculation[0].new_tokens == step + 1
        assert paths(out) == {"flat"}
        cuts += out.speculation[0].cut_rounds
    assert cuts >= 3, "stops were meant to fall inside accepted blocks"


def test_a_criterion_of_the_callers_ends_the_text_at_once(subject: Subject, asked: Asked) -> None:
    cuts = 0
    for step in STEPS:
        criteria = StoppingCriteriaList([StopAtLength(len(PROMPTS[0]) + step)])
        plain, out = run(subject, asked, PROMPTS[:1], stopping_criteria=criteria)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert out.speculation[0].new_tokens == step
        assert paths(out) == {"flat"}
        cuts += out.speculation[0].cut_rounds
    assert cuts >= 3, "stops were meant to fall inside accepted blocks"


def test_a_cache_of_earlier_turns_is_continued(subject: Subject, asked: Asked) -> None:
    tails = [[40, 41, 42], [99]]
    texts: list[list[list[int]]] = []
    for is_ours in (False, True):
        DSparkForCausalLM.wrap(subject.model, drafter=asked.drafter, config=CONFIG)
        model = subject.model if is_ours else subject.twin
        cache = DynamicCache(config=model.config)
        ids, turns = PROMPTS[0], []
        for tail in tails:
            kwargs = {"max_new_tokens": NEW_TOKENS, OUTPUT_CACHE_NAME: cache}
            out = generate(model, [ids], **kwargs, **(asked.kwargs if is_ours else {}))
            turns.append(out.sequences[0].tolist())
            assert cache.get_seq_length() == len(turns[-1]) - 1
            if is_ours:
                assert paths(out) == {"flat"}
                assert out.speculation[0].accepted > 0
            ids = turns[-1] + tail
        texts.append(turns)
    assert texts[0] == texts[1]


def test_guidance_is_decoded_in_the_models_own_loop(subject: Subject, asked: Asked) -> None:
    plain, out = run(subject, asked, PROMPTS[:1], guidance_scale=9.0)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert paths(out) == {"transformers"}
    assert list(subject.model.dspark.metrics.fallback_reasons) == [
        "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state for the whole batch"
    ]


def test_a_batch_is_speculated_row_by_row(subject: Subject, asked: Asked) -> None:
    tokenizer = toy_tokenizer()
    stops = [tokenizer.decode(row[: 9 + 3 * i]) for i, row in enumerate(subject.new[:2])]
    kwargs = {"stop_strings": stops, "tokenizer": tokenizer, "eos_token_id": UNSAID}
    plain, out = run(subject, asked, PROMPTS, **kwargs)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert [record.new_tokens for record in out.speculation] == [9, 12, NEW_TOKENS]
    assert paths(out) == {"flat"}
    assert all(record.accepted > 0 for record in out.speculation)
    assert any(record.cut_rounds for record in out.speculation)


def test_several_sequences_a_prompt_are_speculated(subject: Subject, asked: Asked) -> None:
    # Sampling from the best token alone has one outcome, so plain decoding is a fair judge.
    plain, out = run(subject, asked, PROMPTS[:2], num_return_sequences=3, do_sample=True, top_k=1)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert len(out.speculation) == 6
    assert paths(out) == {"flat"}
    assert all(record.accepted > 0 for record in out.speculation)


def test_beams_are_searched_as_without_an_assistant(subject: Subject, asked: Asked) -> None:
    plain, out = run(subject, asked, PROMPTS[:1], num_beams=2)
    assert out.sequences.tolist() == plain.sequences.tolist()


def test_embeddings_as_prompt_are_decoded_in_the_models_own_loop(
    subject: Subject, asked: Asked
) -> None:
    ids, mask = left_padded(PROMPTS)
    inputs = {"inputs_embeds": subject.twin.get_input_embeddings()(ids), "attention_mask": mask}
    inputs |= {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = subject.twin.generate(**inputs)
    DSparkForCausalLM.wrap(subject.model, drafter=asked.drafter, config=CONFIG)
    out = subject.model.generate(**inputs, return_dict_in_generate=True, **asked.kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"transformers"}


@pytest.mark.parametrize("eos", [None, UNSAID, [UNSAID, UNSAID + 1]], ids=["none", "one", "two"])
def test_lookup_needs_no_end_token(subject: Subject, asked: Asked, eos: Any) -> None:
    plain, out = run(subject, asked, PROMPTS[:1], eos_token_id=eos)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.speculation[0].accepted > 0


def test_hidden_states_are_returned_by_the_models_own_loop(subject: Subject, asked: Asked) -> None:
    plain, out = run(subject, asked, PROMPTS[:1], output_hidden_states=True)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert len(out.hidden_states) == len(plain.hidden_states)
    assert paths(out) == {"transformers"}


def test_the_assistant_of_a_call_drafts_and_its_draft_is_kept(subject: Subject) -> None:
    with counted_forwards(subject.twin) as forwards:
        asked = Asked("lookup", {"assistant_model": subject.twin})
        DSparkForCausalLM.wrap(subject.model, drafter=asked.drafter, config=CONFIG)
        out = generate(subject.model, PROMPTS, max_new_tokens=NEW_TOKENS, **asked.kwargs)
    assert forwards
    assert all(record.accepted == record.verified > 0 for record in out.speculation)


def test_an_assistant_with_another_vocabulary_is_refused_as_transformers_refuses_it(
    subject: Subject,
) -> None:
    other = llama(vocab_size=VOCAB + 10)
    kwargs = {"max_new_tokens": 4, "assistant_model": other}
    with pytest.raises(ValueError, match="different tokenizers") as plain:
        generate(subject.twin, PROMPTS[:1], **kwargs)
    with pytest.raises(ValueError, match="different tokenizers") as ours:
        generate(subject.model, PROMPTS[:1], **kwargs)
    assert str(ours.value) == str(plain.value)


def test_early_exit_runs_in_transformers_assisted_loop_and_says_so(subject: Subject) -> None:
    plain, out = run(subject, Asked("lookup", {"assistant_early_exit": 2}), PROMPTS[:1])
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert paths(out) == {"transformers"}
    assert subject.model.dspark.metrics.fallback_calls == 1


def test_early_exit_is_given_up_where_transformers_assisted_loop_is_not_exact(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    criteria = StoppingCriteriaList([StopAtLength(len(PROMPTS[0]) + 12)])
    asked = Asked("lookup", {"assistant_early_exit": 2})
    plain, out = run(subject, asked, PROMPTS[:1], stopping_criteria=criteria)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.speculation[0].verified > 0
    assert "assistant of this call is ignored" in caplog.text
