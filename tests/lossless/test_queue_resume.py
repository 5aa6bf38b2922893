"""Requests that were begun elsewhere: texts are those of a call that was never broken off."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import tiny
from block_drafters import block_drafter
from dspark_hf import DSparkConfig, GenerationQueue, QueueConfig
from dspark_hf.errors import ConfigError, InputError, QueueError
from dspark_hf.generation import make_rows
from dspark_hf.takeover import PreparedCall, capturing
from harness import toy_tokenizer, wrapped

FIXED = DSparkConfig(schedule="fixed", max_draft_tokens=4, never_slower=False)
COUPLED = DSparkConfig(
    schedule="fixed", max_draft_tokens=4, never_slower=False, acceptance="coupled", seed=3
)
PROMPT = tiny.prompt(21, seed=4)
NEW = 24
CUTS = [0, 1, 7, NEW - 1, NEW]
WAIT_S = 60
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.3}


def new_tokens(model: Any, ids: Any, **kwargs: Any) -> list[list[int]]:
    prompt = torch.tensor(ids)
    prompt = prompt[None] if prompt.dim() == 1 else prompt
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs)
    return [row[prompt.shape[1] :].tolist() for row in out]


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3, tiny.falcon_h1, tiny.bloom])
@pytest.mark.parametrize("kind", ["greedy", "coupled"])
def test_the_text_is_that_of_an_unbroken_call_wherever_it_was_cut(make: Any, kind: str) -> None:
    model, options = make(), {"greedy": GREEDY, "coupled": SAMPLED}[kind]
    with wrapped(model, "lookup", FIXED if kind == "greedy" else COUPLED):
        (expected,) = new_tokens(model, PROMPT, **options)
        with GenerationQueue(model) as queue:
            heard: dict[int, list[int]] = {cut: [] for cut in CUTS}
            handles = [
                queue.resume(
                    PROMPT, [expected[:cut]],
                    on_token=lambda place, token, cut=cut: heard[cut].append(token), **options,
                )
                for cut in CUTS
            ]  # fmt: skip
            results = [handle.result(WAIT_S) for handle in handles]
    for cut, handle, result in zip(CUTS, handles, results, strict=True):
        assert result.ids == expected
        assert result.output[0].tolist() == PROMPT + expected
        assert handle.pieces == heard[cut] == expected[cut:]
        (record,) = result.stats.records
        assert record.new_tokens == len(record.accepted_mask) == NEW


def test_rows_of_one_call_are_cut_each_at_its_own_place() -> None:
    model = tiny.llama()
    prompts = torch.tensor([tiny.prompt(9, seed=s) for s in range(3)])
    options = {**GREEDY, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3}
    with wrapped(model, "lookup", FIXED):
        expected = new_tokens(model, prompts.tolist(), **options)
        begun = [expected[0][:5], [], expected[2]]
        with GenerationQueue(model) as queue:
            heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
            handle = queue.resume(
                prompts, begun, on_token=lambda i, token: heard[i].append(token), **options
            )
            result = handle.result(WAIT_S)
    assert result.output[:, 9:].tolist() == expected
    assert heard == {0: expected[0][5:], 1: expected[1], 2: []}


@pytest.mark.parametrize("kind", ["lookup", "block"])
def test_drafters_and_shared_beginnings_see_the_same_row(kind: str) -> None:
    model = tiny.llama()
    ids, drafter = tiny.prompt(40, seed=2), kind
    if kind == "block":
        with wrapped(model, "lookup", FIXED):
            drafter = block_drafter(model, texts=[ids + new_tokens(model, ids, **GREEDY)[0]])
    with wrapped(model, drafter, FIXED):
        (expected,) = new_tokens(model, ids, **GREEDY)
        # Prompts are fed in parts: a beginning must not be shared before it was read.
        with GenerationQueue(model, config=QueueConfig(prefill_tokens=7)) as queue:
            running = queue.submit(tiny.prompt(5, seed=8), **GREEDY)
            resumed = [queue.resume(ids, [expected[:9]], **GREEDY) for _ in range(3)]
            whole = queue.submit(ids, **GREEDY)
            results = [handle.result(WAIT_S) for handle in [*resumed, whole]]
            running.result(WAIT_S)
            again = queue.submit(ids, **GREEDY).result(WAIT_S)
    assert [result.ids for result in [*results, again]] == [expected] * 5
    assert again.stats.cached_tokens == 32
    accepted = [result.stats.records[0].accepted for result in (again, results[-1])]
    assert accepted[0] == accepted[1]
    assert kind == "lookup" or accepted[0] > 0


def test_text_pieces_go_on_where_they_ended_and_stop_strings_still_stop() -> None:
    model, tokenizer = tiny.llama(), toy_tokenizer()
    text = tokenizer.decode(PROMPT)
    with wrapped(model, "lookup", FIXED), GenerationQueue(model, tokenizer) as queue:
        whole = queue.submit(text, **GREEDY).result(WAIT_S)
        for cut in (1, 6, 11):
            resumed = queue.resume(text, [whole.ids[:cut]], **GREEDY)
            assert resumed.result(WAIT_S).text == whole.text
            assert tokenizer.decode(whole.ids[:cut]) + "".join(resumed.pieces) == whole.text
        stop = whole.text[17:20]
        ended = queue.submit(text, stop_strings=[stop], **GREEDY).result(WAIT_S)
        assert len(ended.ids) < NEW
        for cut in (3, len(ended.ids)):
            resumed = queue.resume(text, [ended.ids[:cut]], stop_strings=[stop], **GREEDY)
            assert resumed.result(WAIT_S).ids == ended.ids


def test_scores_that_are_wanted_are_computed_again() -> None:
    model = tiny.llama()
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    with wrapped(model, "lookup", FIXED), GenerationQueue(model) as queue:
        whole = queue.submit(PROMPT, **options).result(WAIT_S)
        resumed = queue.resume(PROMPT, [whole.ids[:9]], **options)
        result = resumed.result(WAIT_S)
        assert resumed.pieces == whole.ids[9:]
        assert len(result.output.scores) == NEW
        for mine, theirs in zip(result.output.scores, whole.output.scores, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        # Without scores the dict of a request that came with all its tokens has no cache.
        options.pop("output_scores")
        finished = queue.resume(PROMPT, [whole.ids], **options).result(WAIT_S)
        assert finished.output.sequences[0].tolist() == PROMPT + whole.ids


class Alternating(LogitsProcessor):
    """Forbids the best token at every second call: its answer follows from how often it was."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2:
            scores[0, scores.argmax()] = -torch.inf
        return scores


class AfterCalls(StoppingCriteria):
    """Stops at its 13th call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([self.calls >= 13])


@pytest.mark.parametrize(
    "make",
    [lambda: {"logits_processor": [Alternating()]}, lambda: {"stopping_criteria": [AfterCalls()]}],
    ids=["processor", "criterion"],
)
def test_what_keeps_state_sees_every_token_again(make: Any) -> None:
    model = tiny.llama()
    with wrapped(model, "lookup", FIXED), GenerationQueue(model) as queue:
        whole = queue.submit(PROMPT, **make(), **GREEDY).result(WAIT_S)
        resumed = queue.resume(PROMPT, [whole.ids[:8]], **make(), **GREEDY)
        assert resumed.result(WAIT_S).ids == whole.ids
        assert resumed.pieces == whole.ids[8:]
        wrong = [*whole.ids[:5], whole.ids[5] ^ 1, *whole.ids[6:8]]
        failed = queue.resume(PROMPT, [wrong], **make(), **GREEDY)
        with pytest.raises(QueueError, match="token 5 is"):
            failed.result(WAIT_S)
        assert queue.submit(PROMPT, **GREEDY).result(WAIT_S).ids


def test_what_does_not_fit_is_refused_at_once() -> None:
    model = tiny.llama()
    with wrapped(model, "lookup", FIXED), GenerationQueue(model) as queue:
        with pytest.raises(ConfigError, match=r"committed must hold one list .* 1; got 2"):
            queue.resume(PROMPT, [[1], [2]], **GREEDY)
        with pytest.raises(InputError, match=r"0\.\.159.*got 160"):
            queue.resume(PROMPT, [[1, 160]], **GREEDY)
        with pytest.raises(ConfigError, match="model's own loop"):
            queue.resume(PROMPT, [[1]], num_beams=2, **GREEDY)


def test_a_resumed_row_draws_as_if_nothing_was_drawn_before() -> None:
    """Two tokens of a known law, the row resumed between them: pairs follow the product law.

    Had the stream begun again, the second token would be the first one every time.
    """
    model = tiny.llama()
    law = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = torch.full((tiny.VOCAB,), -torch.inf)
    logits[: len(law)] = law.log()
    draws = 400
    with wrapped(model, "lookup"), capturing(), pytest.raises(PreparedCall) as prepared:
        model.generate(torch.tensor([PROMPT]), **SAMPLED)
    call, pairs = prepared.value.call, Counter()
    for seed in range(draws):
        (begun,) = make_rows(model, call, DSparkConfig(seed=seed))
        (resumed,) = make_rows(model, call, DSparkConfig(seed=seed))
        first = begun.rule.decide(logits, None, None, 0).token
        resumed.restore([first])
        pairs[first, resumed.rule.decide(logits, None, None, 0).token] += 1
    expected = torch.outer(law, law) * draws
    seen = torch.tensor([[pairs[a, b] for b in range(4)] for a in range(4)], dtype=torch.float)
    # Fixed seeds: 15 degrees of freedom, of which 0.1 % lie beyond 37.7.
    assert ((seen - expected) ** 2 / expected).sum() < 37.7
