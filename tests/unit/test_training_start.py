"""What a drafter starts from, and the lessons it learns from."""

from __future__ import annotations

import pytest
import torch

import tiny
from dspark_hf.drafting.block.attention import rotate
from dspark_hf.drafting.block.model import BlockModel
from dspark_hf.drafting.block.taps import decoder_blocks
from dspark_hf.training.data import Text
from dspark_hf.training.features import LessonSource
from dspark_hf.training.run import make_spec, spread_layers, unused_token
from dspark_hf.training.settings import DrafterShape
from dspark_hf.training.start import initialise, start_from_bigrams, start_from_target
from training_files import ragged_texts

CLOSE = 1e-5
"""The same float32 numbers by another sequence of kernels."""
HALF = 1e-2
"""Features are kept in bfloat16, with eight bits of mantissa."""
TEXTS = ragged_texts(6)


def drafter_for(model, **shape):
    spec = make_spec(model, DrafterShape(**shape), TEXTS)
    drafter = BlockModel(spec)
    initialise(drafter, seed=0)
    return drafter


def test_the_first_layer_computes_the_keys_and_values_of_the_targets_last_block():
    model = tiny.qwen3()
    drafter = drafter_for(model, num_layers=1, target_layers=(1,), markov_rank=0, confidence=False)
    ids = torch.tensor([tiny.prompt(9)])
    start_from_target(drafter, model, ids)
    cache = model(ids, use_cache=True).past_key_values
    states = model(ids, output_hidden_states=True).hidden_states[2]
    rotary = drafter.rotary(torch.arange(9)[None])
    ((keys, values),) = drafter.context(drafter.project(states), rotary)
    assert torch.allclose(keys, cache.layers[2].keys, atol=CLOSE)
    assert torch.allclose(values, cache.layers[2].values, atol=CLOSE)


def test_layers_copied_from_the_target_compute_what_its_blocks_do():
    model = tiny.qwen3()
    drafter = drafter_for(model, num_layers=2, target_layers=(0,), markov_rank=0, confidence=False)
    ids = torch.tensor([tiny.prompt(9)])
    start_from_target(drafter, model, ids)
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    for layer, block in zip(drafter.layers, list(decoder_blocks(model))[-2:], strict=True):
        normed, theirs = layer.input_layernorm(states), block.input_layernorm(states)
        assert torch.allclose(normed, theirs, atol=CLOSE)
        assert torch.equal(layer.self_attn.v_proj(normed), block.self_attn.v_proj(theirs))
        assert torch.allclose(layer.mlp(states), block.mlp(states), atol=CLOSE)
    assert torch.allclose(drafter.norm(states), model.model.norm(states), atol=CLOSE)


def test_norms_the_target_does_not_have_keep_the_size_of_its_queries():
    model = tiny.llama()
    drafter = drafter_for(model, num_layers=1, target_layers=(1,))
    ids = torch.tensor([tiny.prompt(12, seed=i) for i in range(3)])
    copied = start_from_target(drafter, model, ids)
    assert "layers.0.self_attn.q_norm (size)" in copied
    attention = drafter.layers[0].self_attn
    states = model(ids, output_hidden_states=True).hidden_states[2]
    raw = attention.q_proj(drafter.layers[0].input_layernorm(states)).unflatten(-1, (-1, 8))
    ratio = attention.q_norm(raw).square().mean().sqrt() / raw.square().mean().sqrt()
    assert 0.8 < ratio.item() < 1.25
    turned = rotate(attention.q_norm(raw), drafter.rotary(torch.arange(12)[None])[attention.kind])
    assert torch.allclose(turned.norm(), attention.q_norm(raw).norm())


def test_the_sequential_head_starts_without_a_bias():
    drafter = drafter_for(tiny.llama(), markov_rank=8)
    previous, hidden = torch.randint(0, 160, (2, 7)), torch.randn(2, 7, 32)
    assert drafter.markov_head(previous, hidden).abs().max().item() == 0.0


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_the_sequential_head_may_start_from_pairs_of_tokens(head):
    drafter = drafter_for(tiny.llama(), markov_rank=60, head=head, draft_vocab_size=50)
    kept = torch.arange(50)
    start_from_bigrams(drafter, [Text((7, *[5, 6, 5, 9] * 100), 1)], kept)
    markov = drafter.markov_head
    if head == "rnn":
        assert float(markov.markov_w2.weight.detach().abs().max()) == 0.0
        return
    gain = 2.0 if head == "gated" else 1.0
    logits = markov.markov_w1.weight @ markov.markov_w2.weight.T / gain
    # In the text, 6 and 9 follow 5 equally often and 5 follows 6; 20 tokens' worth of prior.
    after = torch.softmax(logits.detach(), dim=-1)
    assert after[5, [6, 9]].tolist() == pytest.approx([0.48, 0.48], abs=0.03)
    assert after[6].argmax() == 5
    # Tokens that do not occur are followed by what is frequent.
    assert after[40].topk(3).indices.tolist()[0] == 5


def test_the_same_seed_starts_the_same():
    first, second = (drafter_for(tiny.llama()).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_open_sizes_are_the_targets():
    spec = make_spec(tiny.llama(), DrafterShape(), [Text((159, 158, 3), 1)])
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (32, 48, 160)
    assert spec.mask_token_id == 157
    assert unused_token([Text(tuple(range(5)), 1)], 5) == 4
    assert spread_layers(30) == (9, 19, 27)


def source(model, folder=None, most_bytes=0, texts=TEXTS):
    return LessonSource(model, texts, (0, 1), top_k=8, folder=folder, most_bytes=most_bytes)


def same(first, second):
    return all(torch.equal(vars(first)[name], vars(second)[name]) for name in vars(first))


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


def test_a_lesson_is_what_the_target_computes_of_the_text_alone(model):
    lessons = source(model).get(range(6))
    for text, lesson in zip(TEXTS, lessons, strict=True):
        with torch.no_grad():
            out = model(torch.tensor([text.ids]), output_hidden_states=True)
        features = torch.cat([out.hidden_states[1], out.hidden_states[2]], dim=-1)[0]
        assert torch.allclose(lesson.features.float(), features, rtol=HALF, atol=HALF)
        probs = torch.softmax(out.logits[0], dim=-1)[text.start :]
        top, ids = probs.topk(8, dim=-1)
        assert torch.equal(lesson.top_ids[text.start :].long(), ids)
        assert torch.allclose(lesson.top_probs[text.start :].float(), top, atol=1e-3)
        assert len(lesson.top_ids) == len(text.ids)


def test_lessons_come_from_disk_as_they_were_computed(model, tmp_path):
    first = source(model, tmp_path, 10**9)
    computed = first.get([2, 0, 5])
    later = source(model, tmp_path, 10**9)
    later.target = None
    assert all(map(same, later.get([2, 0, 5]), computed))
    assert later.used_bytes == first.used_bytes > 0


def test_half_a_file_is_computed_again(model, tmp_path):
    (whole,) = source(model, tmp_path, 10**9).get([1])
    path = tmp_path / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    (again,) = source(model, tmp_path, 10**9).get([1])
    assert same(whole, again)
    (stored,) = source(model, tmp_path, 10**9).get([1])
    assert same(whole, stored)


def test_a_lesson_that_cannot_be_written_leaves_no_file(model, tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half a file")
        raise OSError("no space left on device")

    lessons = source(model, tmp_path, 10**9)
    monkeypatch.setattr("dspark_hf.training.features.save_file", full)
    with pytest.raises(OSError, match="no space"):
        lessons.get([1])
    assert not list(tmp_path.iterdir())
    assert lessons.used_bytes == 0


def test_the_folder_stays_within_its_bytes(model, tmp_path):
    limited = source(model, tmp_path, 5_000)
    limited.get(range(6))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert 0 < len(sizes) < 6
    # The last one may lie across the limit.
    assert sum(sizes[:-1]) < 5_000 + max(sizes)
    assert len(limited.get(range(6))) == 6


def test_nothing_is_kept_unless_asked(model, tmp_path):
    assert source(model, tmp_path, 0).get([0])
    assert not list(tmp_path.iterdir())
