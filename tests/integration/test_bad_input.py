"""What cannot work is refused before the target runs, naming what is wrong and what is allowed.

Each refusal must leave the model as it was: it generates the plain text straight afterwards.
Drafters of another vocabulary: https://github.com/huggingface/transformers/issues/30728.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaModel, PreTrainedModel

from drafters import PureDrafter, RandomDrafter
from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.errors import CapacityError, CheckpointError, ConfigError, DSparkError, InputError
from dspark_hf.values import DraftRequest, Proposal
from harness import CONFIG, counted_forwards, generate, noisy_copy, wrapped
from tiny import ARCHITECTURES, PAD, VOCAB, llama, plain_generate, prompt

PROMPT = prompt(9, seed=2)
NEW_TOKENS = 10
POSITIONS = 256
"""Of every tiny model; rows of a learned table in GPT-2 and OPT."""


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return plain_generate(llama(), [PROMPT], max_new_tokens=NEW_TOKENS).tolist()


@pytest.fixture
def model() -> PreTrainedModel:
    return DSparkForCausalLM.wrap(llama(), drafter=RandomDrafter(VOCAB), config=CONFIG)


@contextmanager
def refused(model: PreTrainedModel, error: type[BaseException], match: str) -> Iterator[None]:
    """Expect an error before the model has run."""
    with counted_forwards(model) as forwards, pytest.raises(error, match=match):
        yield
    assert forwards == [], "the target ran before the input was refused"


def still_works(model: PreTrainedModel, plain: list[list[int]]) -> None:
    """Check that the model generates the plain text, with drafts."""
    out = generate(model, [PROMPT], max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == plain
    assert out.speculation[0].verified > 0


@dataclass(frozen=True)
class Bad:
    """A prompt that cannot be decoded, the error it must raise and a part of the message."""

    ids: list[list[int]]
    match: str
    mask: list[list[int]] | None = None


INPUTS = {
    "empty": Bad([[]], r"input_ids must hold at least one token per row; got shape \(1, 0\)"),
    "too_high": Bad([[3, VOCAB]], rf"must lie in 0\.\.{VOCAB - 1}.*got {VOCAB}"),
    "far_too_high": Bad([[3, 1 << 40]], rf"must lie in 0\.\.{VOCAB - 1}.*got {1 << 40}"),
    "negative": Bad([[3, -1]], rf"must lie in 0\.\.{VOCAB - 1}.*got -1"),
    "all_masked": Bad([[3, 4], [5, 6]], r"rows \[1\] have none", [[1, 1], [0, 0]]),
}


@pytest.mark.parametrize("how", ["positional", "input_ids", "inputs"])
@pytest.mark.parametrize("name", INPUTS)
def test_a_prompt_that_cannot_be_decoded_is_refused(
    model: PreTrainedModel, plain: list[list[int]], name: str, how: str
) -> None:
    bad = INPUTS[name]
    ids = torch.tensor(bad.ids, dtype=torch.long)
    kwargs: dict[str, Any] = {"max_new_tokens": NEW_TOKENS}
    if bad.mask is not None:
        kwargs["attention_mask"] = torch.tensor(bad.mask)
    args = [ids] if how == "positional" else []
    if how != "positional":
        kwargs[how] = ids
    with refused(model, InputError, bad.match):
        model.generate(*args, **kwargs)
    still_works(model, plain)


@pytest.mark.parametrize("max_new_tokens", [0, -1])
def test_a_length_that_is_not_positive_is_refused_as_plain_decoding_refuses_it(
    model: PreTrainedModel, plain: list[list[int]], max_new_tokens: int
) -> None:
    ids = torch.tensor([PROMPT])
    with pytest.raises(ValueError, match="max_") as theirs:
        llama().generate(ids, max_new_tokens=max_new_tokens)
    with refused(model, ValueError, re.escape(str(theirs.value))):
        model.generate(ids, max_new_tokens=max_new_tokens)
    still_works(model, plain)


LENGTHS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "max_new_tokens": lambda length, new: {"max_new_tokens": new},
    "max_length": lambda length, new: {"max_length": length + new},
    "generation_config": lambda length, new: {
        "generation_config": GenerationConfig(max_new_tokens=new, pad_token_id=PAD)
    },
}


@pytest.mark.parametrize("how", LENGTHS)
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_more_tokens_than_learned_positions_are_refused_and_the_last_one_is_used(
    name: str, how: str
) -> None:
    model = ARCHITECTURES[name]()
    ids = prompt(POSITIONS - 6, seed=3)
    # The newest token needs no position, so one more than is left can be generated.
    fits = {"do_sample": False, **LENGTHS[how](len(ids), 7)}
    plain = plain_generate(model, [ids], **fits).tolist()
    with wrapped(model, RandomDrafter(VOCAB)):
        with refused(model, CapacityError, rf"{POSITIONS} learned positions.*Lower .* to 7"):
            generate(model, [ids], **LENGTHS[how](len(ids), 8))
        out = generate(model, [ids], **fits)
    assert out.sequences.tolist() == plain
    assert out.speculation[0].verified > 0


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_prompt_longer_than_the_models_positions_is_refused(name: str) -> None:
    model = ARCHITECTURES[name]()
    with (
        wrapped(model, RandomDrafter(VOCAB)),
        refused(
            model, CapacityError, rf"{POSITIONS} learned positions; got {POSITIONS + 1} tokens"
        ),
    ):
        generate(model, [prompt(POSITIONS + 1, seed=3)], max_new_tokens=1)


def test_padding_does_not_count_as_positions() -> None:
    model = ARCHITECTURES["gpt2"]()
    ids = torch.tensor([[PAD] * 100 + prompt(POSITIONS - 6, seed=3)])
    mask = (ids != PAD).long()
    kwargs = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 7}
    plain = model.generate(ids, **kwargs)
    with wrapped(model, RandomDrafter(VOCAB)):
        assert model.generate(ids, **kwargs).tolist() == plain.tolist()


@pytest.mark.parametrize("other_size", [VOCAB - 20, VOCAB + 12])
def test_a_drafter_with_another_vocabulary_is_refused_with_both_sizes_named(
    model: PreTrainedModel, plain: list[list[int]], other_size: int
) -> None:
    other = llama(vocab_size=other_size)
    drafter = model.dspark.drafter
    for call in (DSparkForCausalLM.wrap, lambda m, **k: DSparkForCausalLM.wrap(llama(), **k)):
        with pytest.raises(CheckpointError, match=rf"{VOCAB} token ids.*{other_size}"):
            call(model, drafter=other)
    assert model.dspark.drafter is drafter
    still_works(model, plain)


def test_a_drafter_that_cannot_be_loaded_is_refused_and_the_model_stays_plain(
    tmp_path: Path,
) -> None:
    model = llama()
    (tmp_path / "empty").mkdir()
    llama().save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    for path in (
        tmp_path / "missing", str(tmp_path / "empty"), "no/such-drafter", tmp_path / "cut",
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="drafter must be") as caught:
            DSparkForCausalLM.wrap(model, drafter=path)
        assert str(path) in str(caught.value)
    assert not isinstance(model, DSparkForCausalLM)


WRONG_MODELS: dict[str, Callable[[], Any]] = {
    "name": lambda: "gpt2",
    "none": lambda: None,
    "layer": lambda: nn.Linear(2, 2),
    "class": lambda: LlamaModel,
    "headless": lambda: LlamaModel(llama().config),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_only_causal_language_models_can_be_wrapped(name: str) -> None:
    with pytest.raises(ConfigError, match="model must be a Transformers causal LM; got"):
        DSparkForCausalLM.wrap(WRONG_MODELS[name]())


@pytest.mark.parametrize("drafter", [3, 1.5, {}, RandomDrafter, object(), "", nn.Linear(2, 2)])
def test_a_drafter_of_the_wrong_type_is_refused(drafter: Any) -> None:
    with pytest.raises(DSparkError, match="drafter must be"):
        DSparkForCausalLM.wrap(llama(), drafter=drafter)


@pytest.mark.parametrize("config", [{}, {"max_draft_tokens": 3}, "auto", 7, LlamaConfig()])
def test_settings_of_the_wrong_type_are_refused(
    model: PreTrainedModel, plain: list[list[int]], config: Any
) -> None:
    with pytest.raises(ConfigError, match="config must be a DSparkConfig"):
        DSparkForCausalLM.wrap(llama(), config=config)
    with refused(model, ConfigError, "dspark must be a DSparkConfig"):
        model.generate(torch.tensor([PROMPT]), dspark=config)
    still_works(model, plain)


def test_loading_tells_a_transformers_configuration_from_ours(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="hf_config="):
        DSparkForCausalLM.from_pretrained(tmp_path, config=LlamaConfig())
    with pytest.raises(ConfigError, match="config must be a DSparkConfig"):
        DSparkForCausalLM.from_pretrained(tmp_path, config={"schedule": "fixed"})
    loaded = DSparkForCausalLM.from_pretrained(
        tmp_path, hf_config=LlamaConfig.from_pretrained(tmp_path, rms_norm_eps=1e-3)
    )
    assert loaded.config.rms_norm_eps == 1e-3


def test_an_unknown_keyword_is_refused_as_plain_decoding_refuses_it(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    with refused(model, ValueError, "no_such_option"):
        model.generate(torch.tensor([PROMPT]), no_such_option=3)
    still_works(model, plain)


@dataclass(frozen=True)
class Answering(PureDrafter):
    """Answers every request with what it was given."""

    answer: Callable[[DraftRequest], Proposal]

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Answer."""
        return self.answer(request)


@dataclass(frozen=True)
class Silent(PureDrafter):
    """Answers no request at all."""

    def propose(self, requests: Any) -> list[Proposal]:
        """Return too few proposals."""
        return []


UNIFORM = torch.full((VOCAB,), 1 / VOCAB)
WRONG_DRAFTERS: dict[str, tuple[PureDrafter, str]] = {
    "too_high": (Answering(lambda r: Proposal([1, VOCAB])), rf"below the target's {VOCAB}; got"),
    "negative": (Answering(lambda r: Proposal([-1])), rf"below the target's {VOCAB}; got -1"),
    "too_few_probs": (Answering(lambda r: Proposal([1, 2], UNIFORM[None])), "got 1 for 2 tokens"),
    "too_few_confidences": (
        Answering(lambda r: Proposal([1, 2], confidence=[0.5])),
        "one confidence per proposed token; got 1 for 2",
    ),
    "confidence_above_one": (
        Answering(lambda r: Proposal([1], confidence=[1.5])),
        "confidences from 0 to 1; got 1.5",
    ),
    "confidence_not_a_number": (
        Answering(lambda r: Proposal([1], confidence=[float("nan")])),
        "confidences from 0 to 1; got nan",
    ),
    "too_few_proposals": (Silent(), "proposal"),
}


@pytest.mark.parametrize("name", WRONG_DRAFTERS)
def test_a_drafter_that_breaks_its_promises_is_named_and_can_be_replaced(
    model: PreTrainedModel, plain: list[list[int]], name: str
) -> None:
    drafter, match = WRONG_DRAFTERS[name]
    DSparkForCausalLM.wrap(model, drafter=drafter, config=CONFIG)
    with pytest.raises(CheckpointError, match=match) as caught:
        generate(model, [PROMPT], max_new_tokens=NEW_TOKENS)
    assert repr(drafter.name) in str(caught.value)
    DSparkForCausalLM.wrap(model, drafter=RandomDrafter(VOCAB), config=CONFIG)
    still_works(model, plain)


def test_a_drafter_may_propose_more_than_asked_and_the_surplus_is_dropped(
    model: PreTrainedModel, plain: list[list[int]]
) -> None:
    greedy = Answering(lambda r: Proposal([1] * (r.max_tokens + 30)))
    DSparkForCausalLM.wrap(model, drafter=greedy, config=CONFIG)
    out = generate(model, [PROMPT], max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == plain
    record = out.speculation[0]
    assert record.drafted <= CONFIG.max_draft_tokens * record.rounds


def test_a_drafter_with_fewer_positions_than_the_target_stops_drafting_there() -> None:
    target, short = llama(), llama(max_position_embeddings=16)
    plain = plain_generate(target, [PROMPT], max_new_tokens=20).tolist()
    with wrapped(target, short):
        out = generate(target, [PROMPT], max_new_tokens=20)
    assert out.sequences.tolist() == plain
    assert 0 < out.speculation[0].drafted < 20


def test_settings_that_are_allowed_alone_are_allowed_together() -> None:
    model = llama()
    plain = plain_generate(model, [PROMPT], max_new_tokens=NEW_TOKENS).tolist()
    config = DSparkConfig(
        acceptance="coupled", schedule="auto", max_draft_tokens=64, exactness="recheck", seed=0
    )
    with wrapped(model, noisy_copy(model), config):
        assert generate(model, [PROMPT], max_new_tokens=NEW_TOKENS).sequences.tolist() == plain
