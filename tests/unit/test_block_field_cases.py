"""Faults of the field that concern running a block drafter: S08 to S10 and S15 to S17.

S11 to S13, on what is taken from the target, are in test_block_borrowing.py.

Each case was reported in a public tracker of another project; what is right is stated by the tests.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from block_drafters import (
    FULL,
    SLIDING,
    Recording,
    block_drafter,
    block_spec,
    features_of,
    greedy_request,
    random_model,
)
from drafters import RandomDrafter
from dspark_hf import DSparkConfig
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.drafting.block.model import teacher_forced
from harness import generate, wrapped
from tiny import VOCAB, gpt2, llama, plain_generate, prompt

CONFIG = DSparkConfig(schedule="fixed", max_draft_tokens=5, never_slower=False)
ROUNDING = 1e-5
"""Bound on confidences, in 0..1, between the cached pass and one over the full context, fp32."""
NEW_TOKENS = 24


@cache
def target() -> PreTrainedModel:
    return llama()


def plain_text(ids: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    return plain_generate(target(), [ids], max_new_tokens=new_tokens)[0].tolist()


def run(drafter: Any, ids: list[int], config: DSparkConfig = CONFIG, **kwargs: Any) -> Any:
    with wrapped(target(), drafter, config) as model:
        return generate(model, [ids], **{"max_new_tokens": NEW_TOKENS, **kwargs})


# S08: draft length different from the checkpoint's block size


@pytest.mark.parametrize("asked", [1, 3, 5, 7])
def test_asking_for_fewer_drops_the_tail_and_for_more_gives_the_block(
    asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(9, seed=3)
    drafter = block_drafter(target(), texts=[plain_text(ids)[:-6]])
    full, some = Recording(drafter), Recording(drafter)
    run(full, ids)
    with (
        caplog.at_level(logging.WARNING),
        wrapped(target(), some, replace(CONFIG, max_draft_tokens=asked)) as model,
    ):
        for _ in range(2):
            out = generate(model, [ids], max_new_tokens=NEW_TOKENS)
    assert out.sequences[0].tolist() == plain_text(ids)
    proposed = [proposal.ids for _, _, _, proposal in some.rounds]
    assert max(map(len, proposed)) == min(asked, 5)
    assert list(proposed[0]) == list(full.rounds[0][3].ids)[:asked]
    warnings = [r.message for r in caplog.records if "blocks of 5" in r.message]
    assert len(warnings) == (asked > 5)


def test_the_default_length_is_no_request_for_more_than_a_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        run(block_drafter(target()), prompt(9, seed=3), DSparkConfig())
    assert "blocks of" not in caplog.text


# S09: anchor position off by one


def fresh_draft(drafter: BlockDrafter, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens and confidences by one pass over the full context, without any cache."""
    model, spec = drafter.model, drafter.model.spec
    features = features_of(drafter.target, ids[:-1], spec)[None]
    anchor = torch.tensor([[len(ids) - 1]])
    with torch.no_grad():
        embed = drafter.vocabulary.embedding()
        hidden = teacher_forced(model, embed, features, torch.tensor([ids]), anchor)[0]
        base, state = drafter.vocabulary.logits(hidden), None
        previous, chosen, told = torch.tensor([ids[-1]]), [], []
        for k in range(spec.block_size):
            row, token = hidden[:, k], None
            logits = base[:, k]
            if model.markov_head is not None:
                token = model.markov_head.markov_w1(previous)
                state = model.markov_head.start(token) if state is None else state
                code, state = model.markov_head.step(state, token, row)
                logits = logits + model.markov_head.markov_w2(code)
            if k == 0 and not spec.reads_anchor:
                continue
            told.append(model.confidence_head(row, token).sigmoid())
            previous = logits.argmax(-1)
            chosen.append(previous)
    return torch.cat(chosen), torch.cat(told)


KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "rnn-mask-filling": {"head": "rnn", "reads_anchor": False, "block_size": 6},
    "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 6, "sliding_is_causal": True},
}


@cache
def long_target() -> PreTrainedModel:
    return llama(max_position_embeddings=512)


@pytest.mark.parametrize("length", [5, 64, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_the_incremental_pass_drafts_as_one_over_the_full_context(
    kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = long_target(), prompt(length, seed=length)
    text = plain_generate(model, [ids], max_new_tokens=NEW_TOKENS)[0].tolist()
    known, unknown = text[length - 1 : -12], text[-8:-5]
    drafter = block_drafter(model, texts=[known, unknown], **KINDS[kind])
    placed: list[list[int]] = []
    rotary = drafter.model.rotary

    def note(where: torch.Tensor) -> Any:
        placed.append(where[0].tolist())
        return rotary(where)

    monkeypatch.setattr(drafter.model, "rotary", note)
    recording = Recording(drafter)
    with wrapped(model, recording, CONFIG):
        out = generate(model, [ids], max_new_tokens=NEW_TOKENS)
    assert out.sequences[0].tolist() == text
    accepted = out.speculation[0].accepted_per_round
    assert 0 in accepted, "a block was meant to be rejected"
    assert max(accepted) > 1, "a block was meant to be accepted in part"
    # Context rows stand at 0, 1, 2, ...; a block's anchor at the number of committed others.
    size, rows = drafter.model.spec.block_size, [row for _, row, _, _ in recording.rounds]
    for row in rows:
        block = list(range(len(row) - 1, len(row) - 1 + size))
        while (where := placed.pop(0)) != block:
            assert where[-1] == len(row) - 2
    assert not placed
    monkeypatch.setattr(drafter.model, "rotary", rotary)
    for _, row, asked, proposal in recording.rounds:
        chosen, told = fresh_draft(drafter, list(row))
        assert list(proposal.ids) == chosen[:asked].tolist()
        error = (torch.tensor(proposal.confidence) - told[:asked]).abs().max()
        assert float(error) < ROUNDING


def test_after_full_rejections_the_context_is_what_was_committed() -> None:
    ids = prompt(7, seed=5)
    drafter = Recording(block_drafter(target(), "none", seed=9))
    out = run(drafter, ids)
    assert set(out.speculation[0].accepted_per_round) == {0}
    for _, row, asked, proposal in drafter.rounds:
        assert list(proposal.ids) == fresh_draft(drafter.drafter, list(row))[0][:asked].tolist()


# S10: two readout conventions


@pytest.mark.parametrize("reads_anchor", [True, False])
def test_the_readout_decides_which_rows_become_drafts(reads_anchor: bool) -> None:
    drafter = block_drafter(target(), "none", reads_anchor=reads_anchor, has_confidence=False)
    spec = drafter.model.spec
    drafter.take(0, 0, features_of(target(), prompt(6), spec))

    def slots(embeds: torch.Tensor, *_: Any) -> torch.Tensor:
        # Slot i of the block is the unit vector i, and the head maps it to token 100 + i.
        return torch.eye(embeds.shape[1], embeds.shape[2])[None]

    drafter.model.forward = slots  # type: ignore[method-assign]
    drafter.vocabulary.own_head = torch.eye(VOCAB, spec.hidden_size).roll(100, 0)
    (proposal,) = drafter.propose([greedy_request(0, [*prompt(6), 7])])
    expected = [100, 101, 102, 103, 104] if reads_anchor else [101, 102, 103, 104]
    assert list(proposal.ids) == expected
    assert drafter.block_size == len(expected)


# S15: windows


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_far_feature_reaches_the_full_layer_only(is_causal: bool) -> None:
    ids = prompt(40, seed=4)
    kinds = {"sliding": (SLIDING,), "full": (FULL,)}
    for name, layer_types in kinds.items():
        drafter = block_drafter(
            target(), layer_types=layer_types, sliding_window=8, sliding_is_causal=is_causal
        )
        spec = drafter.model.spec
        features = features_of(target(), ids[:-1], spec)
        told = []
        for back in (None, 20, 9, 8, 1):
            changed = features.clone()
            if back is not None:
                changed[-back] += 5.0
            drafter.take(0, 0, changed)
            told.append(drafter.propose([greedy_request(0, ids)])[0].confidence)
            drafter.free(0)
        moves = [one != told[0] for one in told[1:]]
        assert moves == [name == "full", name == "full", True, True]


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_different_lengths_see_their_own_windows(is_causal: bool) -> None:
    settings = {"layer_types": (SLIDING, FULL), "sliding_window": 4}
    drafter = block_drafter(target(), **settings, sliding_is_causal=is_causal)
    rows = [prompt(length, seed=length) for length in (30, 22, 3, 26, 2)]
    spec = drafter.model.spec
    for i, ids in enumerate(rows):
        drafter.take(i, 0, features_of(target(), ids[:-1], spec))
    together = drafter.propose([greedy_request(i, ids) for i, ids in enumerate(rows)])
    for i, ids in enumerate(rows):
        chosen, told = fresh_draft(drafter, ids)
        assert list(together[i].ids) == chosen.tolist()
        assert torch.allclose(torch.tensor(together[i].confidence), told, atol=ROUNDING)


# S16: positions of drafter and target


def test_no_draft_reaches_past_the_drafters_positions() -> None:
    ids = prompt(30, seed=6)
    text = plain_text(ids)
    drafter = Recording(block_drafter(target(), texts=[text], max_positions=40))
    out = run(drafter, ids)
    assert out.sequences[0].tolist() == text
    for _, row, _, proposal in drafter.rounds:
        assert bool(proposal.ids) == (len(row) - 1 + 5 <= 40)
    assert any(proposal.ids for _, _, _, proposal in drafter.rounds)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_text_may_end_exactly_at_the_targets_last_position(make: Any) -> None:
    model = make() if make is gpt2 else llama(max_position_embeddings=256)
    ids = prompt(240, seed=6)
    plain = plain_generate(model, [ids], max_new_tokens=16)
    with wrapped(model, block_drafter(model, texts=plain.tolist()), CONFIG):
        out = generate(model, [ids], max_new_tokens=16)
    assert out.sequences.tolist() == plain.tolist()
    assert out.speculation[0].accepted > 0


# S17: statistics that add up


def test_counts_add_up_over_many_runs() -> None:
    ids = [prompt(length, seed=70 + length) for length in (4, 9, 13)]
    texts = [plain_text(row) for row in ids]
    subjects = {
        "block": block_drafter(target(), texts=texts),
        "random block": block_drafter(target(), "none"),
        "partly right": block_drafter(target(), "rnn", texts=[text[:-9] for text in texts]),
        "random": RandomDrafter(VOCAB),
    }
    accepted_by = dict.fromkeys(subjects, 0)
    for name, drafter in subjects.items():
        with wrapped(target(), drafter, CONFIG) as model:
            for stop in (None, 5, 8, 13, 19):
                eos = None if stop is None else [text[len(row) + stop] for row, text in
                                                 zip(ids, texts, strict=True)]  # fmt: skip
                out = generate(model, ids, max_new_tokens=NEW_TOKENS, eos_token_id=eos)
                for record in out.speculation:
                    assert record.new_tokens == 1 + record.accepted + (
                        record.rounds - record.cut_rounds
                    )
                    assert record.drafted >= record.verified >= record.accepted
                    assert len(record.accepted_per_round) == record.rounds
                    assert sum(record.accepted_per_round) == record.accepted
                    assert sum(record.accepted_by_position) == record.accepted
                    assert sum(record.accepted_mask) == record.accepted
                    assert len(record.accepted_mask) == record.new_tokens
                    accepted_by[name] += record.accepted
    assert accepted_by["block"] > accepted_by["partly right"] > accepted_by["random block"]


def test_random_models_are_reproducible_and_differ_by_seed() -> None:
    one, same, other = (random_model(block_spec(target()), seed) for seed in (0, 0, 1))
    assert torch.equal(one.fc.weight, same.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
