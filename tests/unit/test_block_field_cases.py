"""Faults of the field that concern running a block drafter: S08 to S13 and S15 to S17.

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
from dspark_hf.drafting.block.taps import FeatureTaps
from dspark_hf.drafting.block.vocabulary import Vocabulary
from dspark_hf.errors import CheckpointError
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.targets.rowwise import RowwiseTarget
from dspark_hf.values import Feed
from harness import generate, wrapped
from tiny import VOCAB, gemma3, gpt2, llama, plain_generate, prompt, qwen3_next

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


# S11: which hidden states feed the drafter


@torch.no_grad()
def outputs_of(
    model: PreTrainedModel, blocks: Any, ids: list[int]
) -> tuple[dict[int, torch.Tensor], Any]:
    """Each block's output, and the hidden states as Transformers gives them."""
    caught: dict[int, torch.Tensor] = {}

    def hook(layer: int) -> Any:
        def note(_module: Any, _args: Any, output: Any) -> None:
            caught[layer] = output[0] if isinstance(output, tuple) else output

        return note

    hooks = [block.register_forward_hook(hook(k)) for k, block in enumerate(blocks)]
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for handle in hooks:
        handle.remove()
    return caught, states


# A recurrent model runs row by row only.
@pytest.mark.parametrize(
    ("path", "make"),
    [("flat", make) for make in (llama, gemma3, gpt2)]
    + [("rowwise", make) for make in (llama, gemma3, gpt2, qwen3_next)],
)
def test_features_are_the_outputs_of_the_named_blocks(make: Any, path: str) -> None:
    model = make()
    ids, layers = [prompt(6, seed=1), prompt(3, seed=2)], (1, -1, 0, 2)
    taps = FeatureTaps(model, layers)
    runner = FlatTarget(model) if path == "flat" else RowwiseTarget(model)
    got: dict[int, list[tuple[int, torch.Tensor]]] = {0: [], 1: []}
    runner.listen(taps, lambda row, start, f: got[row].append((start, f)))
    with torch.no_grad():
        runner.forward([Feed(i, row, 1) for i, row in enumerate(ids)])
        runner.forward([Feed(i, [5, 6], 1) for i in range(2)])
    assert all(not block._forward_hooks and not block._forward_pre_hooks for block in taps.blocks)
    for i, row in enumerate(ids):
        caught, states = outputs_of(model, taps.blocks, [*row, 5, 6])
        caught[-1] = states[0]
        told = torch.cat([caught[k] for k in layers], dim=-1)[0]
        assert [start for start, _ in got[i]] == [0, len(row)]
        found = torch.cat([f for _, f in got[i]])
        torch.testing.assert_close(found, told, atol=1e-3, rtol=1e-3)
        # The last block's output is tapped before the final norm.
        assert not torch.allclose(caught[2], states[-1], atol=1e-2)


def test_hooks_are_taken_off_when_a_forward_fails() -> None:
    model = llama()
    runner = FlatTarget(model)
    taps = FeatureTaps(model, (0, -1))
    runner.listen(taps, lambda *_: None)
    with pytest.raises(IndexError):
        runner.forward([Feed(0, [VOCAB + 5], 1)])
    assert all(not block._forward_hooks and not block._forward_pre_hooks for block in taps.blocks)


@pytest.mark.parametrize("layer", [3, 7, -2])
def test_a_layer_id_out_of_range_is_refused(layer: int) -> None:
    with pytest.raises(CheckpointError, match=f"between -1 and 2 .*got {layer}"):
        FeatureTaps(target(), (0, layer))


# S12: borrowed embedding and output head


def weights(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("rows", [VOCAB, VOCAB + 64])
def test_what_is_missing_is_borrowed_without_a_copy(rows: int, is_tied: bool) -> None:
    model = llama(vocab_size=rows, tie_word_embeddings=is_tied)
    vocabulary = Vocabulary(block_spec(target()), model)
    embed, head = weights(model)
    assert vocabulary.embedding().data_ptr() == embed.data_ptr()
    assert vocabulary.head().data_ptr() == head.data_ptr()
    hidden = torch.randn(2, 3, 32)
    assert torch.equal(vocabulary.logits(hidden), hidden @ head[:VOCAB].T)


def test_a_resized_or_reloaded_target_is_borrowed_from_anew() -> None:
    model = llama()
    spec = block_spec(model, draft_vocab_size=40)
    ids = torch.arange(40) * 3
    pruned = Vocabulary(spec, model, d2t=ids - torch.arange(40))
    plain = Vocabulary(block_spec(model), model)
    assert torch.equal(pruned.head(), weights(model)[1][ids])
    held = pruned.head()
    assert pruned.head() is held
    model.resize_token_embeddings(VOCAB + 16)
    assert plain.head().data_ptr() == weights(model)[1].data_ptr()
    with torch.no_grad():
        weights(model)[1].mul_(2)
    assert torch.equal(pruned.head(), weights(model)[1][ids])
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert torch.equal(pruned.head(), state["lm_head.weight"][ids])


def test_a_table_of_its_own_is_kept() -> None:
    drafter = block_drafter(target(), owns_embed=True, owns_head=True)
    embed, head = weights(target())
    assert drafter.vocabulary.embedding().shape == embed.shape
    assert not torch.equal(drafter.vocabulary.embedding(), embed)
    assert not torch.equal(drafter.vocabulary.head(), head)


def test_text_stays_the_targets_after_it_was_given_more_tokens() -> None:
    model = llama()
    texts = [plain_generate(model, [prompt(6)], max_new_tokens=NEW_TOKENS)[0].tolist()]
    drafter = Recording(block_drafter(model, texts=texts, owns_embed=True))
    with wrapped(model, drafter, CONFIG):
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(VOCAB + 16)
            weights(model)[1].data[VOCAB:] = weights(model)[1].data[:16] * 1.5
        for kwargs in ({}, {"do_sample": True, "temperature": 2.0}):
            out = generate(model, [prompt(6), [VOCAB + 3, 5]], max_new_tokens=40, **kwargs)
            assert {record.path for record in out.speculation} == {"flat"}
    new = out.sequences[:, 6:]
    assert int(new.max()) >= VOCAB, "a token the drafter does not know was meant to be emitted"
    for _, ids, _, proposal in drafter.rounds:
        assert bool(proposal.ids) == (ids[-1] < VOCAB)
        assert all(token < VOCAB for token in proposal.ids)


def test_a_target_with_fewer_rows_than_the_drafter_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"at least 160 rows of 32 .*got 96 of 32"):
        Vocabulary(block_spec(target()), llama(vocab_size=96))


# S13: reduced draft vocabulary


def test_a_pruned_drafter_proposes_mapped_ids_only() -> None:
    ids = prompt(9, seed=3)
    text = plain_text(ids)
    kept = sorted({*range(0, VOCAB, 3), *text[9:20]})
    drafter = block_drafter(target(), "gated", draft_ids=kept, texts=[text])
    for kwargs in ({}, {"do_sample": True, "temperature": 1.2, "top_k": 20}):
        recording = Recording(drafter)
        out = run(recording, ids, **kwargs)
        proposed = {token for _, _, _, p in recording.rounds for token in p.ids}
        assert proposed <= set(kept)
        assert max(proposed) >= len(kept), "ids were meant to need the mapping"
        if kwargs:
            assert all(p.probs.shape == (len(p.ids), VOCAB) for _, _, _, p in recording.rounds)
            outside = [i for i in range(VOCAB) if i not in kept]
            assert all(not p.probs[:, outside].any() for _, _, _, p in recording.rounds)
        else:
            assert out.sequences[0].tolist() == text
            assert out.speculation[0].accepted > 0


def test_a_pruned_vocabulary_without_a_table_is_refused() -> None:
    with pytest.raises(CheckpointError, match="d2t must map the 40 draft ids"):
        Vocabulary(block_spec(target(), draft_vocab_size=40), target())


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
