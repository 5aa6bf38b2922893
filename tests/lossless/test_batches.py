"""Each row of a batch is decoded as if alone, and the batch is padded as plain decoding pads it.

Rows differ in prompt length (padded left), in how much of their drafts is accepted, in how many
tokens are drafted for them in a round, and in when they stop. fp32 unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters import NoisyDrafter, PureDrafter, RaggedDrafter, RightDrafter
from dspark_hf import DSparkConfig, DSparkForCausalLM
from tiny import ARCHITECTURES, PAD, VOCAB, left_padded, plain_generate, prompt

NEW_TOKENS = 20
CONFIG = DSparkConfig(schedule="fixed", max_draft_tokens=4, never_slower=False)
LENGTHS = (3, 17, 9, 1, 26, 6, 12, 2)
PROMPTS = tuple(prompt(length, seed=40 + i) for i, length in enumerate(LENGTHS))
SIZES = (2, 5, 8)
OTHER_PAD = 7
"""A padding id that is neither the model's own nor 0, to see whose is used behind a stop."""

DRAFTERS: dict[str, Callable[[RightDrafter], PureDrafter]] = {
    "right": lambda right: right,
    "noisy": lambda right: NoisyDrafter(right, VOCAB),
    "ragged": lambda right: RaggedDrafter(NoisyDrafter(right, VOCAB, every=5)),
}
COUNTS = (
    "path",
    "new_tokens",
    "rounds",
    "drafted",
    "verified",
    "accepted",
    "cut_rounds",
    "accepted_per_round",
    "tested_by_position",
    "accepted_by_position",
    "accepted_mask",
)
"""Everything a record counts; its seconds are shared between rows and do vary."""


@dataclass(frozen=True)
class Subject:
    """A model and what it says to each prompt alone, when it is plain and nothing stops it."""

    model: PreTrainedModel
    alone: list[list[int]]

    def right_drafter(self) -> RightDrafter:
        """Return a drafter that knows each prompt's continuation, beyond any stop."""
        pairs = zip(PROMPTS, self.alone, strict=True)
        return RightDrafter({tuple(ids): full for ids, full in pairs})

    def new_tokens(self, index: int) -> list[int]:
        """Return what follows a prompt."""
        return self.alone[index][LENGTHS[index] :]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_next"])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Build a flat model, a flat one with windows, and one decoded row by row."""
    model = ARCHITECTURES[request.param]()
    return Subject(
        model,
        [plain_generate(model, [ids], max_new_tokens=NEW_TOKENS)[0].tolist() for ids in PROMPTS],
    )


@contextmanager
def wrapped(model: PreTrainedModel, drafter: PureDrafter) -> Iterator[PreTrainedModel]:
    """Wrap a model for a while."""
    DSparkForCausalLM.wrap(model, drafter=drafter, config=CONFIG)
    try:
        yield model
    finally:
        DSparkForCausalLM.unwrap(model)


def generate(model: PreTrainedModel, prompts: Sequence[list[int]], **kwargs: Any) -> Any:
    """Call the wrapped model's `generate()`, asking for statistics."""
    kwargs = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **kwargs}
    return plain_generate(model, prompts, **kwargs)


def counts(record: Any) -> dict[str, Any]:
    """Return what a record counts."""
    return {name: getattr(record, name) for name in COUNTS}


def stop_ids(subject: Subject, size: int) -> list[int]:
    """Choose end tokens from the plain text so that rows stop at several different steps."""
    return [subject.new_tokens(0)[5], subject.new_tokens(1)[11], subject.new_tokens(size - 1)[8]]


def stops_after(new_tokens: list[int], eos: Sequence[int]) -> int:
    """Return how many tokens a row has when it stops, its end token included."""
    found = [step + 1 for step, token in enumerate(new_tokens) if token in eos]
    return min(found, default=len(new_tokens))


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("size", SIZES)
def test_a_ragged_batch_equals_plain_and_its_rows_alone(
    subject: Subject, size: int, kind: str
) -> None:
    plain = plain_generate(subject.model, PROMPTS[:size], max_new_tokens=NEW_TOKENS)
    with wrapped(subject.model, DRAFTERS[kind](subject.right_drafter())) as model:
        out = generate(model, PROMPTS[:size])
        assert out.sequences.tolist() == plain.tolist()
        for index in range(size):
            alone = generate(model, [PROMPTS[index]])
            new_tokens = out.sequences[index, -NEW_TOKENS:].tolist()
            assert alone.sequences[0, LENGTHS[index] :].tolist() == new_tokens
            assert counts(alone.speculation[0]) == counts(out.speculation[index])
            assert out.speculation[index].accepted > 0


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("size", SIZES)
def test_rows_that_stop_early_are_padded_as_plain_decoding_pads(
    subject: Subject, size: int, kind: str
) -> None:
    eos = stop_ids(subject, size)
    lengths = [stops_after(subject.new_tokens(index), eos) for index in range(size)]
    assert len(set(lengths)) >= min(size, 3)
    options = {"eos_token_id": eos, "pad_token_id": OTHER_PAD}
    plain = plain_generate(subject.model, PROMPTS[:size], max_new_tokens=NEW_TOKENS, **options)
    drafter = DRAFTERS[kind](subject.right_drafter())
    with wrapped(subject.model, drafter) as model:
        out = generate(model, PROMPTS[:size], **options)
        assert out.sequences.tolist() == plain.tolist()
        assert [record.new_tokens for record in out.speculation] == lengths
        assert len(set(drafter.freed)) == len(drafter.freed) == size
        for index in range(size):
            alone = generate(model, [PROMPTS[index]], **options)
            new_tokens = alone.sequences[0, LENGTHS[index] :].tolist()
            assert new_tokens == subject.new_tokens(index)[: lengths[index]]
            assert counts(alone.speculation[0]) == counts(out.speculation[index])


@pytest.mark.parametrize("eos", ["none", "one", "two"])
def test_end_tokens_may_be_absent_one_or_several(subject: Subject, eos: str) -> None:
    ids: Any = stop_ids(subject, 2)
    ids = {"none": None, "one": ids[0], "two": ids[:2]}[eos]
    plain = plain_generate(subject.model, PROMPTS[:2], max_new_tokens=NEW_TOKENS, eos_token_id=ids)
    with wrapped(subject.model, subject.right_drafter()) as model:
        out = generate(model, PROMPTS[:2], eos_token_id=ids)
    assert out.sequences.tolist() == plain.tolist()


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_any_length_limit_is_kept_exactly(subject: Subject, limit: int) -> None:
    plain = plain_generate(subject.model, PROMPTS[:3], max_new_tokens=limit)
    with wrapped(subject.model, subject.right_drafter()) as model:
        out = generate(model, PROMPTS[:3], max_new_tokens=limit)
    assert out.sequences.tolist() == plain.tolist()
    assert [record.new_tokens for record in out.speculation] == [limit] * 3
    assert all((record.rounds == 0) == (limit == 1) for record in out.speculation)


def test_a_row_that_is_padding_but_for_one_token_equals_its_run_alone(subject: Subject) -> None:
    single, longest = LENGTHS.index(1), LENGTHS.index(26)
    rows = [PROMPTS[single], PROMPTS[longest]]
    plain = plain_generate(subject.model, rows, max_new_tokens=NEW_TOKENS)
    with wrapped(subject.model, subject.right_drafter()) as model:
        out = generate(model, rows)
    assert out.sequences.tolist() == plain.tolist()
    assert out.sequences[0, -NEW_TOKENS:].tolist() == subject.new_tokens(single)
    assert out.speculation[0].accepted == out.speculation[0].verified > 0


def test_a_mask_may_be_left_out_when_the_padding_says_it_all(subject: Subject) -> None:
    ids, _ = left_padded(PROMPTS[:3])
    plain = subject.model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
    with wrapped(subject.model, subject.right_drafter()) as model:
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
    assert out.tolist() == plain.tolist()


def test_a_hole_in_the_mask_gives_what_plain_decoding_gives(subject: Subject) -> None:
    ids, mask = left_padded(PROMPTS[:3])
    mask[1, 8:10] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "do_sample": False}
    plain = subject.model.generate(**inputs, max_new_tokens=NEW_TOKENS)
    with wrapped(subject.model, subject.right_drafter()) as model:
        out = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
    assert out.tolist() == plain.tolist()


def test_several_sequences_of_greedy_decoding_are_refused_as_plain_refuses_them(
    subject: Subject,
) -> None:
    with pytest.raises(ValueError, match="num_return_sequences") as plain:
        plain_generate(subject.model, PROMPTS[:2], max_new_tokens=4, num_return_sequences=2)
    with (
        wrapped(subject.model, subject.right_drafter()) as model,
        pytest.raises(ValueError, match="num_return_sequences") as ours,
    ):
        generate(model, PROMPTS[:2], max_new_tokens=4, num_return_sequences=2)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_next"])
def test_left_padding_never_gives_a_score_that_is_not_a_number(
    name: str, dtype: torch.dtype, attention: str
) -> None:
    model = ARCHITECTURES[name]().to(dtype)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"{name} does not offer sdpa")
    model.set_attn_implementation(attention)
    prompts = [prompt(length, seed=60 + length) for length in (3, 17, 40)]
    alone = [plain_generate(model, [ids], max_new_tokens=8)[0].tolist() for ids in prompts]
    right = RightDrafter({tuple(ids): full for ids, full in zip(prompts, alone, strict=True)})
    with wrapped(model, NoisyDrafter(right, VOCAB)):
        out = generate(model, prompts, max_new_tokens=8, output_scores=True, output_logits=True)
    assert len(out.scores) == len(out.logits) == 8
    assert torch.stack(out.scores).isfinite().all()
    assert torch.stack(out.logits).isfinite().all()
    assert all(record.verified > 0 for record in out.speculation)
    if dtype == torch.float32:
        for row, ids, full in zip(out.sequences.tolist(), prompts, alone, strict=True):
            assert row[-8:] == full[len(ids) :]
            assert row[: 40 - len(ids)] == [PAD] * (40 - len(ids))
