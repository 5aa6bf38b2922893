"""A schedule changes how many forwards a text takes, and nothing else.

Greedy and coupled text is the same tokens under every schedule, for drafters that state arbitrary
confidences or none; rejection-sampled text follows the target, and what was verified shows that
the schedules did decide (that they are exact is tests/lossless/test_schedule_enumeration.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters import NoisyDrafter, RightDrafter, SampledDrafter, StatingDrafter
from dspark_hf import DSparkConfig
from dspark_hf.config import SCHEDULES
from harness import generate, noisy_copy, oracle_of, wrapped
from tiny import VOCAB, llama, plain_generate, prompt

PROMPTS = [prompt(9, seed=2), prompt(4, seed=7) * 2, prompt(14, seed=3)]
NEW_TOKENS = 24

DRAFTERS: dict[str, Callable[[PreTrainedModel, RightDrafter], Any]] = {
    "states, mostly right": lambda model, right: StatingDrafter(NoisyDrafter(right, VOCAB, 5)),
    "states, draws": lambda model, right: StatingDrafter(SampledDrafter(VOCAB), seed=1),
    "a model": lambda model, right: noisy_copy(model, scale=0.05),
    "lookup": lambda model, right: "lookup",
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> torch.Tensor:
    return plain_generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)


def settings() -> list[DSparkConfig]:
    """Every schedule, thresholds from everything to nothing, lengths and pausing."""
    configs = [DSparkConfig(schedule=name, max_draft_tokens=5) for name in SCHEDULES]
    configs += [DSparkConfig(schedule=name, max_draft_tokens=1) for name in SCHEDULES]
    configs += [
        DSparkConfig(schedule="threshold", confidence_threshold=least, max_draft_tokens=6)
        for least in (0.0, 0.5, 1.0)
    ]
    return [*configs, DSparkConfig(never_slower=False, max_draft_tokens=7)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_the_same_under_every_schedule(
    model: PreTrainedModel, plain: torch.Tensor, drafter: str
) -> None:
    made = DRAFTERS[drafter](model, oracle_of(plain, PROMPTS))
    verified = set()
    for config, rows in itertools.product(settings(), (PROMPTS, PROMPTS[:1])):
        with wrapped(model, made, config):
            out = generate(model, rows, max_new_tokens=NEW_TOKENS)
        alone = plain_generate(model, rows, max_new_tokens=NEW_TOKENS)
        assert out.sequences.tolist() == alone.tolist(), config
        verified.add(tuple(record.verified for record in out.speculation))
    assert len(verified) > 4, "schedules were meant to differ in what they verify"


@pytest.mark.parametrize("drafter", ["states, draws", "a model"])
def test_coupled_text_is_the_same_under_every_schedule(
    model: PreTrainedModel, plain: torch.Tensor, drafter: str
) -> None:
    made, texts = DRAFTERS[drafter](model, oracle_of(plain, PROMPTS)), []
    for config in settings():
        coupled = DSparkConfig(
            **{**vars(config), "acceptance": "coupled", "seed": 3},
        )
        with wrapped(model, made, coupled):
            out = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=True)
        texts.append(out.sequences.tolist())
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_told_which_drafts_it_must_not_look_into(
    model: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DSparkConfig(schedule=name, max_draft_tokens=4, never_slower=False, seed=1)
    seen: dict[str, set[bool]] = {}
    cases = {
        "greedy": ({"do_sample": False}, config),
        "drawn": ({"do_sample": True}, config),
        "coupled": ({"do_sample": True}, DSparkConfig(**{**vars(config), "acceptance": "coupled"})),
    }
    for case, (kwargs, each) in cases.items():
        with wrapped(model, StatingDrafter(SampledDrafter(VOCAB)), each):
            decoder = model.dspark.decoder

            def spied(*args: Any, case: str = case, decoder: Any = decoder, **kw: Any) -> Any:
                built = decoder(*args, **kw)
                cut = built.schedule.cut

                def noted(rows: Any, drafts: Any) -> Any:
                    seen.setdefault(case, set()).update(d.is_drawn for d in drafts if d.num_tokens)
                    return cut(rows, drafts)

                built.schedule.cut = noted
                return built

            monkeypatch.setattr(model.dspark, "decoder", spied)
            generate(model, PROMPTS, max_new_tokens=12, **kwargs)
    assert seen == {"greedy": {False}, "drawn": {True}, "coupled": {False}}
