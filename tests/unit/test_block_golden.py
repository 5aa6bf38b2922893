"""Golden drafters give the logits, drafts and counts that the public implementations gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from block_drafters import Recording, features_of
from checkpoint_files import DEEPSPEC_SETS, GOLDEN, SETS, SPECULATORS_SETS, drafter_of
from dspark_hf import DSparkConfig
from dspark_hf.drafting.block.build import build_block_drafter
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.drafting.block.model import teacher_forced
from dspark_hf.drafting.checkpoints.load import load_checkpoint
from harness import wrapped

ROUNDS = 12
EXACT = 1e-4
"""Absolute bound on fp32 logits of about 10 between two implementations; 1e-5 was seen."""


@dataclass(frozen=True)
class Golden:
    """A golden set, its drafter built as the library builds it."""

    name: str
    target: PreTrainedModel
    drafter: BlockDrafter
    values: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    folder = GOLDEN / request.param
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    drafter = build_block_drafter(load_checkpoint(drafter_of(request.param)), target)
    return Golden(request.param, target, drafter, load_file(folder / "golden.safetensors"))


@torch.no_grad()
def head_logits(
    golden: Golden, hidden: torch.Tensor, previous: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Base logits, draft logits and confidence logits of blocks whose tokens are known."""
    model = golden.drafter.model
    base, token = golden.drafter.vocabulary.logits(hidden), None
    draft = base
    if model.markov_head is not None:
        draft = base + model.markov_head(previous, hidden)
        token = model.markov_head.markov_w1(previous)
    confidence = None
    if model.confidence_head is not None:
        confidence = model.confidence_head(hidden, token)
    return base, draft, confidence


def assert_close(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        torch.testing.assert_close(one, other, atol=EXACT, rtol=0)


@pytest.mark.parametrize("golden", DEEPSPEC_SETS, indirect=True)
def test_logits_of_all_rounds_are_those_of_the_reference(golden: Golden) -> None:
    values, model = golden.values, golden.drafter.model
    ids = values["sequence"]
    features = features_of(golden.target, ids[0].tolist(), model.spec)[None]
    for r in range(ROUNDS):
        start = int(values[f"r{r}.start"])
        drafted = values[f"r{r}.draft_tokens"][0]
        with torch.no_grad():
            hidden = teacher_forced(
                model,
                golden.drafter.vocabulary.embedding(),
                features[:, :start],
                ids,
                torch.tensor([[start]]),
            )[0, 0]
        found = head_logits(golden, hidden, torch.cat([ids[0, start : start + 1], drafted[:-1]]))
        for name, logits in zip(("base", "draft", "confidence"), found, strict=True):
            told = values.get(f"r{r}.{name}_logits")
            assert_close(logits, None if told is None else told[0])


@pytest.mark.parametrize("golden", SPECULATORS_SETS, indirect=True)
def test_teacher_forced_logits_are_those_of_speculators(golden: Golden) -> None:
    values, drafter = golden.values, golden.drafter
    with torch.no_grad():
        hidden = teacher_forced(
            drafter.model,
            drafter.vocabulary.embedding(),
            values["features"],
            values["sequence"],
            values["anchors"][None],
        )[0]
    found = head_logits(golden, hidden, values["prev_tokens"])
    for name, logits in zip(("base", "draft", "confidence"), found, strict=True):
        assert_close(logits, values.get(f"{name}_logits"))


def generate(golden: Golden, ids: torch.Tensor, new_tokens: int) -> tuple[Any, Recording]:
    drafter = Recording(golden.drafter)
    config = DSparkConfig(schedule="fixed", max_draft_tokens=drafter.block_size)
    with wrapped(golden.target, drafter, config) as model:
        out = model.generate(
            ids, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
        )
    return out, drafter


@pytest.mark.parametrize("golden", DEEPSPEC_SETS, indirect=True)
def test_generate_drafts_and_accepts_what_the_reference_did(golden: Golden) -> None:
    values, prompt = golden.values, golden.values["prompt"]
    length = values["sequence"].shape[1]
    out, drafter = generate(golden, prompt, length - prompt.shape[1] + 8)
    assert torch.equal(out.sequences[:, :length], values["sequence"])
    record = out.speculation[0]
    told = [int(values[f"r{r}.accepted"]) for r in range(ROUNDS)]
    assert record.accepted_per_round[:ROUNDS] == told
    for r, (_, ids, _, proposal) in enumerate(drafter.rounds[:ROUNDS]):
        assert len(ids) - 1 == int(values[f"r{r}.start"])
        assert list(proposal.ids) == values[f"r{r}.draft_tokens"][0].tolist()
        logits = values.get(f"r{r}.confidence_logits")
        if logits is None:
            assert proposal.confidence == ()
        else:
            assert_close(torch.tensor(proposal.confidence), logits[0].sigmoid())


@pytest.mark.parametrize("golden", SETS, indirect=True)
def test_text_with_a_golden_drafter_is_the_targets_own(golden: Golden) -> None:
    prompt = golden.values["sequence"][:, :13]
    plain = golden.target.generate(prompt, max_new_tokens=24, do_sample=False)
    out, drafter = generate(golden, prompt, 24)
    assert torch.equal(out.sequences, plain)
    longest = max(len(proposal.ids) for _, _, _, proposal in drafter.rounds)
    assert longest == golden.drafter.model.spec.num_drafts


@pytest.mark.parametrize("golden", SPECULATORS_SETS, indirect=True)
def test_a_draft_follows_the_readout_and_the_mapping_of_its_checkpoint(golden: Golden) -> None:
    spec = golden.drafter.model.spec
    is_pruned = golden.name == "speculators_pruned_b5"
    assert spec.num_drafts == 5
    assert spec.block_size == (5 if is_pruned else 6)
    assert spec.is_pruned == is_pruned
    prompt = golden.values["sequence"][:, :13]
    _, drafter = generate(golden, prompt, 24)
    ids = {token for _, _, _, proposal in drafter.rounds for token in proposal.ids}
    if is_pruned:
        assert ids <= set(golden.drafter.vocabulary.target_ids.tolist())
        assert max(ids) >= spec.draft_vocab_size
