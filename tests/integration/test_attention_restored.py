"""The model sees the past and only the past, and keeps its own attention whatever happens.

An attention function registered without a mask function looks into the future, and then text
seems better than it is: https://github.com/huggingface/transformers/pull/45811. A call broken off
in the middle must leave the model as it was, ready for the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from drafters import PureDrafter, RightDrafter
from dspark_hf import DSparkForCausalLM
from dspark_hf.attention import interface
from dspark_hf.compat import attention_configs
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.targets.rowwise import RowwiseTarget
from dspark_hf.values import DraftRequest, Feed, Proposal
from harness import CONFIG, generate, oracle_of, paths, wrapped
from tiny import ARCHITECTURES, PAD, VOCAB, left_padded, llama, plain_generate, prompt

NEW_TOKENS = 14
PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
IDS = prompt(20, seed=8)
LATEST = (IDS[-1] + 1) % VOCAB


def implementations(model: PreTrainedModel) -> set[str]:
    """Return the attention names that the model's modules read."""
    return {config._attn_implementation for config in attention_configs(model)}


@pytest.fixture(params=["eager", "sdpa", "dspark", "after_generating"])
def attending(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Give a wrapped model with each kind of attention, or one that has just generated."""
    model = llama()
    interface.register()
    name = "sdpa" if request.param == "after_generating" else request.param
    model.set_attn_implementation(name)
    DSparkForCausalLM.wrap(model, drafter=model, config=CONFIG)
    if request.param == "after_generating":
        assert paths(generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)) == {"flat"}
    assert implementations(model) == {name}
    return model


@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_score(attending: PreTrainedModel) -> None:
    one = attending(torch.tensor([IDS])).logits
    other = attending(torch.tensor([[*IDS[:-1], LATEST]])).logits
    assert torch.equal(one[:, :-1], other[:, :-1])
    assert not torch.equal(one[:, -1], other[:, -1])


@torch.no_grad()
def test_a_padded_token_never_changes_a_score(attending: PreTrainedModel) -> None:
    ids, mask = left_padded(PROMPTS)
    changed = torch.where(mask == 0, 99, ids)
    assert not torch.equal(ids, changed)
    one = attending(ids, attention_mask=mask).logits
    other = attending(changed, attention_mask=mask).logits
    assert torch.equal(one[mask == 1], other[mask == 1])


@torch.no_grad()
def test_a_token_behind_a_filled_cache_never_changes_an_earlier_score(
    attending: PreTrainedModel,
) -> None:
    scores = []
    for last in (IDS[-1], LATEST):
        cache = attending(torch.tensor([IDS[:12]]), use_cache=True)["cache"]
        block = torch.tensor([[*IDS[12:-1], last]])
        scores.append(attending(block, cache=cache).logits)
    assert torch.equal(scores[0][:, :-1], scores[1][:, :-1])
    whole = attending(torch.tensor([IDS])).logits[:, 12:-1]
    assert torch.allclose(scores[0][:, :-1], whole, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_next", "bloom"])
@torch.no_grad()
def test_a_later_token_of_a_verified_block_never_changes_an_earlier_score(name: str) -> None:
    model = ARCHITECTURES[name]()
    kind = RowwiseTarget if name in ("qwen3_next", "bloom") else FlatTarget
    scores = []
    for last in (IDS[-1], LATEST):
        target = kind(model)
        target.forward([Feed(0, IDS[:12], 1), Feed(1, PROMPTS[0], 1)])
        block = [*IDS[12:-1], last]
        found = target.forward([Feed(0, block, len(block)), Feed(1, [5, last], 2)])
        scores.append(torch.cat([found[0][:-1], found[1][:-1]]))
    if name == "qwen3_next":
        # Its recurrent layers solve for all tokens of a block at once, which rounds differently.
        assert torch.allclose(scores[0], scores[1], atol=1e-4)
    else:
        assert torch.equal(scores[0], scores[1])
    plain = model(torch.tensor([IDS]), use_cache=False).logits[0, 12:-1]
    assert torch.allclose(scores[0][:-1], plain, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "eager"),
        ("llama", "sdpa"),
        ("gemma3", "eager"),
        ("gemma3", "sdpa"),
        ("gpt_oss", "eager"),
        ("qwen3_next", "eager"),
        ("qwen3_next", "sdpa"),
    ],
)
def test_padding_moves_no_text_and_no_score(name: str, attention: str) -> None:
    model = ARCHITECTURES[name]()
    model.set_attn_implementation(attention)
    ids, mask = left_padded(PROMPTS)
    plain = plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    outs = []
    with wrapped(model, oracle_of(plain, PROMPTS)):
        for pad in (PAD, 99):
            padded = torch.where(mask == 0, pad, ids)
            kwargs = {"max_new_tokens": NEW_TOKENS, "output_scores": True, "do_sample": False}
            kwargs |= {"return_dict_in_generate": True, "attention_mask": mask}
            outs.append(model.generate(padded, **kwargs))
    new = [out.sequences[:, -NEW_TOKENS:].tolist() for out in outs]
    assert new[0] == new[1] == plain[:, -NEW_TOKENS:].tolist()
    assert all(torch.equal(a, b) for a, b in zip(outs[0].scores, outs[1].scores, strict=True))
    assert torch.stack(outs[0].scores).isfinite().all()


class BrokenOffError(Exception):
    """What a test breaks a call off with."""


@dataclass
class BreaksAt:
    """Raises when called for the n-th time; stands for a hook, processor, criterion or streamer."""

    error: type[BaseException]
    calls_left: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise self.error("broken off")
        return args[1] if len(args) == 2 and torch.is_tensor(args[1]) else None

    put = __call__

    def end(self) -> None:
        """Do nothing."""


class BreaksAsCriterion(BreaksAt):
    """The same, answering as a criterion does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        super().__call__()
        return torch.zeros(len(args[0]), dtype=torch.bool)


@dataclass(frozen=True)
class BreakingDrafter(PureDrafter):
    """Right, until it is asked for the n-th time."""

    right: RightDrafter
    breaks: BreaksAt

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Propose, or break."""
        self.breaks()
        return self.right.propose_row(request)


def in_layer(model: PreTrainedModel, drafter: Any, error: type[BaseException], at: int) -> Any:
    model.model.layers[1].register_forward_pre_hook(BreaksAt(error, at))
    return {}


def in_last_layer(model: PreTrainedModel, drafter: Any, error: type[BaseException], at: int) -> Any:
    model.model.layers[2].register_forward_hook(BreaksAt(error, at))
    return {}


def in_processor(model: PreTrainedModel, drafter: Any, error: type[BaseException], at: int) -> Any:
    return {"logits_processor": LogitsProcessorList([BreaksAt(error, at)])}


def in_criterion(model: PreTrainedModel, drafter: Any, error: type[BaseException], at: int) -> Any:
    return {"stopping_criteria": StoppingCriteriaList([BreaksAsCriterion(error, at)])}


def in_streamer(model: PreTrainedModel, drafter: Any, error: type[BaseException], at: int) -> Any:
    # Transformers itself puts the prompt, before any loop has begun.
    return {"streamer": BreaksAt(error, at + 1)}


def in_drafter(model: PreTrainedModel, drafter: Any, error: type[BaseException], at: int) -> Any:
    model.dspark.drafter = BreakingDrafter(drafter, BreaksAt(error, at))
    return {}


PLACES: dict[str, Callable[..., Any]] = {
    "layer": in_layer,
    "last_layer": in_last_layer,
    "processor": in_processor,
    "criterion": in_criterion,
    "streamer": in_streamer,
    "drafter": in_drafter,
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("error", [BrokenOffError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_call_broken_off_anywhere_leaves_the_model_as_it_was(
    place: str, at: int, error: type[BaseException], attention: str
) -> None:
    model = llama()
    model.set_attn_implementation(attention)
    plain = plain_generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    right = oracle_of(plain, PROMPTS[:1])
    with wrapped(model, right):
        # The first call checks the target, with forwards of its own.
        generate(model, PROMPTS[:1], max_new_tokens=2)
        right.freed.clear()
        kwargs = PLACES[place](model, right, error, at)
        with pytest.raises(error, match="broken off"):
            generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS, **kwargs)
        assert implementations(model) == {attention}
        drafter = model.dspark.drafter
        assert len(drafter.freed) == 1, "the row that was broken off is still held"
        assert model.dspark.metrics.rows == 1
        # Another thread can generate: nothing is left locked.
        model.dspark.drafter, results = right, []
        worker = threading.Thread(
            target=lambda: results.append(generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS))
        )
        worker.start()
        worker.join(timeout=60)
        assert results[0].sequences.tolist() == plain.tolist()
        assert results[0].speculation[0].accepted > 0


@pytest.mark.parametrize("error", [BrokenOffError, KeyboardInterrupt])
def test_a_self_check_broken_off_leaves_the_model_as_it_was(error: type[BaseException]) -> None:
    model = llama().train()
    plain = plain_generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    hook = model.model.layers[1].register_forward_pre_hook(BreaksAt(error, 3))
    with wrapped(model, oracle_of(plain, PROMPTS[:1])):
        with pytest.raises(error, match="broken off"):
            generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
        hook.remove()
        assert model.training
        assert implementations(model) == {"sdpa"}
        out = generate(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
        assert out.sequences.tolist() == plain.tolist()
        assert paths(out) == {"flat"}


def test_a_plain_forward_in_another_thread_is_right_while_the_model_generates() -> None:
    model = llama()
    ids, mask = left_padded(PROMPTS)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    plain = plain_generate(model, PROMPTS, max_new_tokens=60)
    errors, stop = [], threading.Event()

    def look() -> None:
        with torch.no_grad():
            while not stop.is_set():
                found = model(ids, attention_mask=mask).logits
                errors.append(float((found - expected)[mask == 1].abs().max()))

    with wrapped(model, "lookup"):
        worker = threading.Thread(target=look)
        worker.start()
        try:
            for _ in range(3):
                out = generate(model, PROMPTS, max_new_tokens=60)
        finally:
            stop.set()
            worker.join()
    assert out.sequences.tolist() == plain.tolist()
    assert len(errors) > 2
    assert max(errors) < 1e-4
