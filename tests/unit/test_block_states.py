"""A block drafter through a model's life: caches, chunks, copies, casts, offloading, failures."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import DynamicCache, PreTrainedModel

from block_drafters import Recording, block_drafter, features_of, greedy_request
from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.compat import OUTPUT_CACHE_NAME
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.errors import ConfigError
from harness import Recorder, generate, wrapped
from tiny import VOCAB, llama, plain_generate, prompt, qwen3_next

CONFIG = DSparkConfig(schedule="fixed", max_draft_tokens=5, never_slower=False)
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
NEW_TOKENS = 10
ROUNDING = 1e-5


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    made = llama()
    yield made
    DSparkForCausalLM.unwrap(made)


def texts_of(model: PreTrainedModel, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    return [plain_generate(model, [p], max_new_tokens=new_tokens)[0].tolist() for p in PROMPTS]


@pytest.fixture
def drafter(model: PreTrainedModel) -> BlockDrafter:
    # Two texts known, one not: blocks are accepted and rejected.
    return block_drafter(model, "gated", texts=texts_of(model)[:2], draft_ids=range(VOCAB - 8))


def check(out: Any, plain: torch.Tensor, *, drafts: bool = True) -> None:
    assert out.sequences.tolist() == plain.tolist()
    assert not drafts or sum(record.accepted for record in out.speculation) > 0


# caches and prompts


@pytest.mark.parametrize("make", [llama, qwen3_next])
def test_tokens_of_a_cache_handed_in_are_drafted_behind_without_their_features(make: Any) -> None:
    model, ids = make(), list(PROMPTS[0])
    texts = [ids]
    plain_cache = DynamicCache(config=model.config)
    for _ in range(3):
        kwargs = {"max_new_tokens": 9, OUTPUT_CACHE_NAME: plain_cache}
        texts.append(plain_generate(model, [texts[-1] + [7, 8]], **kwargs)[0].tolist())
    drafter = Recording(block_drafter(model, texts=texts[-1:]))
    cache = DynamicCache(config=model.config)
    with wrapped(model, drafter, CONFIG):
        for i in range(3):
            drafter.rounds.clear()
            drafter.taken.clear()
            kwargs = {"max_new_tokens": 9, OUTPUT_CACHE_NAME: cache}
            out = generate(model, [texts[i] + [7, 8]], **kwargs)
            assert out.sequences[0].tolist() == texts[i + 1]
            assert out.speculation[0].accepted > 0
            assert all(proposal.ids for _, _, _, proposal in drafter.rounds)
            # The newest token of the last turn is not in its cache: features begin there.
            assert drafter.taken[0][1] == (0 if i == 0 else len(texts[i]) - 1)


def test_a_context_that_begins_late_is_drafted_from_at_its_own_positions(
    model: PreTrainedModel, drafter: BlockDrafter
) -> None:
    ids, spec = texts_of(model)[2], drafter.model.spec
    features = features_of(model, ids[:-1], spec)
    drafter.take(0, 10, features[10:])
    placed = []
    rotary = drafter.model.rotary
    drafter.model.rotary = lambda where: placed.append(where[0].tolist()) or rotary(where)  # type: ignore[method-assign,func-returns-value]
    assert len(drafter.propose([greedy_request(0, ids)])[0].ids) == 5
    assert placed == [list(range(10, len(ids) - 1)), list(range(len(ids) - 1, len(ids) + 4))]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prompts_fed_in_chunks_give_the_same_drafts(
    model: PreTrainedModel, drafter: BlockDrafter, chunk: int
) -> None:
    plain = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    drafts = []
    for kwargs in ({}, {"prefill_chunk_size": chunk}):
        recording = Recording(drafter)
        with wrapped(model, recording, CONFIG):
            check(generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, **kwargs), plain)
        drafts.append([proposal.ids for _, _, _, proposal in recording.rounds])
    assert drafts[0] == drafts[1]


def test_a_long_prompt_is_projected_as_it_comes(
    model: PreTrainedModel, drafter: BlockDrafter
) -> None:
    ids = prompt(200, seed=8)
    features = torch.randn(700, 64, generator=torch.Generator().manual_seed(1))
    drafter.take(0, 0, features)
    held = drafter.context._rows[0]
    assert held.count == 0
    whole = drafter.propose([greedy_request(0, (ids * 4)[:701])])[0]
    drafter.free(0)
    for start in range(0, 700, 100):
        drafter.take(0, start, features[start : start + 100])
    parts = drafter.propose([greedy_request(0, (ids * 4)[:701])])[0]
    assert whole.ids == parts.ids
    assert torch.allclose(
        torch.tensor(whole.confidence), torch.tensor(parts.confidence), atol=ROUNDING
    )


def test_features_of_tokens_fed_again_replace_the_old_ones(
    model: PreTrainedModel, drafter: BlockDrafter
) -> None:
    ids, spec = texts_of(model)[2], drafter.model.spec
    right, wrong = features_of(model, ids[:-1], spec), torch.randn(99, 64)
    drafter.take(0, 0, right)
    told = drafter.propose([greedy_request(0, ids)])[0]
    drafter.free(0)
    steps: dict[str, Callable[[], None]] = {
        "waiting": lambda: drafter.take(1, 0, wrong[:7]),
        "again from the start": lambda: drafter.take(1, 0, right[:9]),
        "more": lambda: drafter.take(1, 9, wrong[:8]),
        "projected": lambda: drafter.context.project([1]),
        "behind projected": lambda: drafter.take(1, 17, wrong[:3]),
        "over both": lambda: drafter.take(1, 8, right[8:12]),
        "nothing": lambda: drafter.take(1, 12, right[:0]),
        "rest": lambda: drafter.take(1, 12, torch.cat([right[12:], wrong[:4]])),
    }
    for step in steps.values():
        step()
    again = drafter.propose([greedy_request(1, ids)])[0]
    assert again.ids == told.ids
    assert torch.allclose(
        torch.tensor(again.confidence), torch.tensor(told.confidence), atol=ROUNDING
    )


def test_a_gap_in_the_features_starts_the_context_anew(
    model: PreTrainedModel, drafter: BlockDrafter
) -> None:
    ids, spec = texts_of(model)[2], drafter.model.spec
    features = features_of(model, ids[:-1], spec)
    drafter.take(0, 12, features[12:])
    told = drafter.propose([greedy_request(0, ids)])[0]
    drafter.take(1, 0, features[:5])
    drafter.context.project([1])
    drafter.take(1, 12, features[12:])
    assert drafter.propose([greedy_request(1, ids)])[0].confidence == told.confidence
    drafter.take(2, 0, features[:-1])
    assert not drafter.propose([greedy_request(2, ids)])[0].ids, "a token's features are missing"
    for row in range(3):
        drafter.free(row)
    assert drafter._context is None


def test_near_ties_looked_at_again_leave_context_and_text_right(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)
    plain = plain_generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    drafter = Recording(block_drafter(model, texts=plain.tolist()))
    config = replace(CONFIG, exactness="recheck", recheck_margin=3.0)
    with wrapped(model, drafter, config):
        out = generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    assert out.speculation[0].rechecks > 0
    check(out, plain)
    assert all(proposal.ids for _, _, _, proposal in drafter.rounds)


def test_streaming_gives_every_token_once_and_in_order(
    model: PreTrainedModel, drafter: BlockDrafter
) -> None:
    plain = plain_generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    streamer = Recorder()
    with wrapped(model, drafter, CONFIG):
        out = generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS, streamer=streamer)
    check(out, plain)
    assert [token for piece in streamer.pieces for token in piece] == plain[0].tolist()
    assert streamer.ended == 1


# copies, casts, places


def arrived(model: PreTrainedModel, how: str) -> PreTrainedModel:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("how", "is_listed"),
    [("deepcopy", False), ("pickle", False), ("torch.save", False), ("pickle", True)],
)
def test_a_copy_of_a_wrapped_model_drafts_for_itself(
    model: PreTrainedModel, drafter: BlockDrafter, how: str, is_listed: bool
) -> None:
    plain = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    DSparkForCausalLM.wrap(model, [drafter, "lookup"] if is_listed else drafter, CONFIG)
    # Which one of a list drafts depends on what they cost on this machine.
    check(generate(model, PROMPTS, max_new_tokens=NEW_TOKENS), plain, drafts=not is_listed)
    twin = arrived(model, how)
    theirs = twin.dspark.drafter.reader if is_listed else twin.dspark.drafter
    assert theirs.target is twin
    assert theirs.vocabulary.target is twin
    head = twin.get_output_embeddings().weight
    assert torch.equal(theirs.vocabulary.head(), head[: VOCAB - 8])
    check(generate(twin, PROMPTS, max_new_tokens=NEW_TOKENS), plain, drafts=not is_listed)
    with torch.no_grad():
        head.neg_()
    assert torch.equal(theirs.vocabulary.head(), head[: VOCAB - 8])
    assert generate(twin, PROMPTS, max_new_tokens=NEW_TOKENS).sequences.tolist() != plain.tolist()
    check(generate(model, PROMPTS, max_new_tokens=NEW_TOKENS), plain)


@pytest.mark.parametrize("owns", [False, True])
def test_the_drafter_follows_a_target_that_is_cast(model: PreTrainedModel, owns: bool) -> None:
    texts = texts_of(model)
    drafter = block_drafter(model, texts=texts, owns_embed=owns, owns_head=owns)
    with wrapped(model, drafter, CONFIG):
        for cast in (lambda: model.bfloat16(), lambda: model.to(torch.float64)):
            cast()
            for do_sample in (False, True):
                out = generate(model, PROMPTS, max_new_tokens=5, do_sample=do_sample)
                assert sum(record.verified for record in out.speculation) > 0
                assert all(record.path == "flat" for record in out.speculation)
            assert drafter.model.dtype == drafter.vocabulary.head().dtype == model.dtype


@pytest.mark.parametrize("context", ["autocast", "inference_mode", "enable_grad"])
def test_a_block_drafter_works_under_any_mode(
    model: PreTrainedModel, drafter: BlockDrafter, context: str
) -> None:
    modes: dict[str, Any] = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "inference_mode": torch.inference_mode,
        "enable_grad": torch.enable_grad,
    }
    with modes[context]():
        plain = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    with wrapped(model, drafter, CONFIG):
        for _ in range(2):
            with modes[context]():
                out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
            assert context == "autocast" or out.sequences.tolist() == plain.tolist()
            assert sum(record.verified for record in out.speculation) > 0
        # The same drafter again, outside.
        assert generate(model, PROMPTS, max_new_tokens=4).sequences.shape == (3, 18)


@pytest.mark.parametrize("is_wrapped_first", [False, True])
@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_an_offloaded_target_lends_what_it_has(
    how: str, is_wrapped_first: bool, tmp_path: Path
) -> None:
    model = llama(tie_word_embeddings=True)
    expected = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    texts = texts_of(model)
    drafters = []

    def wrap() -> None:
        drafters.append(Recording(block_drafter(model, texts=texts)))
        DSparkForCausalLM.wrap(model, drafter=drafters[0], config=CONFIG)

    if is_wrapped_first:
        wrap()
    kwargs = {} if how == "cpu" else {"offload_dir": tmp_path}
    offload = cpu_offload if how == "cpu" else disk_offload
    offload(model, execution_device=torch.device("cpu"), **kwargs)
    assert model.get_input_embeddings().weight.is_meta
    if not is_wrapped_first:
        wrap()
    check(generate(model, PROMPTS, max_new_tokens=NEW_TOKENS), expected)
    features = torch.cat([f for _, _, f in drafters[0].taken])
    assert features.isfinite().all()
    assert features.abs().sum(-1).min() > 0


# failures and company


class Broken(Recording):
    """Fails in one round, before or after drafting."""

    fails_at = 3
    in_take = False

    def propose(self, requests: Any) -> Any:
        answers = super().propose(requests)
        if len(self.rounds) >= self.fails_at and not self.in_take:
            raise RuntimeError("broken")
        return answers

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        super().take(row_id, start, features)
        if len(self.taken) >= self.fails_at and self.in_take:
            raise RuntimeError("broken")


@pytest.mark.parametrize("make", [llama, qwen3_next])
@pytest.mark.parametrize("in_take", [False, True])
def test_a_failure_in_mid_round_leaves_model_and_drafter_usable(make: Any, in_take: bool) -> None:
    model = make()
    plain = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    drafter = block_drafter(model, texts=plain[:, 14:].tolist())
    broken = Broken(drafter)
    broken.in_take = in_take
    with wrapped(model, broken, CONFIG):
        with pytest.raises(RuntimeError, match="broken"):
            generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
        assert drafter._context is None, "a row was not forgotten"
        broken.fails_at = 10**9
        check(generate(model, PROMPTS, max_new_tokens=NEW_TOKENS), plain)
        assert drafter._context is None


def test_a_drafter_made_for_another_model_is_refused(drafter: BlockDrafter) -> None:
    other = llama()
    for given in (drafter, [drafter, "lookup"]):
        with pytest.raises(ConfigError, match="made for the model it drafts for"):
            DSparkForCausalLM.wrap(other, drafter=given)
    assert not isinstance(other, DSparkForCausalLM)


def test_wrapping_again_with_the_same_drafter_works(
    model: PreTrainedModel, drafter: BlockDrafter
) -> None:
    plain = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    for _ in range(2):
        with wrapped(model, drafter, CONFIG):
            check(generate(model, PROMPTS, max_new_tokens=NEW_TOKENS), plain)


def test_calls_from_several_threads_take_turns(
    model: PreTrainedModel, drafter: BlockDrafter
) -> None:
    plain = [plain_generate(model, [ids], max_new_tokens=NEW_TOKENS).tolist() for ids in PROMPTS]
    found: dict[int, Any] = {}
    with wrapped(model, drafter, CONFIG):

        def call(i: int) -> None:
            out = generate(model, [PROMPTS[i]], max_new_tokens=NEW_TOKENS)
            found[i] = out.sequences.tolist()

        threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(3)] == plain


def test_a_confidence_that_is_no_number_is_none(model: PreTrainedModel) -> None:
    drafter = block_drafter(model)
    assert drafter.model.confidence_head is not None
    drafter.model.confidence_head.proj.bias.fill_(float("nan"))
    with wrapped(model, drafter, replace(CONFIG, schedule="threshold")):
        out = generate(model, PROMPTS, max_new_tokens=4)
    assert all(record.drafted and not record.verified for record in out.speculation)
