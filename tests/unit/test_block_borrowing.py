"""Faults of the field on what a block drafter takes from its target: S11 to S13.

Features of the named blocks, embedding and output head, ids of a pruned vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from block_drafters import Recording, block_drafter, block_spec
from dspark_hf import DSparkConfig
from dspark_hf.drafting.block.taps import FeatureTaps
from dspark_hf.drafting.block.vocabulary import Vocabulary
from dspark_hf.errors import CheckpointError
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.targets.rowwise import RowwiseTarget
from dspark_hf.values import Feed
from harness import generate, wrapped
from tiny import VOCAB, gemma3, gpt2, llama, plain_generate, prompt, qwen3_next

CONFIG = DSparkConfig(schedule="fixed", max_draft_tokens=5, never_slower=False)
NEW_TOKENS = 24


@cache
def target() -> PreTrainedModel:
    return llama()


def plain_text(ids: list[int]) -> list[int]:
    return plain_generate(target(), [ids], max_new_tokens=NEW_TOKENS)[0].tolist()


def run(drafter: Any, ids: list[int], **kwargs: Any) -> Any:
    with wrapped(target(), drafter, CONFIG) as model:
        return generate(model, [ids], max_new_tokens=NEW_TOKENS, **kwargs)


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
