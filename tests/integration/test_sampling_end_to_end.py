"""Sampled text follows the target's distribution, and seeds mean what they promise.

A target with twelve tokens is sampled many times through `generate()`; the counts of four new
tokens are compared with the exact joint distribution, enumerated from the target's logits. Seeds
are fixed, so a passing test passes always; a control shows that a drafter which misreports its
distribution is caught with the same number of samples.

Fault guarded against: https://github.com/huggingface/transformers/issues/32867 (drafts proposed
from another distribution than the accept test uses).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters import PureDrafter, RaggedDrafter, RandomDrafter, SampledDrafter, StatingDrafter
from dspark_hf import DSparkConfig
from dspark_hf.values import DraftRequest, Proposal
from harness import CONFIG, counted_forwards, generate, noisy_copy, paths, wrapped
from tiny import VOCAB, llama, plain_generate, prompt

SMALL_VOCAB = 12
PROMPT = [*range(1, SMALL_VOCAB), *range(SMALL_VOCAB - 1, 0, -2)]
"""Holds every token but padding, so that lookup always finds something to propose."""
NEW_TOKENS = 4
"""The first comes from the prompt's forward; two drafts and a bonus follow."""
NUM_SAMPLES, PER_CALL = 1500, 500
P_LIMIT = 1e-4
MIN_EXPECTED = 5.0
"""Cells expected less often are counted together, as the chi-square approximation asks."""


@dataclass(frozen=True)
class Law:
    """Sampling settings and the distribution they make of logits, written out independently."""

    kwargs: dict[str, Any]
    probs: Callable[[torch.Tensor], torch.Tensor]


def keep_best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return probabilities over the `count` best tokens."""
    lowest = logits.sort(descending=True).values[..., count - 1 : count]
    return logits.masked_fill(logits < lowest, -torch.inf).softmax(-1)


def keep_mass(logits: torch.Tensor, mass: float) -> torch.Tensor:
    """Return probabilities over the fewest best tokens that hold at least `mass`."""
    probs, order = logits.softmax(-1).sort(descending=True)
    kept = probs * (probs.cumsum(-1) - probs < mass)
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    return kept / kept.sum(-1, keepdim=True)


LAWS = {
    "cool": Law({"temperature": 0.7, "top_k": 0}, lambda x: (x / 0.7).softmax(-1)),
    "hot": Law({"temperature": 1.5, "top_k": 0}, lambda x: (x / 1.5).softmax(-1)),
    "top_k": Law({"temperature": 1.5, "top_k": 5}, lambda x: keep_best(x / 1.5, 5)),
    "top_p": Law({"temperature": 1.5, "top_k": 0, "top_p": 0.7}, lambda x: keep_mass(x / 1.5, 0.7)),
}


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    return llama(
        2, vocab_size=SMALL_VOCAB, hidden_size=16, num_hidden_layers=2, initializer_range=0.35
    )


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@torch.no_grad()
def exact_joint(model: PreTrainedModel, law: Law) -> torch.Tensor:
    """Return the probability of each text of NEW_TOKENS tokens, of shape (V, V, V, V)."""
    joint = torch.ones(())
    for length in range(NEW_TOKENS):
        texts = list(itertools.product(range(SMALL_VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *text] for text in texts])
        probs = law.probs(model(ids, use_cache=False).logits[:, -1].double())
        joint = joint[..., None] * probs.reshape(*[SMALL_VOCAB] * (length + 1))
    return joint


def sample(model: PreTrainedModel, drafter: Any, law: Law, config: DSparkConfig) -> torch.Tensor:
    """Return how often each text was sampled, of shape (V, V, V, V)."""
    counts = torch.zeros([SMALL_VOCAB] * NEW_TOKENS, dtype=torch.double)
    with wrapped(model, drafter, config):
        for call in range(NUM_SAMPLES // PER_CALL):
            torch.manual_seed(call)
            out = generate(
                model,
                [PROMPT],
                do_sample=True,
                num_return_sequences=PER_CALL,
                max_new_tokens=NEW_TOKENS,
                **law.kwargs,
            )
            assert paths(out) == {"flat"}
            assert sum(record.verified for record in out.speculation) > PER_CALL / 2
            new = out.sequences[:, len(PROMPT) :]
            counts.index_put_(tuple(new.T), torch.ones(PER_CALL).double(), accumulate=True)
    return counts


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Return the chi-square probability of counts at least this far from `probs`."""
    expected = probs.flatten() * counts.sum()
    found = counts.flatten()
    assert not found[expected == 0].any(), "a text without probability was sampled"
    is_common = expected >= MIN_EXPECTED
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    found = torch.cat([found[is_common], found[~is_common].sum()[None]])
    found, expected = found[expected > 0], expected[expected > 0]
    statistic = ((found - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2), statistic / 2))


def p_values(counts: torch.Tensor, joint: torch.Tensor) -> dict[str, float]:
    """Compare whole texts, and each pair of neighbouring tokens, with the exact distribution."""
    pairs = {"texts": p_value(counts, joint)}
    for place in range(NEW_TOKENS - 1):
        others = [axis for axis in range(NEW_TOKENS) if axis not in (place, place + 1)]
        pairs[f"tokens {place}, {place + 1}"] = p_value(counts.sum(others), joint.sum(others))
    return pairs


@dataclass(frozen=True)
class Misreporting(PureDrafter):
    """Proposes the likeliest token of a distribution and reports the distribution itself."""

    honest: SampledDrafter

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Replace the draws by the modes."""
        proposal = self.honest.propose_row(replace(request, max_tokens=1))
        return Proposal(proposal.probs.argmax(-1).tolist(), proposal.probs)


DRAFTERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "sampled": lambda model: SampledDrafter(SMALL_VOCAB),
    "noisy_copy": lambda model: noisy_copy(model, scale=0.4),
    "one_point": lambda model: RandomDrafter(SMALL_VOCAB),
    "ragged": lambda model: RaggedDrafter(SampledDrafter(SMALL_VOCAB, seed=5)),
    "lookup": lambda model: "lookup",
}
CASES = [
    *[("sampled", law, "rejection") for law in LAWS],
    ("noisy_copy", "cool", "rejection"),
    ("noisy_copy", "top_k", "rejection"),
    ("one_point", "hot", "rejection"),
    ("one_point", "top_p", "rejection"),
    ("ragged", "cool", "rejection"),
    ("lookup", "cool", "rejection"),
    ("sampled", "hot", "coupled"),
    ("noisy_copy", "top_p", "coupled"),
]


@pytest.mark.parametrize(("drafter", "law", "acceptance"), CASES)
def test_sampled_text_follows_the_targets_distribution(
    small: PreTrainedModel, drafter: str, law: str, acceptance: str
) -> None:
    config = replace(CONFIG, acceptance=acceptance)
    counts = sample(small, DRAFTERS[drafter](small), LAWS[law], config)
    found = p_values(counts, exact_joint(small, LAWS[law]))
    assert min(found.values()) > P_LIMIT, found


def test_sampled_text_follows_the_target_when_confidences_cut_the_drafts(
    small: PreTrainedModel,
) -> None:
    config = replace(CONFIG, schedule="threshold", confidence_threshold=0.6)
    drafter = StatingDrafter(SampledDrafter(SMALL_VOCAB), levels=(0.5, 0.9, 0.95))
    counts = sample(small, drafter, LAWS["hot"], config)
    found = p_values(counts, exact_joint(small, LAWS["hot"]))
    assert min(found.values()) > P_LIMIT, found


def test_a_drafter_that_misreports_its_distribution_would_be_noticed(
    small: PreTrainedModel,
) -> None:
    drafter = Misreporting(SampledDrafter(SMALL_VOCAB))
    counts = sample(small, drafter, LAWS["hot"], CONFIG)
    found = p_values(counts, exact_joint(small, LAWS["hot"]))
    assert min(found.values()) < P_LIMIT / 100, found


PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
SAMPLING = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 16}
COUPLED = replace(CONFIG, acceptance="coupled", seed=11)


def new_ids(out: Any) -> list[list[int]]:
    """Return the new tokens of every row."""
    return out.sequences[:, -SAMPLING["max_new_tokens"] :].tolist()


def test_coupled_text_is_the_same_for_all_drafters_and_schedules(model: PreTrainedModel) -> None:
    texts, rates = [], set()
    drafters = [None, "lookup", model, noisy_copy(model), RandomDrafter(VOCAB)]
    drafters += [SampledDrafter(VOCAB), RaggedDrafter(RandomDrafter(VOCAB))]
    configs = [COUPLED, replace(COUPLED, max_draft_tokens=1), replace(COUPLED, max_draft_tokens=9)]
    configs += [replace(COUPLED, schedule="auto", never_slower=slow) for slow in (False, True)]
    others = ("prefix", "budget", "threshold")
    configs += [replace(COUPLED, schedule=name, confidence_threshold=0.4) for name in others]
    for drafter, config in itertools.product(drafters, configs):
        with wrapped(model, drafter, config):
            out = generate(model, PROMPTS, **SAMPLING)
        texts.append(new_ids(out))
        rates.add(sum(record.accepted for record in out.speculation))
        assert paths(out) == {"flat"}
    assert all(text == texts[0] for text in texts)
    assert len(rates) > 5, "drafters were meant to differ in what is accepted"


def test_coupled_text_of_a_row_is_the_same_alone_and_in_any_batch(model: PreTrainedModel) -> None:
    with wrapped(model, noisy_copy(model), COUPLED):
        together = new_ids(generate(model, PROMPTS, **SAMPLING))
        for order in ([0], [1], [2], [2, 0], [1, 2, 0]):
            chosen = [PROMPTS[i] for i in order]
            assert new_ids(generate(model, chosen, **SAMPLING)) == [together[i] for i in order]


def test_coupled_sequences_of_one_prompt_differ_and_start_with_the_one_alone(
    model: PreTrainedModel,
) -> None:
    with wrapped(model, noisy_copy(model), COUPLED):
        alone = new_ids(generate(model, PROMPTS[:1], **SAMPLING))
        several = new_ids(generate(model, PROMPTS[:1], num_return_sequences=4, **SAMPLING))
        again = new_ids(generate(model, PROMPTS[:2], num_return_sequences=4, **SAMPLING))
    assert several[0] == alone[0]
    assert len({tuple(row) for row in several}) == 4
    assert again[:4] == several


def test_a_row_sampled_by_rejection_is_the_same_alone_and_in_a_batch(
    model: PreTrainedModel,
) -> None:
    config = replace(CONFIG, seed=5)
    with wrapped(model, SampledDrafter(VOCAB), config):
        together = new_ids(generate(model, PROMPTS, **SAMPLING))
        alone = [new_ids(generate(model, [ids], **SAMPLING))[0] for ids in PROMPTS]
    assert together == alone


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_a_seed_in_the_settings_makes_calls_equal_and_another_seed_does_not(
    model: PreTrainedModel, acceptance: str
) -> None:
    texts = []
    for seed in (1, 1, 2):
        with wrapped(model, noisy_copy(model), replace(CONFIG, acceptance=acceptance, seed=seed)):
            texts += [new_ids(generate(model, PROMPTS, **SAMPLING)) for _ in range(2)]
    assert texts[0] == texts[1] == texts[2] == texts[3] != texts[4] == texts[5]


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_the_global_seed_makes_calls_reproducible_and_calls_in_a_row_differ(
    model: PreTrainedModel, acceptance: str
) -> None:
    with wrapped(model, noisy_copy(model), replace(CONFIG, acceptance=acceptance)):
        runs = []
        for _ in range(2):
            torch.manual_seed(21)
            runs.append([new_ids(generate(model, PROMPTS, **SAMPLING)) for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_settings_of_one_call_may_bring_a_seed(model: PreTrainedModel) -> None:
    with wrapped(model, noisy_copy(model), COUPLED):
        first = new_ids(generate(model, PROMPTS, **SAMPLING))
        other = new_ids(generate(model, PROMPTS, dspark=replace(COUPLED, seed=12), **SAMPLING))
        last = new_ids(generate(model, PROMPTS, **SAMPLING))
    assert first == last != other


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
def test_greedy_decoding_leaves_the_global_random_state_alone(
    model: PreTrainedModel, drafter: str
) -> None:
    torch.manual_seed(33)
    before = torch.get_rng_state()
    with wrapped(model, model if drafter == "itself" else drafter):
        generate(model, PROMPTS, max_new_tokens=6)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_with_a_seed_leaves_the_global_random_state_alone(model: PreTrainedModel) -> None:
    torch.manual_seed(33)
    before = torch.get_rng_state()
    for config in (COUPLED, replace(CONFIG, seed=3)):
        with wrapped(model, noisy_copy(model), config):
            generate(model, PROMPTS, **SAMPLING)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampled_drafts_save_forwards_of_the_target(model: PreTrainedModel) -> None:
    twin = noisy_copy(model, scale=0.0)
    with wrapped(model, twin, replace(CONFIG, seed=4)), counted_forwards(model) as widths:
        generate(model, PROMPTS[:1], **SAMPLING)
        widths.clear()
        out = generate(model, PROMPTS[:1], **SAMPLING)
    # A drafter that draws from the target's own distribution is always believed.
    assert out.speculation[0].accepted == out.speculation[0].verified
    assert len(widths) == 1 + out.speculation[0].rounds == 4


def test_sampled_text_equals_greedy_text_where_only_one_token_has_probability(
    model: PreTrainedModel,
) -> None:
    plain = plain_generate(model, PROMPTS, max_new_tokens=16)
    for acceptance in ("rejection", "coupled"):
        with wrapped(model, noisy_copy(model), replace(CONFIG, acceptance=acceptance)):
            out = generate(model, PROMPTS, do_sample=True, top_k=1, max_new_tokens=16)
        assert out.sequences.tolist() == plain.tolist()
