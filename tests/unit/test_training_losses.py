"""The losses against their text over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from dspark_hf.training.distill import distribution_distance
from dspark_hf.training.losses import LossWeights, block_loss, expected_length

M, N, V = 5, 4, 12
WEIGHTS = LossWeights()
CLOSE = 1e-6
"""Sums of a dozen float32 numbers, in another order."""


@pytest.fixture
def block():
    """Logits, confidences, a target's probabilities, labels, and which positions count."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(M, N, V, generator=generator) * 2
    confidence = torch.randn(M, N, generator=generator)
    probs = torch.softmax(torch.randn(M, N, V, generator=generator) * 2, dim=-1)
    labels = torch.randint(0, V, (M, N), generator=generator)
    valid = torch.rand(M, N, generator=generator) < 0.8
    valid[0] = True
    return logits, confidence, probs, labels, valid


def loss_of(block, k=V, keep=None):
    """Call with the target's K likeliest; those not in `keep` are not the drafter's."""
    logits, confidence, probs, labels, valid = block
    top, ids = probs.topk(k, dim=-1)
    if keep is not None:
        ids = torch.where(keep[ids], ids, -1)
        labels = torch.where(keep[labels], labels, -1)
    return block_loss(logits, confidence, labels, ids, top, valid, WEIGHTS)


def dense(block, dropped=()):
    """The published loss, position by position; ids in `dropped` are not the drafter's."""
    logits, confidence, probs, labels, valid = block
    sums = dict.fromkeys(("ce", "l1", "bce"), 0.0)
    norm = 0.0
    for m in range(M):
        for k in range(N):
            if not valid[m, k]:
                continue
            weight = math.exp(-k / WEIGHTS.decay)
            norm += weight
            ours = torch.softmax(logits[m, k], dim=-1)
            reached = ours.clone()
            reached[list(dropped)] = 0.0
            distance = 2 - 2 * torch.minimum(reached, probs[m, k]).sum()
            survives = float(1 - distance / 2)
            said = torch.sigmoid(confidence[m, k])
            if int(labels[m, k]) not in dropped:
                sums["ce"] -= weight * float(ours[labels[m, k]].log())
            sums["l1"] += weight * float(distance)
            sums["bce"] -= weight * float(survives * said.log() + (1 - survives) * (1 - said).log())
    return {name: value / norm for name, value in sums.items()}


def test_with_all_probabilities_it_is_the_published_loss(block):
    loss, expected = loss_of(block), dense(block)
    assert loss.parts == pytest.approx(expected, abs=1e-5)
    total = 0.1 * expected["ce"] + 0.9 * expected["l1"] + expected["bce"]
    assert float(loss.total) == pytest.approx(total, abs=1e-5)


def test_the_l1_distance_is_that_of_the_whole_distributions(block):
    logits, _, probs, _, valid = block
    distance = (torch.softmax(logits, -1) - probs).abs().sum(-1)
    scale = torch.exp(-torch.arange(N) / WEIGHTS.decay) * valid
    assert loss_of(block).parts["l1"] == pytest.approx(
        float((distance * scale).sum() / scale.sum()), abs=CLOSE
    )


def test_fewer_probabilities_can_only_overstate_the_distance(block):
    parts = [loss_of(block, k).parts["l1"] for k in (2, 5, 9, V)]
    assert parts == sorted(parts, reverse=True)


def test_ids_outside_the_draft_vocabulary_share_no_mass_and_teach_no_token(block):
    keep = torch.ones(V, dtype=torch.bool)
    keep[[1, 4, 5]] = False
    assert loss_of(block, keep=keep).parts == pytest.approx(
        dense(block, dropped=(1, 4, 5)), abs=1e-5
    )


def test_what_lies_outside_the_text_counts_for_nothing(block):
    logits, confidence, probs, labels, valid = block
    first = loss_of(block)
    logits = torch.where(valid[..., None], logits, 50 * torch.randn(M, N, V))
    again = loss_of((logits, confidence, probs, labels, valid))
    assert float(again.total) == pytest.approx(float(first.total), abs=CLOSE)
    assert torch.equal(again.count, valid.sum(0))
    assert torch.allclose(again.overlap, first.overlap)
    nothing = loss_of((logits, confidence, probs, labels, torch.zeros_like(valid)))
    assert float(nothing.total) == 0.0


def test_acceptance_is_shared_mass_and_equal_argmax(block):
    logits, _, probs, _, valid = block
    loss = loss_of(block)
    shared = torch.minimum(torch.softmax(logits, -1), probs).sum(-1)
    same = logits.argmax(-1) == probs.argmax(-1)
    for k in range(N):
        assert float(loss.overlap[k]) == pytest.approx(float(shared[valid[:, k], k].mean()))
        assert float(loss.agreement[k]) == pytest.approx(float(same[valid[:, k], k].float().mean()))


def test_the_confidence_label_carries_no_gradient_to_the_logits(block):
    logits = block[0].clone().requires_grad_()
    top, ids = block[2].topk(V, dim=-1)
    only = LossWeights(cross_entropy=0.0, distance=0.0, confidence=1.0)
    block_loss(logits, block[1], block[3], ids, top, block[4], only).total.backward()
    assert float(logits.grad.abs().max()) == 0.0


def test_expected_length_counts_the_targets_token():
    assert expected_length(torch.zeros(3)) == 1.0
    assert expected_length(torch.ones(3)) == 4.0
    assert expected_length(torch.tensor([0.5, 0.5, 1.0])) == pytest.approx(2.0)


def test_the_distance_to_a_teacher_is_the_mean_l1_distance(block):
    logits, _, probs, _, valid = block
    distance = (torch.softmax(logits, -1) - probs).abs().sum(-1)
    scale = torch.exp(-torch.arange(N) / WEIGHTS.decay) * valid
    found = distribution_distance(logits, probs, valid, WEIGHTS)
    assert float(found) == pytest.approx(float((distance * scale).sum() / scale.sum()), abs=1e-5)
    own = distribution_distance(logits, torch.softmax(logits, -1), valid, WEIGHTS)
    assert float(own) == pytest.approx(0.0, abs=1e-5)
