"""Caches handed in, prompts fed in chunks, and assistants that a caller brings to one call.

A cache that a caller reuses belongs to the target and holds exactly the committed tokens but the
newest, whatever was drafted: https://github.com/huggingface/transformers/pull/31644.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from dspark_hf.compat import OUTPUT_CACHE_NAME
from harness import (
    DRAFTERS,
    KNOWS_NOTHING,
    counted_forwards,
    drafts_were_verified,
    generate,
    oracle_of,
    paths,
    wrapped,
)
from tiny import ARCHITECTURES, WINDOW, llama, plain_generate, prompt

PROMPT = prompt(5, seed=4) * 2
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
SUFFIX = prompt(5, seed=9)
NEW_TOKENS = 11
CACHED = {
    "llama": "flat",
    "mistral": "flat",
    "gemma3": "flat",
    "deepseek_v3": "flat",
    "falcon": "rowwise",
    "qwen3_next": "rowwise",
    "lfm2": "rowwise",
    "falcon_h1": "rowwise",
}
"""Full attention, windows in every layer and in most, latent attention, then row by row: full
attention, recurrent state, short convolutions, both in every layer."""


@pytest.fixture(scope="module", params=CACHED)
def named_model(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel]:
    return request.param, ARCHITECTURES[request.param]()


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def turn(model: PreTrainedModel, ids: list[int], cache: Cache, **kwargs: Any) -> Any:
    """Decode one turn of a conversation over a cache that holds the turns before."""
    kwargs = {"max_new_tokens": NEW_TOKENS, OUTPUT_CACHE_NAME: cache, **kwargs}
    return generate(model, [ids], **kwargs)


def converse(model: PreTrainedModel, num_turns: int = 2) -> tuple[list[list[int]], Cache, Any]:
    """Run turns over one cache, each with all text so far; check the cache's length after each."""
    cache = empty_cache(model)
    ids, texts, out = list(PROMPT), [], None
    for _ in range(num_turns):
        out = turn(model, ids, cache)
        texts.append(out.sequences[0].tolist())
        if any(hasattr(layer, "keys") for layer in cache.layers):
            assert int(cache.get_seq_length()) == len(texts[-1]) - 1
        ids = texts[-1] + SUFFIX
    return texts, cache, out


def tensors(cache: Cache) -> list[torch.Tensor]:
    """Return every tensor that a cache holds, recurrent states included."""
    found = []
    for layer in cache.layers:
        for _, value in sorted(vars(layer).items()):
            values = value.values() if isinstance(value, dict) else [value]
            found += [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return found


def assert_same_cache(ours: Cache, plain: Cache) -> None:
    """Compare what two caches hold, up to the rounding of another block size."""
    pairs = list(zip(tensors(ours), tensors(plain), strict=True))
    assert pairs
    for found, expected in pairs:
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("drafter", ["lookup", "itself", "noisy_copy"])
def test_turns_over_one_cache_equal_plain_turns_and_leave_the_plain_cache(
    named_model: tuple[str, PreTrainedModel], drafter: str
) -> None:
    name, model = named_model
    plain, plain_cache, _ = converse(model)
    with wrapped(model, DRAFTERS[drafter](model, KNOWS_NOTHING)):
        ours, cache, out = converse(model)
        assert model.dspark.metrics.fallback_reasons == {}
    assert ours == plain
    assert len(ours[-1]) > 3 * WINDOW
    assert paths(out) == {CACHED[name]}
    assert drafts_were_verified(out)
    assert_same_cache(cache, plain_cache)
    # Plain decoding goes on from the cache as if it had filled it itself.
    ids = plain[-1] + SUFFIX
    last = turn(model, ids, cache).sequences.tolist()
    assert last == turn(model, ids, plain_cache).sequences.tolist()


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
def test_the_cache_of_the_output_continues_as_plain_decoding_does(
    named_model: tuple[str, PreTrainedModel], drafter: str
) -> None:
    _, model = named_model
    plain = generate(model, [PROMPT], max_new_tokens=NEW_TOKENS)
    with wrapped(model, DRAFTERS[drafter](model, KNOWS_NOTHING)):
        out = generate(model, [PROMPT], max_new_tokens=NEW_TOKENS)
    assert_same_cache(out[OUTPUT_CACHE_NAME], plain[OUTPUT_CACHE_NAME])


def test_a_turn_that_a_stop_cuts_inside_a_block_leaves_no_rejected_token_in_the_cache(
    named_model: tuple[str, PreTrainedModel],
) -> None:
    _, model = named_model
    free = plain_generate(model, [PROMPT], max_new_tokens=NEW_TOKENS)
    eos = int(free[0, len(PROMPT) + 4])
    plain, ours = empty_cache(model), empty_cache(model)
    expected = turn(model, PROMPT, plain, eos_token_id=eos)
    with wrapped(model, oracle_of(free, [PROMPT])):
        out = turn(model, PROMPT, ours, eos_token_id=eos)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.speculation[0].cut_rounds == 1
    assert_same_cache(ours, plain)


def test_an_empty_cache_is_filled_without_asking_for_a_dict() -> None:
    model = llama()
    cache = empty_cache(model)
    kwargs = {"max_new_tokens": NEW_TOKENS, OUTPUT_CACHE_NAME: cache}
    with wrapped(model, model):
        ids = plain_generate(model, PROMPTS, **kwargs)
        assert model.dspark.metrics.last[0].verified > 0
    plain = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert ids.tolist() == plain.sequences.tolist()
    assert cache.get_seq_length() == ids.shape[1] - 1
    for layer, expected in zip(cache.layers, plain[OUTPUT_CACHE_NAME].layers, strict=True):
        for row, tokens in enumerate(PROMPTS):
            # What a cache holds at padding is nobody's business.
            span = slice(max(map(len, PROMPTS)) - len(tokens), None)
            error = layer.keys[row, :, span] - expected.keys[row, :, span]
            assert error.abs().max() < 1e-4


@pytest.mark.parametrize("rows", [1, 3])
def test_a_filled_cache_of_several_rows_or_of_other_tokens_runs_in_the_own_loop(rows: int) -> None:
    model = llama()
    prompts = PROMPTS[:rows]
    results = []
    for is_ours in (False, True):
        cache = empty_cache(model)
        first = generate(model, prompts, max_new_tokens=4, **{OUTPUT_CACHE_NAME: cache})
        ids = torch.cat([first.sequences, torch.tensor([SUFFIX] * rows)], dim=1)
        mask = torch.ones_like(ids)
        for row, tokens in enumerate(prompts):
            mask[row, : max(map(len, prompts)) - len(tokens)] = 0
        # One row: only the new tokens are passed, under a mask for all of them.
        if rows == 1:
            ids = ids[:, cache.get_seq_length() :]
        kwargs = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
        kwargs[OUTPUT_CACHE_NAME] = cache
        if not is_ours:
            results.append(model.generate(ids, **kwargs).tolist())
            continue
        with wrapped(model, model):
            results.append(model.generate(ids, **kwargs).tolist())
            assert model.dspark.metrics.fallback_calls == 1
    assert results[0] == results[1]


@pytest.mark.parametrize(("rows", "chunk"), [(1, 1), (1, 3), (1, 100), (3, 3)])
def test_a_prompt_fed_in_chunks_gives_the_text_of_a_prompt_fed_at_once(
    named_model: tuple[str, PreTrainedModel], rows: int, chunk: int
) -> None:
    name, model = named_model
    kwargs = {"max_new_tokens": NEW_TOKENS}
    plain = plain_generate(model, PROMPTS[:rows], **kwargs)
    with wrapped(model, oracle_of(plain, PROMPTS[:rows])):
        # The first call checks the target, with forwards of its own.
        generate(model, PROMPTS[:1], max_new_tokens=1)
        with counted_forwards(model) as widths:
            out = generate(model, PROMPTS[:rows], prefill_chunk_size=chunk, **kwargs)
    assert out.sequences.tolist() == plain.tolist()
    assert paths(out) == {CACHED[name]}
    assert drafts_were_verified(out)
    if rows == 1:
        fed = widths[: math.ceil(len(PROMPTS[0]) / chunk)]
        assert sum(fed) == len(PROMPTS[0])
        assert max(fed) <= chunk


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_turn_over_a_filled_cache_may_be_fed_in_chunks(
    named_model: tuple[str, PreTrainedModel], chunk: int
) -> None:
    _, model = named_model
    results = []
    for is_ours in (False, True):
        cache = empty_cache(model)
        first = turn(model, PROMPT, cache).sequences[0].tolist()
        if is_ours:
            with wrapped(model, model):
                out = turn(model, first + SUFFIX, cache, prefill_chunk_size=chunk)
                assert model.dspark.metrics.fallback_reasons == {}
        else:
            out = turn(model, first + SUFFIX, cache)
        results.append(out.sequences.tolist())
    assert results[0] == results[1]
