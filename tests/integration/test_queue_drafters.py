"""Drafters that fail, answer nonsense or are slow: switched off, tried again, never felt in a text.

And requests that bring a drafter, or a way of reading, of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from block_drafters import block_drafter
from drafters import NoisyDrafter, RandomDrafter, SampledDrafter
from dspark_hf import QueueConfig
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.errors import ConfigError
from dspark_hf.serving.guard import CLOSED, HALF_OPEN, OPEN, Breaker, GuardedDrafter, guard
from dspark_hf.values import DraftRequest, Proposal
from harness import noisy_copy, oracle_of, wrapped
from queues import FIXED, Asked, assert_same, greedy, stepped
from tiny import VOCAB, plain_generate, prompt

PROMPTS = [prompt(n, seed=n) for n in (4, 9, 13)]
FAILURES, RETRY_S = 3, 5.0


@dataclass
class Clock:
    """Seconds that a test sets."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_through_later() -> None:
    clock = Clock()
    breaker = Breaker(FAILURES, RETRY_S, clock)
    for _ in range(3):
        assert not breaker.fail()
        assert not breaker.fail()
        breaker.succeed()
    assert breaker.state == CLOSED
    assert [breaker.fail() for _ in range(3)] == [False, False, True]
    assert (breaker.state, breaker.allows()) == (OPEN, False)
    clock.now += RETRY_S - 0.1
    # What fails meanwhile without having been allowed does not put the try off.
    assert not breaker.fail()
    assert breaker.state == OPEN
    clock.now += 0.2
    assert (breaker.state, breaker.allows()) == (HALF_OPEN, True)
    assert breaker.fail()
    assert breaker.state == OPEN
    clock.now += RETRY_S
    breaker.succeed()
    assert (breaker.state, breaker.times_opened) == (CLOSED, 2)
    assert not breaker.fail()


class Faulty:
    """Drafts like another one until it is told to do something else."""

    name = "faulty"

    def __init__(self, inner: Any) -> None:
        self.inner, self.fault, self.asked = inner, "", 0
        self.freed: list[int] = []
        self.held: set[int] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> Any:
        self.asked += 1
        self.held.update(request.row_id for request in requests)
        answers = self.inner.propose(requests)
        return FAULTS[self.fault](answers) if self.fault in FAULTS else answers

    def free(self, row_id: int) -> None:
        self.freed.append(row_id)
        self.held.discard(row_id)
        self.inner.free(row_id)
        if self.fault == "free":
            raise LookupError("no such row")


def raises(_: Any) -> Any:
    raise LookupError("nothing found")


def each(change: Callable[[Proposal], Any]) -> Callable[[list[Proposal]], list[Any]]:
    return lambda answers: [change(answer) for answer in answers]


FAULTS: dict[str, Callable[[list[Proposal]], Any]] = {
    "raises": raises,
    "no list": lambda answers: None,
    "too few": lambda answers: answers[1:],
    "too many": lambda answers: [*answers, Proposal()],
    "no proposals": each(lambda answer: None),
    "foreign ids": each(lambda answer: Proposal([VOCAB])),
    "negative ids": each(lambda answer: Proposal([-1])),
    "words": each(lambda answer: Proposal(["a"])),  # type: ignore[list-item]
    "narrow probs": each(lambda answer: Proposal([1], torch.ones(1, 5) / 5)),
    "few probs": each(lambda answer: Proposal([1, 2], torch.ones(1, VOCAB) / VOCAB)),
    "probs of another token": each(lambda answer: Proposal([1], torch.eye(VOCAB)[2:3])),
    "probs that are no numbers": each(
        lambda answer: Proposal([1], torch.full((1, VOCAB), torch.nan))
    ),
    "odd confidences": each(lambda answer: Proposal([1], confidence=[7.0])),
    "odd signal": each(lambda answer: replace(answer, signal=None)),  # type: ignore[arg-type]
}


def oracle(model: Any) -> NoisyDrafter:
    """Return a drafter that is often right."""
    full = torch.cat(
        [plain_generate(model, [ids], max_new_tokens=60)[:, -60:] for ids in PROMPTS[:1]]
    )
    whole = torch.cat([torch.tensor([PROMPTS[0]]), full], dim=1)
    return NoisyDrafter(oracle_of(whole, PROMPTS[:1]), VOCAB)


def sampled(seed: int) -> Asked:
    """Return a sampled request under rejection, where a draft's distribution matters."""
    config = replace(FIXED, seed=seed)
    return greedy(PROMPTS[1], 20, do_sample=True, dspark=config)


@pytest.mark.parametrize("fault", [*FAULTS, "free"])
def test_a_faulty_drafter_is_switched_off_tried_again_and_costs_no_text(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, clock = tiny.llama(), Clock()
    drafter = Faulty(oracle(model))
    one, drawn = greedy(PROMPTS[0], 60), sampled(5)
    with wrapped(model, drafter, FIXED):
        alone = one.alone(model)
        settings = {"drafter_failures": FAILURES, "drafter_retry_s": RETRY_S}
        with stepped(model, **settings) as queue, caplog.at_level(logging.WARNING):
            (breaker,) = queue.places.guard._breakers
            breaker.clock = clock
            handle = queue.submit(one)
            queue.submit(drawn)
            queue.step(3)
            assert handle.stats is not None
            drafter.fault = fault
            if fault == "free":
                for _ in range(FAILURES):
                    queue.submit(greedy([3], 1))
                queue.step(2)
            else:
                queue.step(FAILURES)
            assert queue.places.guard.states() == {"faulty": OPEN}
            asked = drafter.asked
            queue.step(2)
            assert drafter.asked == asked
            clock.now += RETRY_S
            assert queue.places.guard.states() == {"faulty": HALF_OPEN}
            drafter.fault = ""
            queue.step()
            assert drafter.asked == asked + 1
            assert queue.places.guard.states() == {"faulty": CLOSED}
            results = queue.finish()
        assert results[0].ids == alone.ids
        assert 0 < results[0].stats.records[0].accepted < alone.records[0].accepted
        assert len(results[1].ids) == 20
        assert not drafter.held
        assert len(drafter.freed) == len(set(drafter.freed))
    told = [r.getMessage() for r in caplog.records if "is switched off for 5 s" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Drafter faulty")


def test_one_bad_proposal_does_not_cost_the_other_rows_theirs() -> None:
    good, bad = Proposal([3, 4]), Proposal([VOCAB])
    main = SimpleNamespace(name="mixed", propose=lambda requests: [good, bad, good])
    guarded = guard(main, QueueConfig(), VOCAB)
    requests = [DraftRequest(n, [1, 2], 4, None, torch.Generator()) for n in range(3)]
    for request in requests:
        guarded.assign(request.row_id, main)
    assert [list(p.ids) for p in guarded.propose(requests)] == [[3, 4], [], [3, 4]]
    assert guarded._breakers[0].failures == 1


def test_a_slow_draft_is_used_and_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = Clock(0.0)
    takes = [0.0]

    def propose(requests: Sequence[DraftRequest]) -> list[Proposal]:
        seconds.now += takes[0]
        return [Proposal([5]) for _ in requests]

    monkeypatch.setattr("dspark_hf.serving.guard.perf_counter", seconds)
    main = SimpleNamespace(name="slow", propose=propose, free=lambda row_id: None)
    guarded = guard(main, QueueConfig(drafter_failures=2, drafter_slow_factor=20), VOCAB)
    guarded.assign(1, main)
    request = [DraftRequest(1, [1, 2], 4, None, torch.Generator())]

    def ask(takes_s: float) -> tuple[list[int], int]:
        takes[0] = takes_s
        (answer,) = guarded.propose(request)
        return list(answer.ids), guarded._breakers[0].failures

    # No step was timed yet: a second is allowed.
    assert ask(0.9) == ([5], 0)
    assert ask(1.1) == ([5], 1)
    guarded.step_s = 0.01
    assert ask(0.19) == ([5], 0)
    assert ask(0.21) == ([5], 1)
    assert ask(0.21) == ([5], 2)
    assert guarded.states() == {"slow": OPEN}
    assert ask(0.0) == ([], 2)


@pytest.mark.parametrize("make", [tiny.llama, tiny.bloom], ids=["flat", "rowwise"])
def test_a_drafter_that_cannot_take_features_loses_the_row_and_no_text(make: Any) -> None:
    model = make()
    texts = plain_generate(model, [PROMPTS[0]], max_new_tokens=30).tolist()
    drafter = block_drafter(model, texts=texts)
    one = greedy(PROMPTS[0], 30)
    with wrapped(model, drafter, FIXED):
        alone = one.alone(model)
        take, left = drafter.take, [6]

        def failing(row_id: int, start: int, features: torch.Tensor) -> None:
            left[0] -= 1
            if not left[0]:
                raise LookupError("no room for features")
            take(row_id, start, features)

        with stepped(model) as queue:
            queue.places.guard.reader = SimpleNamespace(take=failing)
            queue.submit(one)
            (result,) = queue.finish()
            queue.submit(one)
            again = queue.finish()[1]
        assert result.ids == alone.ids
        assert result.stats.records[0].drafted < alone.records[0].drafted
        assert_same(again, alone)


def test_a_queue_without_a_drafter_can_be_traced() -> None:
    with (
        wrapped(tiny.llama(), None, FIXED) as model,
        model.dspark.trace() as rounds,
        stepped(model) as queue,
    ):
        queue.submit(greedy(PROMPTS[0], 4))
        queue.submit(greedy(PROMPTS[0] * 3, 4, prompt_lookup_num_tokens=3))
        queue.finish()
    assert {entry.drafter for entry in rounds} <= {"", "lookup"}
    assert len(rounds) == 6


def test_traces_name_each_rows_own_drafter() -> None:
    model = tiny.llama()
    assistant = noisy_copy(model)
    with (
        wrapped(model, RandomDrafter(VOCAB, name="dice"), FIXED),
        model.dspark.trace() as rounds,
        stepped(model) as queue,
    ):
        queue.submit(greedy(PROMPTS[0], 4))
        queue.submit(greedy(PROMPTS[1], 4, assistant_model=assistant))
        rows = [row.row_id for row in queue.places.waiting[0].rows]
        queue.finish()
    named = {entry.row_id in rows: entry.drafter for entry in rounds if entry.drafted}
    assert named == {True: "dice", False: "model"}


@pytest.mark.parametrize("main", ["lookup", "dice", None])
def test_requests_may_bring_a_drafter_of_their_own(main: Any) -> None:
    model = tiny.llama()
    assistant = noisy_copy(model)
    drafter = RandomDrafter(VOCAB, name="dice") if main == "dice" else main
    with wrapped(model, drafter, FIXED):
        asked = [
            greedy(PROMPTS[0] * 4, 20),
            greedy(PROMPTS[0] * 4, 20, assistant_model=assistant),
            greedy(PROMPTS[0] * 4, 20, prompt_lookup_num_tokens=3),
            greedy(PROMPTS[2], 20, assistant_model=assistant),
        ]
        alone = [one.alone(model) for one in asked]
        assert alone[1].records[0].accepted > 0
        with stepped(model, max_rows=3) as queue:
            for one in asked:
                queue.submit(one)
            results = queue.finish()
            names = set(queue.places.guard.states())
        for result, one in zip(results, alone, strict=True):
            assert_same(result, one)
        assert {"model", "lookup"} <= names
        drafters = [d for d in queue.places.guard._drafters if d.name == "model"]
        assert len(drafters) == 1
        assert not drafters[0]._fed


def test_a_drafter_that_reads_features_must_be_the_models_own() -> None:
    model = tiny.llama()
    with wrapped(model, "lookup", FIXED), stepped(model) as queue:
        model.dspark.lookups[3] = block_drafter(model)
        with pytest.raises(ConfigError, match="own drafter must not read the target's features"):
            queue.submit(greedy(PROMPTS[0], 4, prompt_lookup_num_tokens=3,
                                max_matching_ngram_size=3))  # fmt: skip


SPARSE = SparsePolicy(tokens=48, recent_pages=2, min_context=0)


@pytest.mark.parametrize("model_reads", ["all", "sparsely"])
def test_reading_sparsely_is_each_requests_own_choice(model_reads: str) -> None:
    """Also where the model's settings say otherwise, and where a context said so at submit()."""
    model, ids = tiny.llama(max_position_embeddings=512), prompt(160, seed=9)
    sparse = replace(FIXED, sparse=SPARSE)
    base = sparse if model_reads == "sparsely" else FIXED
    with wrapped(model, SampledDrafter(VOCAB), base):
        dense, few = greedy(ids, 16, dspark=FIXED), greedy(ids, 16, dspark=sparse)
        usual, inside = greedy(ids, 16), greedy(ids, 16, dspark=FIXED)
        alone = [one.alone(model) for one in (dense, few, usual)]
        assert alone[0].ids != alone[1].ids
        with stepped(model) as queue:
            for one in (dense, few, usual):
                queue.submit(one)
            with model.dspark.sparse_attention(SPARSE):
                queue.submit(inside)
            results = queue.finish()
        for result, one in zip(results, [*alone, alone[1]], strict=True):
            assert_same(result, one)


def test_a_guard_numbers_drafters_of_one_name() -> None:
    guarded = GuardedDrafter(None, QueueConfig(), VOCAB)
    assert guarded.states() == {}
    for row, name in enumerate(["lookup", "model", "lookup", "lookup"]):
        guarded.assign(row, SimpleNamespace(name=name))  # type: ignore[arg-type]
    assert list(guarded.states()) == ["lookup", "model", "lookup#2", "lookup#3"]
