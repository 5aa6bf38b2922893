"""Block drafters leave the text alone: every head and readout, every schedule, batches, recurrence.

The drafters were taught the rows' plain texts one after another, so that where two texts disagree
a draft is right in one of them only: blocks are accepted in part. fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from block_drafters import FULL, SLIDING, block_drafter
from dspark_hf import DSparkConfig, DSparkForCausalLM
from dspark_hf.config import SCHEDULES
from dspark_hf.drafting.block.drafter import BlockDrafter
from harness import generate
from tiny import VOCAB, llama, plain_generate, prompt, qwen3_next

NEW_TOKENS = 16
LENGTHS = (3, 17, 9, 1, 26, 6, 12, 2)
PROMPTS = tuple(prompt(length, seed=40 + i) for i, length in enumerate(LENGTHS))
SIZES = (1, 2, 5, 8)
CONFIG = DSparkConfig(schedule="fixed", max_draft_tokens=6, never_slower=False)
COUNTS = (
    "path", "new_tokens", "rounds", "drafted", "verified", "accepted", "cut_rounds",
    "accepted_per_round", "tested_by_position", "accepted_by_position", "accepted_mask",
)  # fmt: skip
"""Everything a record counts; its seconds are shared between rows and do vary."""
PRUNED = (*range(1, VOCAB, 2), 100, 120)

KINDS: dict[str, dict[str, Any]] = {
    "none": {"head": "none"},
    "none-mask-filling": {"head": "none", "reads_anchor": False, "owns_head": True},
    "vanilla": {"head": "vanilla"},
    "vanilla-mask-filling": {"head": "vanilla", "reads_anchor": False, "block_size": 6},
    "gated-pruned": {"head": "gated", "draft_ids": sorted(PRUNED)},
    "rnn-sliding": {
        "head": "rnn",
        "layer_types": (SLIDING, FULL),
        "sliding_window": 4,
        "sliding_is_causal": True,
    },
    "rnn-pruned-mask-filling": {
        "head": "rnn",
        "reads_anchor": False,
        "draft_ids": sorted(PRUNED),
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 4,
    },
    "vanilla-own-tables-no-confidence": {
        "owns_embed": True,
        "owns_head": True,
        "has_confidence": False,
        "confidence_sees_token": False,
    },
}


@dataclass(frozen=True)
class Subject:
    """A model, what it says alone and in batches when plain, and its drafters."""

    model: PreTrainedModel
    path: str
    alone: list[list[int]]
    plain: dict[int, list[list[int]]]
    drafters: dict[str, BlockDrafter] = field(default_factory=dict)
    solo: dict[tuple[str, str], list[Any]] = field(default_factory=dict)

    def drafter(self, kind: str) -> BlockDrafter:
        """Return the drafter of a kind, made once."""
        if kind not in self.drafters:
            settings = dict(KINDS[kind])
            texts = () if settings.get("head") == "none" else self.alone
            self.drafters[kind] = block_drafter(self.model, texts=texts, **settings)
        return self.drafters[kind]


def decode(subject: Subject, kind: str, prompts: Any, config: DSparkConfig) -> Any:
    # The model stays wrapped: checking it anew for each call would take most of the time.
    subject.model.dspark.drafter = subject.drafter(kind)
    return generate(subject.model, prompts, max_new_tokens=NEW_TOKENS, dspark=config)


@cache
def subject_on(path: str) -> Subject:
    """Build a target once."""
    model = llama() if path == "flat" else qwen3_next()
    alone = [plain_generate(model, [ids], max_new_tokens=NEW_TOKENS)[0].tolist() for ids in PROMPTS]
    plain = {
        size: plain_generate(model, PROMPTS[:size], max_new_tokens=NEW_TOKENS).tolist()
        for size in SIZES
    }
    return Subject(DSparkForCausalLM.wrap(model), path, alone, plain)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    return subject_on(request.param)


def counts(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in COUNTS}


ON_FLAT = [(kind, 8) for kind in KINDS] + [("vanilla", 2), ("vanilla", 5)]
ON_ROWWISE = [("vanilla", 2), ("vanilla", 5), ("vanilla", 8), ("rnn-pruned-mask-filling", 5)]


@pytest.mark.parametrize(
    ("subject", "kind", "size"),
    [("flat", *case) for case in ON_FLAT] + [("rowwise", *case) for case in ON_ROWWISE],
    indirect=["subject"],
)
def test_rows_of_a_batch_equal_plain_decoding_and_their_runs_alone(
    subject: Subject, kind: str, size: int
) -> None:
    alone = subject.solo.setdefault((kind, "fixed"), [])
    alone += [
        decode(subject, kind, [ids], CONFIG) for ids in PROMPTS[len(alone) : size]
    ]  # only those that no smaller size has run
    out = decode(subject, kind, PROMPTS[:size], CONFIG)
    assert out.sequences.tolist() == subject.plain[size]
    for i, (one, record) in enumerate(zip(alone[:size], out.speculation, strict=True)):
        assert one.sequences[0].tolist() == subject.alone[i]
        assert counts(one.speculation[0]) == counts(record)
        assert record.path == subject.path
        assert record.verified > 0
    if "none" not in kind:
        accepted = {n for record in out.speculation for n in record.accepted_per_round}
        assert 0 in accepted
        assert len(accepted) > 2, "blocks were meant to be accepted in part"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("subject", "kind"),
    [*[("flat", kind) for kind in KINDS], ("rowwise", "rnn-pruned-mask-filling")],
    indirect=["subject"],
)
def test_no_schedule_changes_the_text(subject: Subject, kind: str, schedule: str) -> None:
    config = replace(CONFIG, schedule=schedule, confidence_threshold=0.5)
    size = 5 if subject.path == "flat" else 2
    out = decode(subject, kind, PROMPTS[:size], config)
    assert out.sequences.tolist() == subject.plain[size]
    for record in out.speculation:
        assert record.drafted >= record.verified >= record.accepted
        assert record.new_tokens == NEW_TOKENS


@pytest.mark.parametrize("subject", ["flat"], indirect=True)
@pytest.mark.parametrize("size", SIZES[1:])
def test_rows_under_a_confidence_threshold_equal_their_runs_alone(
    subject: Subject, size: int
) -> None:
    config = replace(CONFIG, schedule="threshold", confidence_threshold=0.4)
    alone = subject.solo.setdefault(("vanilla", "threshold"), [])
    alone += [decode(subject, "vanilla", [ids], config) for ids in PROMPTS[len(alone) : size]]
    out = decode(subject, "vanilla", PROMPTS[:size], config)
    verified = set()
    for one, record in zip(alone[:size], out.speculation, strict=True):
        assert counts(one.speculation[0]) == counts(record)
        verified.add((record.drafted, record.verified))
    assert any(less < drafted for drafted, less in verified)
