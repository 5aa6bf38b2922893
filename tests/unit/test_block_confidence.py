"""A block drafter's confidences: scaled by how a text is decoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from block_drafters import block_drafter, features_of, greedy_request
from dspark_hf.errors import CheckpointError
from dspark_hf.verification.scaling import Scaling, Scalings
from tiny import llama, prompt

PROMPTS = [prompt(9, seed=2)]


@pytest.mark.parametrize("size", [2, 6])
def test_scalings_of_another_length_are_refused(size: int) -> None:
    plain = Scaling.plain(size)
    with pytest.raises(CheckpointError, match=f"5 draft tokens; got one for {size}"):
        block_drafter(llama(), scalings=Scalings(plain, plain))


def _best(logits: torch.Tensor) -> torch.Tensor:
    return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()


def test_greedy_and_sampled_rows_have_their_own_scaling() -> None:
    model = llama()
    greedy = Scaling((1.0, 2.0, 0.5, 3.0, 1.0), (0.0, 0.5, 0.0, -1.0, 0.0))
    sampled = Scaling((2.0,) * 5, (1.0,) * 5)
    told = []
    for scalings in (None, Scalings(greedy, sampled)):
        drafter = block_drafter(model, scalings=scalings)
        requests = []
        for row in (0, 1):
            drafter.take(row, 0, features_of(model, PROMPTS[0][:-1], drafter.model.spec))
            requests.append(greedy_request(row, PROMPTS[0]))
        # Draws the best token: both rows hold the same draft.
        requests[1] = replace(requests[1], warp=_best)
        told.append([torch.tensor(p.confidence) for p in drafter.propose(requests)])
    plain, scaled = told
    for row, scaling in enumerate((greedy, sampled)):
        expected = torch.tensor(scaling.apply(plain[row].double().logit()))
        assert torch.allclose(scaled[row].double(), expected, atol=1e-4)
