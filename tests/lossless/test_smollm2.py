"""The real model: SmolLM2-135M says what it says in plain decoding, alone and in ragged batches.

20 prompts of different length, 64 new tokens, float32 exactly; bfloat16 up to near-ties.
Field case: https://github.com/huggingface/transformers/issues/39421
"""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.data import load_prompts
from dspark_hf.drafting.choice import DrafterChoice
from dspark_hf.drafting.resolve import resolve_drafter
from dspark_hf.drafting.shipped import find_shipped
from dspark_hf.losslessness import greedy_check

NUM_PROMPTS, NEW_TOKENS = 20, 64
NUM_BF16_PROMPTS = 5
BATCH_SIZES = (2, 5, 8)
MOST_DRAFTER_BYTES = 24_000_000
DRAFTERS = {
    # The settings everybody gets; and a drafter that is often wrong, always verified.
    "lookup": DSparkConfig(),
    "model": DSparkConfig(schedule="fixed", max_draft_tokens=2),
    # The drafter that ships, half of its blocks, so that many drafts are wrong somewhere.
    "block": DSparkConfig(schedule="fixed", max_draft_tokens=4),
}
KINDS = [pytest.param(kind, marks=pytest.mark.xdist_group(f"real-{kind}")) for kind in DRAFTERS]

pytestmark = pytest.mark.slow


class Subject:
    """The loaded model, its prompts, and what it says in plain decoding."""

    def __init__(self, path, dtype):
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        # Short prompts of every group, so that 20 of them fit into minutes on one core.
        shortest = sorted(load_prompts(), key=lambda prompt: len(prompt.text))
        texts = [prompt.text for prompt in shortest[: 2 * NUM_PROMPTS : 2]]
        self.prompts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
        self._plain = None

    @property
    def plain(self):
        """New tokens of each prompt in plain decoding, computed once, before any wrapping.

        Two static batches, as one by one takes minutes; float32 texts do not depend on it.
        """
        if self._plain is None:
            assert not isinstance(self.model, DSparkForCausalLM)
            half = NUM_PROMPTS // 2
            self._plain = [
                text
                for start in (0, half)
                for text in self.generate(self.model, self.prompts[start : start + half])[0]
            ]
        return self._plain

    def generate(self, model, prompts, **settings):
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        out = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            **settings,
        )
        end = self.tokenizer.eos_token_id
        new = out.sequences[:, inputs.input_ids.shape[1] :].tolist()
        cut = [row[: row.index(end) + 1] if end in row else row for row in new]
        return cut, getattr(out, "speculation", None)

    def first_layers(self, count):
        """A drafting model of the target's first layers, sharing its weights."""
        config = copy.deepcopy(self.model.config)
        config.num_hidden_layers = count
        with torch.device("meta"):
            drafter = LlamaForCausalLM(config)
        weights = self.model.state_dict()
        drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()}, assign=True)
        drafter.tie_weights()
        # Built on meta, so the rotary table, which is no weight, is taken from the target.
        drafter.model.rotary_emb = copy.deepcopy(self.model.model.rotary_emb)
        return drafter.eval()


@pytest.fixture(scope="module")
def subject(smollm2_path):
    return Subject(smollm2_path, torch.float32)


@pytest.fixture(scope="module")
def subject_bf16(smollm2_path):
    return Subject(smollm2_path, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_text_equals_plain_alone_and_in_ragged_batches(subject, kind):
    plain = subject.plain
    drafter = {"lookup": lambda: "lookup", "model": lambda: subject.first_layers(2)}.get(
        kind, lambda: find_shipped(subject.model)
    )()
    model = DSparkForCausalLM.wrap(subject.model, drafter=drafter, config=DRAFTERS[kind])
    try:
        verified = 0
        for size in (1, *BATCH_SIZES):
            for start in range(0, NUM_PROMPTS, size):
                chunk = subject.prompts[start : start + size]
                texts, records = subject.generate(model, chunk)
                assert texts == plain[start : start + size], (size, start)
                assert {record.path for record in records} == {"flat"}
                verified += sum(record.verified for record in records)
        assert verified > NUM_PROMPTS
    finally:
        DSparkForCausalLM.unwrap(subject.model)


@pytest.mark.xdist_group("smollm2-bf16")
def test_bfloat16_text_forks_only_on_near_ties(subject_bf16):
    model = DSparkForCausalLM.wrap(subject_bf16.model, drafter="lookup")
    encoded = [subject_bf16.tokenizer(p).input_ids for p in subject_bf16.prompts[:NUM_BF16_PROMPTS]]
    results = greedy_check(model, encoded, NEW_TOKENS)
    forks = [result.fork for result in results if result.fork is not None]
    sys.stderr.write(
        f"bfloat16: {len(forks)} forks in {len(results)} prompts; margins "
        f"{[round(fork.margin, 3) for fork in forks]}\n"
    )
    assert sum(result.record.verified for result in results) > 0
    assert all(fork.is_near_tie for fork in forks), forks


@pytest.mark.xdist_group("real-block")
def test_the_shipped_drafter_is_found_by_its_target_and_guesses(subject):
    folder = find_shipped(subject.model)
    assert folder is not None
    assert (folder / "model.safetensors").stat().st_size <= MOST_DRAFTER_BYTES
    drafter = resolve_drafter("auto", subject.model)
    assert isinstance(drafter, DrafterChoice)
    assert {member.name for member in drafter.members} == {folder.name, "lookup"}
    alone = DSparkForCausalLM.wrap(subject.model, drafter=folder, config=DRAFTERS["block"])
    try:
        _, records = subject.generate(alone, subject.prompts[:2])
    finally:
        DSparkForCausalLM.unwrap(subject.model)
    # A guess at random is right once in 49,152 times; the card says how often this one is.
    assert sum(r.accepted for r in records) > 0.25 * sum(r.rounds for r in records)
