"""A drafting model states how sure it is, and says nothing of what was drawn by it."""

from __future__ import annotations

import pytest
import torch

from dspark_hf.drafting.small_model import ModelDrafter
from dspark_hf.values import DraftRequest, Proposal, Warp
from tiny import VOCAB, llama, prompt


def propose(warp: Warp | None, seed: int = 0, ids: list[int] | None = None) -> Proposal:
    generator = torch.Generator().manual_seed(seed)
    request = DraftRequest(0, ids or prompt(9), 5, warp, generator)
    return ModelDrafter(llama(), VOCAB).propose([request])[0]


def test_a_greedy_draft_states_the_probability_of_each_token() -> None:
    proposal, ids = propose(None), prompt(9)
    assert len(proposal.confidence) == len(proposal.ids) == 5
    with torch.no_grad():
        logits = llama()(torch.tensor([[*ids, *proposal.ids]])).logits[0, len(ids) - 1 : -1]
    expected = logits.softmax(-1).gather(1, torch.tensor(proposal.ids)[:, None])[:, 0]
    assert list(proposal.confidence) == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_drawn_draft_states_the_largest_probability_whatever_was_drawn() -> None:
    drafts = [propose(lambda logits: (logits / 2).softmax(-1), seed) for seed in range(6)]
    for draft in drafts:
        assert draft.probs is not None
        assert list(draft.confidence) == pytest.approx(draft.probs.max(-1).values.tolist())
    assert len({draft.ids[0] for draft in drafts}) > 1
    assert len({draft.confidence[0] for draft in drafts}) == 1


def test_a_model_that_computes_no_number_is_not_sure_of_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = ModelDrafter(llama(), VOCAB)
    target = drafter._get_target()
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda feeds: [x * torch.nan for x in forward(feeds)])
    (draft,) = drafter.propose([DraftRequest(0, prompt(9), 3, None, torch.Generator())])
    assert list(draft.confidence) == [0.0] * 3
