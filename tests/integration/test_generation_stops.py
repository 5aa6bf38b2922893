"""Whatever ends a text ends it at the same token as plain decoding, inside an accepted block too.

Also what looks on while tokens are made: custom processors and criteria, and streamers. They must
see the calls that plain decoding makes, in order, each with the true prefix of its row.

A criterion asked once per block overshoots: https://github.com/huggingface/transformers/issues/48039.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from drafters import RightDrafter
from harness import (
    CONFIG,
    DRAFTERS,
    Recorder,
    drafts_were_verified,
    generate,
    oracle_of,
    paths,
    toy_tokenizer,
    wrapped,
)
from tiny import llama, plain_generate, prompt

NEW_TOKENS = 18
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
LONGEST = 14
NEVER = 11
"""A token the plain texts do not contain: an end token that is set and never said."""
BLOCK = CONFIG.max_draft_tokens + 1
KINDS = ("lookup", "itself", "noisy_copy", "noisy", "wrong", "ragged")


@dataclass(frozen=True)
class Subject:
    """A model, its plain text for the prompts when nothing stops it, and who knows that text."""

    model: PreTrainedModel
    new: list[list[int]]
    right: RightDrafter


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = llama()
    base = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert not (base[:, LONGEST:] == NEVER).any()
    return Subject(model, base[:, LONGEST:].tolist(), oracle_of(base, PROMPTS))


@dataclass
class StopAtLength(StoppingCriteria):
    """Stops every row after a number of tokens, and keeps the prefixes it was shown."""

    length: int
    seen: list[list[list[int]]] = field(default_factory=list)
    num_scores: list[int | None] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        self.num_scores.append(None if scores is None else len(scores))
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@dataclass
class StopBehind(StoppingCriteria):
    """Stops a row whose last token is one of the given; each row's answer is its own."""

    tokens: tuple[int, ...]
    dspark_per_row: bool = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], torch.tensor(self.tokens))


@dataclass
class CountingProcessor(LogitsProcessor):
    """Bans a token that depends on how often it was called, and keeps what it was shown."""

    calls: list[list[list[int]]] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids.tolist())
        if len(self.calls) % 3 == 0:
            scores = scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)
        return scores


@dataclass
class SecondBest(LogitsProcessor):
    """Bans the best token where the prefix has even length; each row's answer is its own."""

    dspark_per_row: bool = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 2 == 0:
            scores = scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)
        return scores


@pytest.mark.parametrize("step", range(2 * BLOCK + 1))
def test_an_end_token_at_any_place_of_a_block_ends_the_row_there(
    subject: Subject, step: int
) -> None:
    eos = subject.new[2][step]
    step = subject.new[2].index(eos)
    plain = plain_generate(
        subject.model, PROMPTS[2:], max_new_tokens=NEW_TOKENS, eos_token_id=[eos, NEVER]
    )
    with wrapped(subject.model, subject.right) as model:
        out = generate(model, PROMPTS[2:], max_new_tokens=NEW_TOKENS, eos_token_id=[eos, NEVER])
    assert out.sequences.tolist() == plain.tolist()
    assert out.sequences.shape[1] == LONGEST + step + 1
    record = out.speculation[0]
    assert record.path == "flat"
    assert record.new_tokens == step + 1
    # Token 0 comes from the prompt's forward, and the last of each block from the target itself.
    assert record.cut_rounds == int(step % BLOCK != 0)
    assert not record.rounds or record.verified > 0


@pytest.mark.parametrize("step", [0, 2, 5, 8])
@pytest.mark.parametrize("drafter", KINDS)
def test_a_stop_string_ends_the_text_inside_a_block(
    subject: Subject, drafter: str, step: int
) -> None:
    tokenizer = toy_tokenizer()
    text = tokenizer.decode(subject.new[0])
    # Second letter of one token and first of the next: no single token holds it.
    stop = text[2 * step + 1 : 2 * step + 3]
    kwargs = {"max_new_tokens": NEW_TOKENS, "stop_strings": ["zz", stop], "tokenizer": tokenizer}
    plain = plain_generate(subject.model, PROMPTS[:1], **kwargs)
    with wrapped(subject.model, DRAFTERS[drafter](subject.model, subject.right)) as model:
        out = generate(model, PROMPTS[:1], **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert plain.shape[1] <= len(PROMPTS[0]) + step + 2
    assert paths(out) == {"flat"}
    if drafter == "itself":
        new_tokens = out.speculation[0].new_tokens
        assert out.speculation[0].cut_rounds == int((new_tokens - 1) % BLOCK != 0)


@pytest.mark.parametrize("drafter", ["lookup", "itself", "noisy"])
def test_stop_strings_end_each_row_of_a_batch_with_an_end_token(
    subject: Subject, drafter: str
) -> None:
    tokenizer = toy_tokenizer()
    texts = [tokenizer.decode(row) for row in subject.new]
    stops = [texts[0][7:10], texts[1][15:18], texts[2][20:24]]
    kwargs = {"max_new_tokens": NEW_TOKENS, "stop_strings": stops, "tokenizer": tokenizer}
    kwargs["eos_token_id"] = NEVER
    plain = plain_generate(subject.model, PROMPTS, **kwargs)
    with wrapped(subject.model, DRAFTERS[drafter](subject.model, subject.right)) as model:
        out = generate(model, PROMPTS, **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"flat"}
    lengths = {record.new_tokens for record in out.speculation}
    assert len(lengths) == 3, "rows were meant to stop at different steps"
    if drafter == "itself":
        assert any(record.cut_rounds for record in out.speculation)


def test_stop_strings_in_a_batch_without_an_end_token_run_in_the_models_own_loop(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = toy_tokenizer()
    stop = tokenizer.decode(subject.new[0])[7:10]
    kwargs = {"max_new_tokens": NEW_TOKENS, "stop_strings": stop, "tokenizer": tokenizer}
    plain = plain_generate(subject.model, PROMPTS, **kwargs)
    with wrapped(subject.model, subject.right) as model:
        out = generate(model, PROMPTS, **kwargs)
        assert list(model.dspark.metrics.fallback_reasons.values()) == [1]
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"transformers"}
    assert "rows that stop go on" in caplog.text


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("max_time", [0.0, 1000.0])
def test_a_time_limit_ends_the_text_after_the_token_that_passes_it(
    subject: Subject, max_time: float, size: int
) -> None:
    kwargs = {"max_new_tokens": NEW_TOKENS, "max_time": max_time, "eos_token_id": NEVER}
    plain = plain_generate(subject.model, PROMPTS[:size], **kwargs)
    with wrapped(subject.model, subject.right) as model:
        out = generate(model, PROMPTS[:size], **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"flat"}
    assert [r.new_tokens for r in out.speculation] == [1 if max_time == 0 else NEW_TOKENS] * size
    assert drafts_were_verified(out)


@pytest.mark.parametrize("wants_scores", [False, True])
@pytest.mark.parametrize("extra", [1, 3, 7, 9])
@pytest.mark.parametrize("drafter", KINDS)
def test_a_criterion_of_the_callers_sees_every_token_of_one_row_once(
    subject: Subject, drafter: str, extra: int, wants_scores: bool
) -> None:
    kwargs = {"max_new_tokens": NEW_TOKENS, "output_scores": wants_scores}
    ours, theirs = (StopAtLength(len(PROMPTS[0]) + extra) for _ in range(2))
    plain = generate(
        subject.model, PROMPTS[:1], stopping_criteria=StoppingCriteriaList([theirs]), **kwargs
    )
    with wrapped(subject.model, DRAFTERS[drafter](subject.model, subject.right)) as model:
        out = generate(model, PROMPTS[:1], stopping_criteria=StoppingCriteriaList([ours]), **kwargs)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert ours.seen == theirs.seen
    assert ours.num_scores == theirs.num_scores
    assert paths(out) == {"flat"}
    if drafter == "itself":
        assert out.speculation[0].cut_rounds == int((extra - 1) % BLOCK != 0)


def test_an_undeclared_criterion_in_a_batch_runs_in_the_models_own_loop(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"max_new_tokens": NEW_TOKENS, "eos_token_id": NEVER}
    ours, theirs = StopAtLength(LONGEST + 5), StopAtLength(LONGEST + 5)
    plain = plain_generate(
        subject.model, PROMPTS, stopping_criteria=StoppingCriteriaList([theirs]), **kwargs
    )
    with wrapped(subject.model, subject.right) as model:
        out = generate(model, PROMPTS, stopping_criteria=StoppingCriteriaList([ours]), **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert ours.seen == theirs.seen
    assert paths(out) == {"transformers"}
    assert "StopAtLength" in caplog.text
    assert "dspark_per_row" in caplog.text


@pytest.mark.parametrize("drafter", KINDS)
def test_a_criterion_declared_per_row_stops_each_row_of_a_batch(
    subject: Subject, drafter: str
) -> None:
    stops = (subject.new[0][3], subject.new[1][10], subject.new[2][6])
    criteria = StoppingCriteriaList([StopBehind(stops)])
    kwargs = {"max_new_tokens": NEW_TOKENS, "eos_token_id": NEVER, "stopping_criteria": criteria}
    plain = plain_generate(subject.model, PROMPTS, **kwargs)
    with wrapped(subject.model, DRAFTERS[drafter](subject.model, subject.right)) as model:
        out = generate(model, PROMPTS, **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {"flat"}
    if drafter == "itself":
        assert any(record.cut_rounds for record in out.speculation)


@pytest.mark.parametrize("drafter", KINDS)
def test_a_stateful_processor_gets_exactly_the_calls_of_plain_decoding(
    subject: Subject, drafter: str
) -> None:
    ours, theirs = CountingProcessor(), CountingProcessor()
    kwargs = {"max_new_tokens": NEW_TOKENS}
    plain = plain_generate(
        subject.model, PROMPTS[:1], logits_processor=LogitsProcessorList([theirs]), **kwargs
    )
    right = oracle_of(plain, PROMPTS[:1])
    with wrapped(subject.model, DRAFTERS[drafter](subject.model, right)) as model:
        out = generate(model, PROMPTS[:1], logits_processor=LogitsProcessorList([ours]), **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert plain[0, len(PROMPTS[0]) :].tolist() != subject.new[0]
    assert ours.calls == theirs.calls
    assert paths(out) == {"flat"}


def test_an_undeclared_processor_in_a_batch_runs_in_the_models_own_loop(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = CountingProcessor(), CountingProcessor()
    kwargs = {"max_new_tokens": NEW_TOKENS}
    plain = plain_generate(
        subject.model, PROMPTS, logits_processor=LogitsProcessorList([theirs]), **kwargs
    )
    with wrapped(subject.model, subject.right) as model:
        out = generate(model, PROMPTS, logits_processor=LogitsProcessorList([ours]), **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert ours.calls == theirs.calls
    assert paths(out) == {"transformers"}
    assert "CountingProcessor" in caplog.text


@pytest.mark.parametrize("drafter", KINDS)
def test_a_processor_declared_per_row_is_exact_in_a_batch(subject: Subject, drafter: str) -> None:
    processors = LogitsProcessorList([SecondBest()])
    kwargs = {"max_new_tokens": NEW_TOKENS, "logits_processor": processors}
    plain = plain_generate(subject.model, PROMPTS, **kwargs)
    right = oracle_of(plain, PROMPTS)
    with wrapped(subject.model, DRAFTERS[drafter](subject.model, right)) as model:
        out = generate(model, PROMPTS, **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert plain[:, LONGEST:].tolist() != subject.new
    assert paths(out) == {"flat"}


@pytest.mark.parametrize("stop", [None, 4])
@pytest.mark.parametrize("drafter", KINDS)
def test_a_streamer_gets_the_pieces_of_plain_decoding(
    subject: Subject, drafter: str, stop: int | None
) -> None:
    eos = NEVER if stop is None else subject.new[0][stop]
    kwargs = {"max_new_tokens": NEW_TOKENS, "eos_token_id": eos}
    ours, theirs = Recorder(), Recorder()
    plain_generate(subject.model, PROMPTS[:1], streamer=theirs, **kwargs)
    with wrapped(subject.model, DRAFTERS[drafter](subject.model, subject.right)) as model:
        out = generate(model, PROMPTS[:1], streamer=ours, **kwargs)
    assert ours.pieces == theirs.pieces
    assert ours.ended == theirs.ended == 1
    assert paths(out) == {"flat"}
    assert [token for piece in ours.pieces for token in piece] == out.sequences[0].tolist()


def test_a_streamer_with_several_rows_runs_in_the_models_own_loop(subject: Subject) -> None:
    ours, theirs = Recorder(), Recorder()
    plain_generate(subject.model, PROMPTS, streamer=theirs, max_new_tokens=5)
    with wrapped(subject.model, subject.right) as model:
        out = generate(model, PROMPTS, streamer=ours, max_new_tokens=5)
        assert model.dspark.metrics.fallback_reasons == {"a streamer with several rows": 1}
    assert ours.pieces == theirs.pieces
    assert paths(out) == {"transformers"}


def test_text_streams_to_another_thread_and_ends(subject: Subject) -> None:
    streamer = TextIteratorStreamer(toy_tokenizer(), skip_prompt=True, timeout=60)
    kwargs = {"max_new_tokens": NEW_TOKENS, "streamer": streamer}
    with wrapped(subject.model, subject.right) as model:
        worker = threading.Thread(target=plain_generate, args=(model, PROMPTS[:1]), kwargs=kwargs)
        worker.start()
        text = "".join(streamer)
        worker.join()
    assert text == toy_tokenizer().decode(subject.new[0])


def test_a_line_about_the_own_loop_is_logged_once(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    with wrapped(subject.model, subject.right) as model, caplog.at_level(logging.WARNING):
        for _ in range(3):
            generate(model, PROMPTS[:1], max_new_tokens=2, use_cache=False)
        assert model.dspark.metrics.fallback_calls == 3
    assert caplog.text.count("use_cache=False") == 1
