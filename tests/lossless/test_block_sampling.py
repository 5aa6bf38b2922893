"""Sampling with block drafters is exact: real drafts, confidences and schedules, enumerated.

A target of four tokens; for every committed text the real drafter is run along every block it could
draw, and what it reports (distributions over the target's ids, confidences) is taken as a table.
All outcomes of accept-or-resample are then expanded in float64. Draws themselves are checked by
counting, and coupled text must be the same whatever is drafted.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from block_drafters import FULL, SLIDING, block_drafter, features_of
from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.config import SCHEDULES
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.values import DraftRequest
from dspark_hf.verification.acceptance import acceptance_probability, residual_distribution
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.schedules import base
from dspark_hf.verification.schedules.base import RowState
from dspark_hf.verification.schedules.build import build_schedule
from enumeration import BIASED, EXACT, HORIZON, Text
from harness import generate, wrapped
from tiny import VOCAB, llama, plain_generate, prompt

SIZE, NUM_DRAFT = 4, 2
PROMPT = (1, 3, 0, 2, 2, 1)
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {"head": "vanilla"},
    "gated-mask-filling": {"head": "gated", "reads_anchor": False, "block_size": NUM_DRAFT + 1},
    "rnn-pruned": {"head": "rnn", "draft_ids": (0, 3)},
    "none-sliding": {"head": "none", "layer_types": (SLIDING, FULL), "sliding_window": 2},
}


@dataclass(frozen=True)
class Branch:
    """A block the drafter may draw: its tokens, probability, distributions and confidences."""

    ids: Text
    mass: float
    probs: torch.Tensor
    confidence: Sequence[float]


@dataclass
class Forced:
    """A warp that makes the drafter draw given tokens, and notes the probabilities they had."""

    path: Text
    told: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        self.told.append(logits[0].double().softmax(-1))
        return torch.nn.functional.one_hot(
            torch.tensor([self.path[len(self.told) - 1]]), logits.shape[-1]
        ).float()


@cache
def small_target() -> PreTrainedModel:
    return llama(2, vocab_size=SIZE, hidden_size=16, initializer_range=0.4)


@cache
def branches(kind: str, text: Text) -> list[Branch]:
    """Every block the drafter of a kind may draw behind a text."""
    drafter = small_drafter(kind)
    ids, spec = [*PROMPT, *text], drafter.model.spec
    drafter.take(0, 0, features_of(small_target(), ids[:-1], spec))
    found = []
    for path in itertools.product(range(spec.draft_vocab_size), repeat=NUM_DRAFT):
        warp = Forced(path)
        request = DraftRequest(0, ids, NUM_DRAFT, warp, torch.Generator())
        (answer,) = drafter.propose([request])
        told = torch.stack(warp.told)
        mass = float(told[range(NUM_DRAFT), path].prod())
        assert answer.probs[range(NUM_DRAFT), answer.ids].tolist() == [1.0] * NUM_DRAFT
        spread = drafter.vocabulary.scatter(told, SIZE)
        found.append(Branch(tuple(answer.ids), mass, spread, answer.confidence))
    drafter.free(0)
    return found


@cache
def target_law(text: Text) -> torch.Tensor:
    with torch.no_grad():
        logits = small_target()(torch.tensor([[*PROMPT, *text]])).logits[0, -1]
    return logits.double().softmax(-1)


def schedule_of(name: str) -> base.Schedule:
    """A schedule that knows a cost curve of stairs."""
    costs = StepCosts()
    for width, seconds in {1: 1.0, 2: 1.5, 3: 1.55}.items():
        costs.observe(width, 10, seconds)
    config = DSparkConfig(schedule=name, max_draft_tokens=NUM_DRAFT, confidence_threshold=0.5)
    return build_schedule(config, costs)


def deviation(kind: str, name: str, *, is_drawn: bool = True) -> float:
    """The largest error of the law of HORIZON tokens."""
    schedule = schedule_of(name)
    rows = [RowState(0, 10, 9)]

    def one_round(text: Text) -> dict[Text, float]:
        """Texts after one round, cut at the horizon, with their probabilities."""
        outcomes: dict[Text, float] = defaultdict(float)

        def emit(prefix: Text, law: torch.Tensor, mass: float) -> None:
            for token, prob in enumerate(law.tolist()):
                outcomes[(*prefix, token)] += mass * prob

        for branch in branches(kind, text):
            draft = base.Draft(NUM_DRAFT, 0, branch.confidence, is_drawn=is_drawn)
            state = copy.deepcopy(schedule)
            state.ask(rows)
            part, prefix = branch.mass, text
            for k in range(min(state.cut(rows, [draft])[0], HORIZON - len(text))):
                token, law = branch.ids[k], target_law(prefix)
                keep = float(acceptance_probability(law, token, branch.probs[k]))
                if keep < 1:
                    left = residual_distribution(law, token, branch.probs[k])
                    emit(prefix, left, part * (1 - keep))
                part *= keep
                prefix = (*prefix, token)
            if len(prefix) == HORIZON:
                outcomes[prefix] += part
            else:
                emit(prefix, target_law(prefix), part)
        return outcomes

    texts: dict[Text, float] = {(): 1.0}
    for _ in range(HORIZON):  # every round emits at least one token
        following: dict[Text, float] = defaultdict(float)
        for text, mass in texts.items():
            ends = {text: 1.0} if len(text) == HORIZON else one_round(text)
            for longer, prob in ends.items():
                following[longer] += mass * prob
        texts = following
    worst = 0.0
    for text in itertools.product(range(SIZE), repeat=HORIZON):
        exact = 1.0
        for k, token in enumerate(text):
            exact *= float(target_law(text[:k])[token])
        worst = max(worst, abs(texts[text] - exact))
    return worst


@cache
def small_drafter(kind: str) -> BlockDrafter:
    settings = {"block_size": NUM_DRAFT, "num_target_layers": 3, **KINDS[kind]}
    drafter = block_drafter(small_target(), seed=3, **settings)
    head = drafter.model.confidence_head
    assert head is not None
    head.proj.weight.mul_(3)
    return drafter


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_sampled_with_block_drafts_follows_the_targets_distribution(
    kind: str, name: str
) -> None:
    assert deviation(kind, name) < EXACT


def test_the_same_drafts_are_caught_when_the_schedule_may_look_ahead() -> None:
    worst = max(deviation("vanilla", name, is_drawn=False) for name in SCHEDULES)
    assert worst > BIASED


def test_a_confidence_looks_at_tokens_before_its_own_only() -> None:
    for kind in ("vanilla", "gated-mask-filling", "rnn-pruned"):
        told = defaultdict(set)
        for branch in branches(kind, (2, 0)):
            for k in range(NUM_DRAFT):
                told[k, branch.ids[:k]].add(round(branch.confidence[k], 6))
        assert all(len(values) == 1 for values in told.values())
        assert len({min(told[key]) for key in told if key[0] == 1}) > 1


@pytest.mark.parametrize("kind", ["vanilla", "rnn-pruned"])
def test_tokens_are_drawn_from_the_distribution_that_is_reported(kind: str) -> None:
    drafter, num_draws = small_drafter(kind), 3000
    spec = drafter.model.spec
    logits = torch.randn(1, spec.draft_vocab_size, generator=torch.Generator().manual_seed(1))
    stream = torch.Generator().manual_seed(2)
    request = DraftRequest(0, [1], 1, lambda scores: scores.softmax(-1), stream)
    probs: list[list[torch.Tensor]] = [[]]
    counts = torch.zeros(SIZE)
    for _ in range(num_draws):
        counts[drafter._choose([request], [0], logits, probs)] += 1
    laws = drafter._over_target(probs[0])
    law = laws[0]
    assert all(torch.equal(law, row) for row in laws)
    assert law.shape == (SIZE,)
    assert float(law.sum()) == pytest.approx(1)
    assert not counts[law == 0].any()
    seen = law > 0
    expected = law[seen] * num_draws
    statistic = ((counts[seen] - expected).square() / expected).sum()
    p = torch.special.gammaincc(torch.tensor((int(seen.sum()) - 1) / 2), statistic / 2)
    assert float(p) > 1e-4


def test_a_row_without_numbers_to_draw_by_gets_a_one_point_distribution() -> None:
    drafter = small_drafter("vanilla")
    stream = torch.Generator().manual_seed(2)
    request = DraftRequest(0, [1], 1, lambda scores: scores * float("nan"), stream)
    probs: list[list[torch.Tensor]] = [[]]
    chosen = drafter._choose([request], [0], torch.tensor([[0.0, 2.0, 1.0, 0.0]]), probs)
    assert chosen.tolist() == [1]
    assert probs[0][0].tolist() == [0.0, 1.0, 0.0, 0.0]


PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.3, "max_new_tokens": 14}


@cache
def subject() -> tuple[PreTrainedModel, BlockDrafter]:
    """A wrapped target, and a drafter that was taught its greedy texts."""
    model = llama()
    texts = [plain_generate(model, [ids], max_new_tokens=14)[0].tolist() for ids in PROMPTS]
    return DSparkForCausalLM.wrap(model), block_drafter(model, "gated", texts=texts)


def sampled(prompts: list[list[int]], drafter: Any, config: DSparkConfig) -> Any:
    model, _ = subject()
    model.dspark.drafter = drafter
    return generate(model, prompts, dspark=config, **SAMPLING)


def new_ids(out: Any) -> list[list[int]]:
    return out.sequences[:, -SAMPLING["max_new_tokens"] :].tolist()


def test_coupled_text_is_the_same_for_every_schedule_and_without_a_drafter() -> None:
    config = DSparkConfig(acceptance="coupled", seed=11, max_draft_tokens=5, never_slower=False)
    told = new_ids(sampled(PROMPTS, None, config))
    accepted = 0
    for name in SCHEDULES:
        out = sampled(PROMPTS, subject()[1], replace(config, schedule=name))
        assert new_ids(out) == told
        accepted += sum(record.accepted for record in out.speculation)
    assert accepted > 0


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_a_sampled_row_is_the_same_alone_and_beside_rows_that_want_more(acceptance: str) -> None:
    config = DSparkConfig(acceptance=acceptance, seed=5, schedule="fixed", max_draft_tokens=5)
    together = sampled(PROMPTS, subject()[1], config)
    for i, ids in enumerate(PROMPTS):
        alone = sampled([ids], subject()[1], config)
        assert new_ids(alone)[0] == new_ids(together)[i]
        one, other = alone.speculation[0], together.speculation[i]
        assert one.accepted_per_round == other.accepted_per_round
    assert sum(record.accepted for record in together.speculation) > 0


def test_a_row_draws_as_often_as_it_was_asked_whatever_its_neighbours_want() -> None:
    model, drafter = subject()
    spec = drafter.model.spec
    streams = []
    for others in ([], [5]):
        stream = torch.Generator().manual_seed(1)
        requests = []
        for row, most in enumerate([2, *others]):
            drafter.take(row, 0, features_of(model, PROMPTS[row][:-1], spec))
            warp = torch.nn.Softmax(dim=-1)
            generator = stream if row == 0 else torch.Generator()
            requests.append(DraftRequest(row, PROMPTS[row], most, warp, generator))
        answers = drafter.propose(requests)
        assert [len(answer.ids) for answer in answers] == [2, *others]
        assert answers[0].probs.shape == (2, VOCAB)
        streams.append((answers[0].ids, stream.get_state().tolist()))
        for row in range(len(requests)):
            drafter.free(row)
    assert streams[0] == streams[1]


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_sampling_the_only_likely_token_is_greedy_decoding(acceptance: str) -> None:
    model, drafter = subject()
    with wrapped(model, drafter, DSparkConfig(acceptance=acceptance, schedule="fixed")):
        greedy = generate(model, PROMPTS, max_new_tokens=14)
        out = generate(model, PROMPTS, do_sample=True, top_k=1, max_new_tokens=14)
    DSparkForCausalLM.wrap(model)
    assert out.sequences.tolist() == greedy.sequences.tolist()
