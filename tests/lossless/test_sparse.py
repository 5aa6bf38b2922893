"""Sparse attention and self-sparse drafting as generate() shows them.

Sparse attention is another target: with all pages kept it equals the dense one, and what it must
never do is leak, out of its context, its row, or its model. Self-sparse drafting is lossless.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.attention.policy import SparsePolicy, SparsePrefill
from dspark_hf.attention.sparse import SparseReading, SparseRow, SparseStats
from dspark_hf.drafting.self_sparse import SelfSparseDrafter
from dspark_hf.errors import ConfigError
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.targets.rowwise import RowwiseTarget
from dspark_hf.values import DraftRequest, Feed
from harness import CONFIG, generate, wrapped

ALL = SparsePolicy(tokens=4096, min_context=0)
LEAST = SparsePolicy(tokens=48, recent_pages=2, min_context=0)
NEW = 24
PROMPTS = [tiny.prompt(n, seed=n) for n in (97, 130, 111)]


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny.llama(max_position_embeddings=512)


@pytest.fixture
def model(plain: Any) -> Iterator[Any]:
    with wrapped(plain, drafter=None):
        yield plain


def texts(model: Any, prompts: list[list[int]], **kwargs: Any) -> list[list[int]]:
    """Generate in one batch; the new tokens of each row."""
    out = generate(model, prompts, max_new_tokens=NEW, **kwargs)
    return out.sequences[:, max(map(len, prompts)) :].tolist()


def self_sparse(**kwargs: Any) -> SelfSparseDrafter:
    return SelfSparseDrafter(LEAST, min_context=64, **kwargs)


def test_all_pages_give_the_dense_text_with_and_without_drafts(plain: Any) -> None:
    dense = texts(plain, PROMPTS)
    for drafter in (None, "lookup"):
        with wrapped(plain, drafter=drafter) as model:
            with model.dspark.sparse_attention(ALL) as stats:
                assert texts(model, PROMPTS) == dense
            assert stats.calls > 0
            assert stats.share == 1


def test_few_pages_give_another_text_and_each_padded_row_that_of_its_own(model: Any) -> None:
    dense = texts(model, PROMPTS)
    with model.dspark.sparse_attention(LEAST) as stats:
        together = texts(model, PROMPTS)
        alone = [texts(model, [ids])[0] for ids in PROMPTS]
    assert together == alone
    assert together != dense
    assert stats.mean_pages == 3
    # One call a row, layer and step; the first token comes from the prompt, read densely.
    assert stats.calls == 2 * len(PROMPTS) * 3 * (NEW - 1)


def test_a_prompt_in_chunks_gives_the_same_sparse_text(model: Any) -> None:
    with model.dspark.sparse_attention(LEAST):
        whole = texts(model, PROMPTS[:1])
        for size in (8, 32):
            assert texts(model, PROMPTS[:1], prefill_chunk_size=size) == whole


def test_prompts_in_blocks_with_all_pages_give_the_dense_text(plain: Any) -> None:
    dense = texts(plain, PROMPTS)
    policy = ALL.replace(prefill=SparsePrefill(tokens=4096, min_context=0))
    for drafter in (None, "lookup"):
        with wrapped(plain, drafter=drafter) as model:
            with model.dspark.sparse_attention(policy) as stats:
                assert texts(model, PROMPTS) == dense
                assert texts(model, PROMPTS[:1], prefill_chunk_size=40) == dense[:1]
            assert stats.prefill_calls > 0
            assert stats.prefill.share == 1


def test_prompts_in_blocks_give_each_padded_row_its_own_text_in_chunks_too(model: Any) -> None:
    few = LEAST.replace(prefill=SparsePrefill(tokens=48, min_context=0))
    with model.dspark.sparse_attention(LEAST):
        read_densely = texts(model, PROMPTS)
    with model.dspark.sparse_attention(few) as stats:
        together = texts(model, PROMPTS)
        # Blocks behind the first: one, two and one; in three layers.
        assert stats.prefill_calls == 3 * 4
        alone = [texts(model, [ids])[0] for ids in PROMPTS]
        cut = [texts(model, [ids], prefill_chunk_size=33)[0] for ids in PROMPTS]
    assert together == alone == cut
    assert together != read_densely


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_models_with_no_layer_to_select_in_keep_their_text(name: str) -> None:
    model = tiny.ARCHITECTURES[name]()
    dense = texts(model, PROMPTS)
    with wrapped(model, drafter=None), model.dspark.sparse_attention(LEAST) as stats:
        assert texts(model, PROMPTS) == dense
        assert stats.calls == 0


def test_short_rows_keep_their_dense_text_beside_long_ones(model: Any) -> None:
    dense = texts(model, PROMPTS)
    with model.dspark.sparse_attention(LEAST.replace(min_context=125)) as stats:
        found = texts(model, PROMPTS)
    assert found[0] == dense[0]
    assert found[1] != dense[1]
    assert stats.calls > 0


class Halt(KeyboardInterrupt):
    """An interrupt that no one else raises."""


def test_the_context_leaves_no_trace_after_an_error_or_interrupt(model: Any) -> None:
    dense = texts(model, PROMPTS[:1])
    before = set(vars(model.dspark))
    for error in (RuntimeError, Halt):
        with pytest.raises(error), model.dspark.sparse_attention(LEAST):
            raise error
        calls = 0

        def fail(*_: object, error: type[BaseException] = error) -> None:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise error

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(error), model.dspark.sparse_attention(LEAST):
            texts(model, PROMPTS[:1])
        hook.remove()
        assert model.dspark._sparse is None
        assert model.config._attn_implementation == "sdpa"
        assert set(vars(model.dspark)) == before
        assert texts(model, PROMPTS[:1]) == dense


def test_contexts_may_be_nested(model: Any) -> None:
    with model.dspark.sparse_attention(LEAST) as outer:
        first = texts(model, PROMPTS[:1])
        counted = outer.calls
        with model.dspark.sparse_attention(ALL) as inner:
            second = texts(model, PROMPTS[:1])
        assert (outer.calls, inner.share) == (counted, 1)
        assert texts(model, PROMPTS[:1]) == first != second
    assert texts(model, PROMPTS[:1]) == second


def test_two_wrapped_models_do_not_touch_each_other(model: Any) -> None:
    other = tiny.llama(seed=9, max_position_embeddings=512)
    dense = texts(other, PROMPTS[:2])
    with wrapped(other, drafter=None), model.dspark.sparse_attention(LEAST) as stats:
        assert texts(other, PROMPTS[:2]) == dense
        assert stats.calls == 0
        sparse = texts(model, PROMPTS[:2])
        with other.dspark.sparse_attention(ALL):
            assert texts(other, PROMPTS[:2]) == dense
            assert texts(model, PROMPTS[:2]) == sparse


def test_the_configuration_may_ask_for_it(plain: Any, tmp_path: Path) -> None:
    with wrapped(plain, drafter=None) as model:
        dense = texts(model, PROMPTS[:1])
        with model.dspark.sparse_attention(LEAST):
            sparse = texts(model, PROMPTS[:1])
        assert texts(model, PROMPTS[:1], dspark=DSparkConfig(sparse=LEAST)) == sparse
        assert model.dspark.sparse_stats.calls > 0
        # Presets act on long contexts only.
        config = tmp_path / "dspark.yaml"
        config.write_text("sparse: fast\n", encoding="utf-8")
        fast = DSparkConfig.from_yaml(config)
        assert texts(model, PROMPTS[:1], dspark=fast) == dense
    with wrapped(plain, None, DSparkConfig(sparse=LEAST)) as model:
        assert texts(model, PROMPTS[:1]) == sparse
    for wrong in ("quick", 3):
        with pytest.raises(ConfigError, match="quality"):
            DSparkConfig(sparse=wrong)


@pytest.mark.parametrize("wrong", ["quick", 3, None])
def test_an_unknown_policy_is_refused_and_leaves_no_trace(model: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="quality"), model.dspark.sparse_attention(wrong):
        pass
    assert model.dspark._sparse is None


@pytest.mark.parametrize("name", ["bloom", "mamba2", "deepseek_v3"])
def test_models_off_the_flat_target_refuse_it_with_the_reason(name: str) -> None:
    model = tiny.ARCHITECTURES[name]()
    with wrapped(model, drafter=None):
        with (
            pytest.raises(NotImplementedError, match=r"flat target.*Decode it densely"),
            model.dspark.sparse_attention(LEAST),
        ):
            pass
        with pytest.raises(NotImplementedError, match="flat target"):
            texts(model, PROMPTS[:1], dspark=DSparkConfig(sparse=LEAST))
        assert model.dspark._sparse is None


def test_self_sparse_drafts_are_lossless_alone_and_in_a_batch(plain: Any) -> None:
    dense = texts(plain, PROMPTS)
    drafter = self_sparse()
    with wrapped(plain, drafter=drafter) as model:
        out = generate(model, PROMPTS, max_new_tokens=NEW)
        assert out.sequences[:, 130:].tolist() == dense
        assert all(record.drafted > 0 for record in out.speculation)
        for ids, wanted in zip(PROMPTS, dense, strict=True):
            assert texts(model, [ids]) == [wanted]
    assert drafter.stats.calls > 0
    assert drafter.stats.mean_pages == 3


def test_self_sparse_drafts_do_not_change_coupled_samples(plain: Any) -> None:
    coupled = DSparkConfig(
        acceptance="coupled", seed=3, schedule="fixed", max_draft_tokens=5, never_slower=False
    )
    found = []
    for drafter in (None, self_sparse()):
        with wrapped(plain, drafter, coupled) as model:
            found.append(texts(model, PROMPTS, do_sample=True))
    assert found[0] == found[1]
    rejecting = replace(coupled, acceptance="rejection")
    with wrapped(plain, self_sparse(), rejecting) as model:
        out = generate(model, PROMPTS, max_new_tokens=NEW, do_sample=True)
    assert all(record.verified > 0 for record in out.speculation)
    assert sum(record.accepted for record in out.speculation) > 0


def test_a_self_sparse_draft_keeps_the_rows_own_sparse_reading(plain: Any) -> None:
    target, stats = FlatTarget(plain, 32), SparseStats()
    target.read_all_sparsely(SparseReading(ALL, stats, 0))
    ids = PROMPTS[0]
    with torch.no_grad():
        target.forward([Feed(0, ids[:-1], 1)])
    reading = target.cache.sparse[0]
    drafter = self_sparse()
    drafter.bind(target)
    drafter.propose([DraftRequest(0, ids, 4, None, torch.Generator())])
    assert target.cache.sparse[0] is reading
    assert target.length(0) == len(ids) - 1
    assert stats.calls == 0
    assert drafter.stats.calls == 4 * 3


def test_self_sparse_drafts_under_sparse_attention_with_all_pages_change_nothing(
    plain: Any,
) -> None:
    dense = texts(plain, PROMPTS)
    drafter = self_sparse()
    with wrapped(plain, drafter=drafter) as model, model.dspark.sparse_attention(ALL) as stats:
        assert texts(model, PROMPTS) == dense
    assert stats.share == 1
    assert stats.calls > 0
    assert drafter.stats.calls > 0


@pytest.mark.parametrize("is_read_sparsely", [False, True])
def test_an_error_in_mid_draft_leaves_length_and_reading_as_before(
    plain: Any, is_read_sparsely: bool
) -> None:
    target = FlatTarget(plain, 32)
    ids = PROMPTS[0]
    with torch.no_grad():
        target.forward([Feed(0, ids[:-1], 1)])
    reading = SparseRow(ALL, SparseStats(), 0) if is_read_sparsely else None
    target.read_sparsely(0, reading)
    drafter = self_sparse()
    drafter.bind(target)
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Halt

    hook = plain.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(Halt):
        drafter.propose([DraftRequest(0, ids, 6, None, torch.Generator())])
    hook.remove()
    assert target.length(0) == len(ids) - 1
    assert target.cache.sparse.get(0) is reading
    fresh = FlatTarget(plain, 32)
    with torch.no_grad():
        fresh.forward([Feed(0, ids[:-1], 1)])
        found, wanted = (t.forward([Feed(0, ids[-1:], 1)])[0] for t in (target, fresh))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_short_rows_are_not_drafted_for(plain: Any) -> None:
    with wrapped(plain, SelfSparseDrafter(LEAST, min_context=400)) as model:
        out = generate(model, PROMPTS, max_new_tokens=NEW)
    assert all(record.drafted == 0 for record in out.speculation)


def test_self_sparse_is_refused_off_the_flat_target() -> None:
    model = tiny.bloom()
    with pytest.raises(NotImplementedError, match="self-sparse"):
        SelfSparseDrafter().bind(RowwiseTarget(model))
    with wrapped(model, "self-sparse"), pytest.raises(NotImplementedError, match="self-sparse"):
        texts(model, PROMPTS[:1])


def test_self_sparse_is_a_name_for_wrap(plain: Any) -> None:
    dense = texts(plain, PROMPTS[:1])
    DSparkForCausalLM.wrap(plain, drafter="self-sparse", config=CONFIG)
    assert texts(plain, PROMPTS[:1]) == dense
    DSparkForCausalLM.unwrap(plain)
