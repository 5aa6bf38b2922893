"""A choice of drafters: lossless, quick to find the better one, and cheap where lookup does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from block_drafters import Recording, block_drafter
from drafters import RandomDrafter, RightDrafter, SampledDrafter, WrongDrafter
from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.config import SCHEDULES
from dspark_hf.drafting.base import FeatureDrafter
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.drafting.choice import SIGNALS, DrafterChoice, choose_between
from dspark_hf.drafting.lookup import LookupDrafter
from dspark_hf.drafting.resolve import resolve_drafter
from dspark_hf.errors import ConfigError
from dspark_hf.values import DraftRequest, Proposal
from harness import generate, oracle_of, wrapped
from tiny import VOCAB, llama, plain_generate, prompt

CONFIG = DSparkConfig(schedule="fixed", max_draft_tokens=5, never_slower=False)
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
NEW_TOKENS = 24


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("dspark_hf.drafting.choice.perf_counter", made)
    return made


@dataclass
class Member:
    """A drafter of known cost that is right about the first `right` tokens of its drafts."""

    name: str
    clock: Clock
    text: Sequence[int]
    right: int = 0
    length: int = 5
    cost: float = 0.0
    first_cost: float = 0.0
    signal: int = 0
    asked: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Take the time it costs."""
        self.clock.now += self.cost + (0 if self.asked else self.first_cost)
        self.asked.append(len(requests[0].ids))
        answers = []
        for request in requests:
            end = len(request.ids)
            ids = list(self.text[end : end + self.length])
            ids = ids[: self.right] + [token + 1 for token in ids[self.right :]]
            answers.append(Proposal(ids[: request.max_tokens], signal=self.signal))
        return answers

    def free(self, row_id: int) -> None:
        """Note it."""
        self.freed.append(row_id)


TEXT = [3 * i % 97 for i in range(2000)]


def play(
    choice: DrafterChoice, clock: Clock, rounds: int, round_s: float = 1.0, row: int = 0
) -> list[int]:
    """Decode the text by the choice's drafts; return the member of every proposal, -1 for none."""
    ids, chosen = list(TEXT[:10]), []
    for _ in range(rounds):
        (proposal,) = choice.propose([DraftRequest(row, ids, 5, None, torch.Generator())])
        chosen.append(proposal.signal // SIGNALS if proposal.ids else -1)
        kept = 0
        while kept < len(proposal.ids) and proposal.ids[kept] == TEXT[len(ids) + kept]:
            kept += 1
        ids += TEXT[len(ids) : len(ids) + kept + 1]
        clock.now += round_s
    return chosen


@pytest.mark.parametrize("better", [0, 1])
def test_the_better_of_two_that_cost_alike_is_found_and_kept(clock: Clock, better: int) -> None:
    members = [
        Member(f"m{i}", clock, TEXT, right=4 if i == better else 0, cost=0.05) for i in range(2)
    ]
    chosen = play(choose_between(members), clock, 60)
    assert chosen[-40:].count(better) >= 38
    assert chosen[:6].count(better) >= 1


def test_lookup_that_wins_is_not_paid_for_twice(clock: Clock) -> None:
    dear = Member("dear", clock, TEXT, right=3, cost=0.3)
    free = Member("free", clock, TEXT, right=5)
    chosen = play(choose_between([dear, free]), clock, 60)
    assert chosen[-50:] == [1] * 50
    assert len(dear.asked) <= 8


def test_a_new_row_starts_from_what_others_showed(clock: Clock) -> None:
    dear = Member("dear", clock, TEXT, right=5, cost=0.3)
    free = Member("free", clock, TEXT, right=1)
    choice = choose_between([dear, free])
    play(choice, clock, 30)
    assert play(choice, clock, 10, row=1) == [0] * 10


def test_a_dear_drafter_is_asked_where_it_promises_more_than_its_cost(clock: Clock) -> None:
    dear = Member("dear", clock, TEXT, right=5, cost=0.3)
    free = Member("free", clock, TEXT, right=1)
    chosen = play(choose_between([dear, free]), clock, 60)
    assert chosen[-50:].count(0) >= 48


def test_a_drafter_that_costs_more_than_it_brings_is_left_alone(clock: Clock) -> None:
    dear = Member("dear", clock, TEXT, right=0, cost=0.5)
    silent = Member("silent", clock, TEXT, length=0)
    chosen = play(choose_between([dear, silent]), clock, 100)
    assert len(dear.asked) <= 15, "it was meant to be tried now and then only"
    assert len(silent.asked) >= 98
    assert chosen.count(-1) >= 85


def test_a_drafter_that_gets_better_is_found_again(clock: Clock) -> None:
    late = Member("late", clock, TEXT, right=0, cost=0.1)
    steady = Member("steady", clock, TEXT, right=1, cost=0.1)
    choice = choose_between([late, steady])
    assert play(choice, clock, 60)[-20:].count(1) >= 17
    late.right = 5
    choice.free(0)
    assert play(choice, clock, 200)[-60:].count(0) >= 57


def test_reading_the_prompt_is_not_taken_for_the_cost_of_a_draft(clock: Clock) -> None:
    reader = Member("reader", clock, TEXT, right=5, cost=0.1, first_cost=50.0)
    free = Member("free", clock, TEXT, right=0)
    assert play(choose_between([reader, free]), clock, 40)[-30:].count(0) >= 28


def test_a_pause_of_the_schedule_is_not_taken_for_a_slow_round(clock: Clock) -> None:
    choice = choose_between([Member("a", clock, TEXT), Member("b", clock, TEXT)])
    play(choice, clock, 10)
    before = choice._round_s
    clock.now += 500
    choice.propose([DraftRequest(0, TEXT[:400], 5, None, torch.Generator())])
    assert choice._round_s == before


def test_signals_of_members_do_not_collide(clock: Clock) -> None:
    members = [Member(f"m{i}", clock, TEXT, right=2, signal=s) for i, s in enumerate((7, 40))]
    choice = choose_between(members)
    ids, seen = list(TEXT[:10]), set()
    for i in range(2):
        members[1 - i].length = 0
        members[i].length = 5
        (proposal,) = choice.propose([DraftRequest(i, ids, 5, None, torch.Generator())])
        seen.add(proposal.signal)
        assert choice.name_of(proposal.signal) == f"m{i}"
    assert seen == {7, SIGNALS + SIGNALS - 1}


def test_a_row_is_freed_with_every_member(clock: Clock) -> None:
    members = [Member(f"m{i}", clock, TEXT) for i in range(2)]
    choice = choose_between(members)
    play(choice, clock, 3, row=5)
    choice.free(5)
    choice.free(6)
    assert all(member.freed == [5, 6] for member in members)
    assert not choice._rows


# with a real target


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> torch.Tensor:
    return plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)


def members_of(name: str, model: PreTrainedModel, plain: torch.Tensor) -> list[Any]:
    right = oracle_of(plain, PROMPTS)
    block = block_drafter(model, texts=plain[:, 14:-8].tolist())
    return {
        "block and lookup": [block, "lookup"],
        "wrong and right": [WrongDrafter(right, VOCAB), right],
        "three": ["lookup", RandomDrafter(VOCAB), block],
        "drawn and not": [SampledDrafter(VOCAB), "lookup"],
    }[name]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["block and lookup", "wrong and right", "three"])
def test_a_choice_leaves_the_text_alone(
    model: PreTrainedModel, plain: torch.Tensor, name: str, schedule: str
) -> None:
    config = replace(CONFIG, schedule=schedule, confidence_threshold=0.3)
    with wrapped(model, members_of(name, model, plain), config):
        out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == plain.tolist()
    assert {record.path for record in out.speculation} == {"flat"}


@pytest.mark.parametrize("name", ["block and lookup", "drawn and not"])
def test_coupled_text_is_the_same_with_a_choice(
    model: PreTrainedModel, plain: torch.Tensor, name: str
) -> None:
    config = replace(CONFIG, acceptance="coupled", seed=3)
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "temperature": 0.4}
    with wrapped(model, None, config):
        told = generate(model, PROMPTS, **kwargs).sequences.tolist()
    with wrapped(model, members_of(name, model, plain), config):
        out = generate(model, PROMPTS, **kwargs)
    assert out.sequences.tolist() == told
    assert sum(record.verified for record in out.speculation) > 0


def test_the_member_that_is_always_right_wins_in_generate(
    model: PreTrainedModel, plain: torch.Tensor
) -> None:
    right = oracle_of(plain, PROMPTS)
    with wrapped(model, [WrongDrafter(right, VOCAB), right], CONFIG):
        out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    for record in out.speculation:
        assert record.accepted > 3 * (NEW_TOKENS // 6)
        assert record.rounds < 12


def test_features_reach_the_member_that_reads_them(
    model: PreTrainedModel, plain: torch.Tensor
) -> None:
    reader = Recording(block_drafter(model, texts=plain[:, 14:].tolist()))
    choice = choose_between([reader, LookupDrafter()])
    assert isinstance(choice, FeatureDrafter)
    assert not isinstance(choose_between([LookupDrafter(), RandomDrafter(VOCAB)]), FeatureDrafter)
    with wrapped(model, choice, CONFIG):
        out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert reader.taken
    assert sum(record.accepted for record in out.speculation) > 0
    assert reader.drafter._context is None


# what a list is made of


def test_a_list_is_resolved_member_by_member(model: PreTrainedModel) -> None:
    made = resolve_drafter(["lookup", RandomDrafter(VOCAB), None], model)
    assert isinstance(made, DrafterChoice)
    assert [type(member) for member in made.members] == [LookupDrafter, RandomDrafter]
    assert made.name == "lookup+test"
    only = resolve_drafter([None, "lookup"], model)
    assert isinstance(only, LookupDrafter)
    block = block_drafter(model)
    assert isinstance(resolve_drafter((block,), model), BlockDrafter)


@pytest.mark.parametrize("drafter", [[], [None]])
def test_a_list_without_drafters_is_refused(model: PreTrainedModel, drafter: Any) -> None:
    with pytest.raises(ConfigError, match="at least two drafters to choose from; got 0"):
        resolve_drafter(drafter, model)


def test_two_members_that_read_features_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"at most one .*got \['block', 'block'\]"):
        resolve_drafter([block_drafter(model), block_drafter(model, seed=1)], model)


@pytest.mark.parametrize("drafter", [7, ["lookup", 7], [[7]], RightDrafter])
def test_what_is_no_drafter_is_refused_in_a_list_too(model: PreTrainedModel, drafter: Any) -> None:
    with pytest.raises(ConfigError, match="or a list of these; got"):
        resolve_drafter(drafter, model)
    with pytest.raises(ConfigError):
        DSparkForCausalLM.wrap(model, drafter=drafter)
    assert not isinstance(model, DSparkForCausalLM)
