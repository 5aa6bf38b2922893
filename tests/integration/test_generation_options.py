"""Every option that shapes the scores gives plain `generate()`'s text, with drafts verified.

Each option is first shown to matter: the plain text with it differs from the plain text without.
Then every kind of drafter must give the same text, and the record must say that this package's
loop ran and verified drafts; nothing may fall back in silence. fp32, greedy.

Source of the expectations: Transformers' own loop on the same, unwrapped model. Values of scores
under speculation after https://github.com/ggml-org/llama.cpp/issues/27972.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, WatermarkingConfig

from harness import DRAFTERS, drafts_were_verified, generate, oracle_of, paths, wrapped
from tiny import PAD, VOCAB, llama, plain_generate, prompt

NEW_TOKENS = 18
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
LONGEST = 14


@dataclass(frozen=True)
class Subject:
    """A model and its plain text for the prompts."""

    model: PreTrainedModel
    base: list[list[int]]

    def at(self, row: int, step: int) -> int:
        """Return the plain token of a row at a step."""
        return self.base[row][step]


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = llama()
    base = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    return Subject(model, base[:, LONGEST:].tolist())


def first_ids_of_even_rows(batch_id: int, ids: torch.Tensor) -> list[int]:
    """Allow the lower half of the vocabulary in even rows and the upper half in odd ones."""
    return list(range(1, VOCAB // 2)) if batch_id % 2 == 0 else list(range(VOCAB // 2, VOCAB))


Kwargs = Callable[[Subject], dict[str, Any]]
OPTIONS: dict[str, Kwargs] = {
    "repetition_penalty": lambda s: {"repetition_penalty": 1.9},
    "no_repeat_ngram_size": lambda s: {"no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": lambda s: {"encoder_repetition_penalty": 2.5},
    "encoder_no_repeat_ngram_size": lambda s: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda s: {
        "bad_words_ids": [[s.at(0, 6)], [s.at(1, 3), s.at(1, 4)], [s.at(2, 1), s.at(2, 2)]]
    },
    "sequence_bias": lambda s: {
        "sequence_bias": [[[s.at(0, 2)], -20.0], [[s.at(1, 1), s.at(0, 5)], 30.0]]
    },
    "min_length": lambda s: {"min_length": LONGEST + 9, "eos_token_id": s.at(0, 3)},
    "min_new_tokens": lambda s: {"min_new_tokens": 9, "eos_token_id": s.at(1, 4)},
    "forced_eos_token_id": lambda s: {"forced_eos_token_id": s.at(2, 0), "eos_token_id": None},
    "suppress_tokens": lambda s: {"suppress_tokens": [s.at(0, 1), s.at(2, 7)]},
    "begin_suppress_tokens": lambda s: {"begin_suppress_tokens": [s.at(0, 0), s.at(1, 0)]},
    "exponential_decay_length_penalty": lambda s: {
        "exponential_decay_length_penalty": (4, 1.4),
        "eos_token_id": s.at(1, 9),
    },
    "prefix_allowed_tokens_fn": lambda s: {"prefix_allowed_tokens_fn": first_ids_of_even_rows},
    "watermark": lambda s: {"watermarking_config": WatermarkingConfig(bias=6.0, context_width=2)},
    "several_end_tokens": lambda s: {"eos_token_id": [s.at(0, 7), s.at(1, 12), s.at(2, 4)]},
    "several_options_at_once": lambda s: {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [s.at(1, 2)],
        "min_new_tokens": 6,
        "eos_token_id": s.at(0, 4),
        "renormalize_logits": True,
    },
}
UNCHANGING: dict[str, Kwargs] = {
    "no_end_token": lambda s: {"eos_token_id": None},
    "remove_invalid_values": lambda s: {"remove_invalid_values": True},
    "renormalize_logits": lambda s: {"renormalize_logits": True},
}
"""Options that leave this model's greedy text as it is; equality is still required."""


KINDS = ("lookup", "itself", "noisy_copy", "wrong", "noisy", "ragged")


def without_stops(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return options whose text runs on behind the end token, to draft past the stop."""
    needs_end = "exponential_decay_length_penalty" in kwargs
    return kwargs if needs_end or "eos_token_id" not in kwargs else {**kwargs, "eos_token_id": None}


def check(subject: Subject, drafter: str, kwargs: dict[str, Any], size: int) -> torch.Tensor:
    """Compare one call with plain decoding and return the plain sequences."""
    prompts = PROMPTS[:size] if size > 1 else PROMPTS[-1:]
    options = {"max_new_tokens": NEW_TOKENS, **kwargs}
    plain = plain_generate(subject.model, prompts, **options)
    known = plain_generate(subject.model, prompts, **without_stops(options))
    made = DRAFTERS[drafter](subject.model, oracle_of(known, prompts))
    with wrapped(subject.model, made) as model:
        out = generate(model, prompts, **options)
        assert model.dspark.metrics.fallback_reasons == {}
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"flat"}
    if drafter not in ("lookup", "ragged"):
        assert drafts_were_verified(out)
    return plain


@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_changes_the_text_changes_it_as_in_plain_decoding(
    subject: Subject, option: str, drafter: str
) -> None:
    plain = check(subject, drafter, OPTIONS[option](subject), size=3)
    assert plain[:, LONGEST:].tolist() != subject.base


@pytest.mark.parametrize("drafter", ["lookup", "noisy"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_acts_on_one_row_as_in_plain_decoding(
    subject: Subject, option: str, drafter: str
) -> None:
    check(subject, drafter, OPTIONS[option](subject), size=1)


@pytest.mark.parametrize("drafter", ["lookup", "itself", "noisy"])
@pytest.mark.parametrize("option", UNCHANGING)
def test_an_option_that_leaves_the_text_alone_leaves_it_alone_here(
    subject: Subject, option: str, drafter: str
) -> None:
    plain = check(subject, drafter, UNCHANGING[option](subject), size=3)
    assert plain[:, LONGEST:].tolist() == subject.base


@pytest.mark.parametrize("drafter", ["itself", "noisy"])
def test_a_forced_first_token_follows_a_prompt_of_one_token(subject: Subject, drafter: str) -> None:
    forced = subject.at(2, 5)
    prompts = [[3], [77]]
    options = {"max_new_tokens": NEW_TOKENS, "forced_bos_token_id": forced}
    options["begin_suppress_tokens"] = [subject.at(2, 6)]
    plain = plain_generate(subject.model, prompts, **options)
    made = DRAFTERS[drafter](subject.model, oracle_of(plain, prompts))
    with wrapped(subject.model, made) as model:
        out = generate(model, prompts, **options)
    assert out.sequences.tolist() == plain.tolist()
    assert out.sequences[:, 1].tolist() == [forced, forced]
    assert paths(out) == {"flat"}
    assert drafts_were_verified(out)


@pytest.mark.parametrize("penalty", [1.9, 0.6])
def test_a_repetition_penalty_ignores_left_padding_as_plain_decoding_does(
    subject: Subject, penalty: float
) -> None:
    # The padding id is a token that the short row would say, so penalising it would show.
    pad = subject.at(1, 0)
    ids = torch.full((2, LONGEST), pad)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(PROMPTS[1:]):
        ids[row, LONGEST - len(tokens) :] = torch.tensor(tokens)
        mask[row, LONGEST - len(tokens) :] = 1
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW_TOKENS}
    inputs |= {"do_sample": False, "repetition_penalty": penalty, "pad_token_id": pad}
    plain = subject.model.generate(**inputs)
    assert pad not in PROMPTS[1]
    assert plain[0, LONGEST] == pad
    with wrapped(subject.model, oracle_of(plain, PROMPTS[1:])) as model:
        out = model.generate(**inputs, return_dict_in_generate=True)
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"flat"}
    assert drafts_were_verified(out)


def test_a_prefix_function_sees_the_rows_and_prefixes_that_plain_decoding_shows_it(
    subject: Subject,
) -> None:
    def calls_of(model: PreTrainedModel) -> list[tuple[int, tuple[int, ...]]]:
        calls = []

        def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
            calls.append((batch_id, tuple(ids.tolist())))
            return first_ids_of_even_rows(batch_id, ids)

        plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, prefix_allowed_tokens_fn=allowed)
        return sorted(calls)

    plain = calls_of(subject.model)
    with wrapped(subject.model, subject.model) as model:
        assert calls_of(model) == plain
        assert model.dspark.metrics.fallback_reasons == {}


def test_a_prefix_function_gets_the_prompts_index_with_several_sequences_a_prompt(
    subject: Subject,
) -> None:
    seen: set[tuple[int, tuple[int, ...]]] = set()

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        seen.add((batch_id, tuple(ids[: len(PROMPTS[0])].tolist())))
        return first_ids_of_even_rows(batch_id, ids)

    kwargs = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 6}
    kwargs["prefix_allowed_tokens_fn"] = allowed
    plain_generate(subject.model, PROMPTS[:2], **kwargs)
    plain, seen = seen, set()
    with wrapped(subject.model, subject.model) as model:
        out = generate(model, PROMPTS[:2], **kwargs)
    assert {place for place, _ in seen} == {0, 1}
    assert seen == plain
    assert (out.sequences[:3, -6:] < VOCAB // 2).all()
    assert (out.sequences[3:, -6:] >= VOCAB // 2).all()
    assert paths(out) == {"flat"}
    assert drafts_were_verified(out)


@pytest.mark.parametrize("size", [1, 3])
def test_scores_and_logits_are_the_targets_one_entry_for_every_new_token(
    subject: Subject, size: int
) -> None:
    prompts = PROMPTS[:size] if size > 1 else PROMPTS[-1:]
    kwargs: dict[str, Any] = {"output_scores": True, "output_logits": True}
    kwargs |= {"repetition_penalty": 1.6, "max_new_tokens": NEW_TOKENS}
    free = plain_generate(subject.model, prompts, **{**kwargs, "max_new_tokens": NEW_TOKENS})
    kwargs["eos_token_id"] = [row[-NEW_TOKENS:][4 + 3 * i] for i, row in enumerate(free.tolist())]
    plain = generate(subject.model, prompts, **kwargs)
    with wrapped(subject.model, oracle_of(free, prompts)) as model:
        out = generate(model, prompts, **kwargs)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert paths(out) == {"flat"}
    assert any(record.cut_rounds for record in out.speculation), "no block was cut"
    num_steps = out.sequences.shape[1] - max(len(ids) for ids in prompts)
    assert len(out.scores) == len(out.logits) == len(plain.scores) == num_steps
    for row, record in enumerate(out.speculation):
        for step in range(record.new_tokens):
            assert_close(out.scores[step][row], plain.scores[step][row])
            assert_close(out.logits[step][row], plain.logits[step][row])
        for step in range(record.new_tokens, num_steps):
            assert not out.scores[step][row].any()
    assert not torch.equal(out.scores[2], out.logits[2])


def assert_close(ours: torch.Tensor, plain: torch.Tensor) -> None:
    """Compare scores; those that processors set to minus infinity must be the same ones."""
    assert torch.equal(ours.isinf(), plain.isinf())
    finite = plain.isfinite()
    assert (ours[finite] - plain[finite]).abs().max() < 1e-4


def test_transition_scores_can_be_computed_from_the_output(subject: Subject) -> None:
    kwargs = {"output_scores": True, "max_new_tokens": NEW_TOKENS}
    plain = generate(subject.model, PROMPTS, **kwargs)
    expected = subject.model.compute_transition_scores(plain.sequences, plain.scores)
    with wrapped(subject.model, subject.model) as model:
        out = generate(model, PROMPTS, **kwargs)
        found = model.compute_transition_scores(out.sequences, out.scores)
    assert torch.allclose(found, expected, atol=1e-4)


def test_token_healing_is_done_before_and_the_call_is_speculated(subject: Subject) -> None:
    letters = "abcdefghijklm"
    pieces = ["<pad>", "<s>", *letters, *(a + b for a in letters for b in letters)][:VOCAB]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.WordPiece(vocabulary, unk_token=pieces[0], continuing_subword_prefix="")
    )
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pieces[0],
        bos_token=pieces[1],
        padding_side="left",
    )
    # The last token is the single letter c, which many tokens of two letters extend.
    ids = tokenizer(["abcdefabc", "c"], return_tensors="pt", padding=True)
    kwargs = {**ids, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    kwargs |= {"token_healing": True, "tokenizer": tokenizer}
    plain = subject.model.generate(**kwargs)
    with wrapped(subject.model, subject.model) as model:
        out = model.generate(**kwargs, return_dict_in_generate=True)
        assert model.dspark.metrics.fallback_reasons == {}
    assert out.sequences.tolist() == plain.tolist()
    healed = plain[0, : ids.input_ids.shape[1]].tolist()
    assert healed != ids.input_ids[0].tolist()
    assert paths(out) == {"flat"}
    assert drafts_were_verified(out)


def test_the_padding_behind_a_stop_is_the_calls_own(subject: Subject) -> None:
    kwargs = {"max_new_tokens": NEW_TOKENS, "eos_token_id": subject.at(0, 2), "pad_token_id": 55}
    plain = plain_generate(subject.model, PROMPTS, **kwargs)
    with wrapped(subject.model, subject.model) as model:
        out = generate(model, PROMPTS, **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert out.sequences[0, -1] == 55 != PAD
