"""Faults found by reading the code with hostile eyes; most were ways to get silently wrong text."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StoppingCriteria

from drafters import RandomDrafter
from dspark_hf import DraftRequest, DSparkConfig, DSparkForCausalLM
from dspark_hf.drafting.small_model import ModelDrafter
from dspark_hf.targets.cache import DSparkCache
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.schedules.auto import CostAwareSchedule
from dspark_hf.verification.schedules.base import RowState
from tiny import ARCHITECTURES, VOCAB, build, llama, plain_generate, prompt

ALWAYS = DSparkConfig(schedule="fixed", max_draft_tokens=4)


def new_tokens(out, length):
    return out[0, length:].tolist()


def test_a_model_that_drafts_for_another_may_generate_in_a_second_thread():
    shared, other = llama(), llama(seed=11)
    ids = prompt(9, seed=3)
    expected = {
        id(m): plain_generate(m, [ids], max_new_tokens=24).tolist() for m in (shared, other)
    }
    original = shared.config._attn_implementation
    DSparkForCausalLM.wrap(shared, drafter="lookup", config=ALWAYS)
    DSparkForCausalLM.wrap(other, drafter=shared, config=ALWAYS)
    wrong = []

    def repeat(model):
        for _ in range(6):
            out = plain_generate(model, [ids], max_new_tokens=24)
            if out.tolist() != expected[id(model)]:
                wrong.append(out)

    threads = [threading.Thread(target=repeat, args=(model,)) for model in (shared, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert shared.config._attn_implementation == original


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_a_plain_forward_beside_a_generating_thread_computes_what_it_always_did(name):
    model = ARCHITECTURES[name]()
    ids = torch.tensor([prompt(12, seed=4)])
    with torch.no_grad():
        expected = model(ids).logits
    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB, 1), config=ALWAYS)
    stop = threading.Event()

    def generate():
        while not stop.is_set():
            plain_generate(model, [prompt(9, seed=3)], max_new_tokens=16)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        with torch.no_grad():
            worst = max(float((model(ids).logits - expected).abs().max()) for _ in range(40))
    finally:
        stop.set()
        thread.join()
    assert worst < 1e-4


class Broken(StoppingCriteria):
    """Raises once a text is long enough, as a client that hangs up does."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise ConnectionError("the client is gone")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("name", ["llama", "bloom", "qwen3_next", "falcon_h1"])
def test_a_callers_cache_is_right_after_a_broken_off_call(name):
    model = ARCHITECTURES[name]()
    ids = torch.tensor([prompt(9, seed=3)])
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(ids, max_new_tokens=24, **settings)
    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB, 1), config=ALWAYS)
    cache = DynamicCache(config=model.config)
    with pytest.raises(ConnectionError):
        model.generate(
            ids, cache=cache, max_new_tokens=24, stopping_criteria=[Broken(20)], **settings
        )
    held = max(layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length"))
    model = DSparkForCausalLM.unwrap(model)
    longer = plain[:, : max(held, ids.shape[1]) + 1]
    again = model.generate(longer, cache=cache, max_new_tokens=33 - longer.shape[1], **settings)
    assert again.tolist() == plain.tolist()


def test_rotary_positions_have_no_last_one():
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.6, tie_word_embeddings=False, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = build(config, seed=5)
    ids = prompt(40, seed=3)
    plain = plain_generate(model, [ids], max_new_tokens=12)
    DSparkForCausalLM.wrap(model, drafter="lookup", config=ALWAYS)
    assert plain_generate(model, [ids], max_new_tokens=12).tolist() == plain.tolist()


def request(ids, row_id=0, max_tokens=3):
    return DraftRequest(row_id, ids, max_tokens, None, torch.Generator())


def test_a_row_with_an_id_the_drafter_does_not_know_is_not_drafted_for():
    drafter = ModelDrafter(llama(), target_vocab_size=VOCAB + 8)
    (proposal,) = drafter.propose([request([5, VOCAB + 2, 7])])
    assert list(proposal.ids) == []
    (proposal,) = drafter.propose([request([5, 6, 7], row_id=1)])
    assert len(proposal.ids) == 3


def test_a_drafter_that_was_paused_continues_from_what_was_committed():
    model = llama()
    drafter, fresh = ModelDrafter(model, VOCAB), ModelDrafter(copy.deepcopy(model), VOCAB)
    first = [5, 6, 7, 8]
    (drafted,) = drafter.propose([request(first)])
    # The target committed something else first, then by chance the draft's own last tokens.
    other = (drafted.ids[0] + 1) % VOCAB
    longer = [*first, other, *drafted.ids[1:], 39, 9]
    (resumed,) = drafter.propose([request(longer)])
    (expected,) = fresh.propose([request(longer)])
    assert list(resumed.ids) == list(expected.ids)
    assert drafter._fed[0][: len(longer)] == longer


def test_one_slow_draft_does_not_set_the_price_of_all_later_ones():
    costs = StepCosts()
    for width in [1, *range(1, 18)]:
        costs.observe(width, 100, 0.05)
    schedule = CostAwareSchedule(16, costs)
    schedule.observe_draft(4, 5.0)
    for _ in range(9):
        schedule.observe_draft(4, 0.0001)
    assert schedule.ask([RowState(0, 100, 16)]) == [16]


def test_slots_are_given_back_without_moving_the_other_rows():
    cache = DSparkCache([None], 8)
    for row in range(4):
        cache.open_row(row, 2)
    moved = []
    cache.layers[0].move = lambda *places: moved.append(places)
    for row in reversed(range(4)):
        cache.free(row)
    assert moved == []


def test_little_is_allocated_for_a_long_limit():
    model = llama()
    DSparkForCausalLM.wrap(model, drafter="lookup")
    decoder = model.dspark.decoder(None, model.dspark.config, 9 + 256)
    assert decoder.target.cache.num_positions <= 320


def test_choosing_a_target_leaves_every_modules_mode_alone():
    model = llama()
    model.model.layers[0].train()
    DSparkForCausalLM.wrap(model, drafter="lookup").dspark.target_choice()
    assert model.model.layers[0].training
    assert not model.model.layers[1].training
