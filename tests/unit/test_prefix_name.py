"""The name under which a model's prompt beginnings are kept."""

from __future__ import annotations

import pytest
import torch

import tiny
from dspark_hf.serving.prefix import SAMPLED, _model_name, _places


@pytest.mark.parametrize("size", [1, SAMPLED - 1, SAMPLED, 1000, 28_311_552, 2**31 + 1])
def test_places_lie_in_a_matrix_of_any_size_and_reach_both_ends(size: int) -> None:
    places = _places(size)
    assert (places[0], places[-1]) == (0, size - 1)
    assert len(places.unique()) == min(SAMPLED, size)


def test_a_weight_or_a_tap_makes_another_name() -> None:
    model = tiny.llama()
    name = _model_name(model, (0, 2))
    assert name == _model_name(tiny.llama(), (0, 2)) != _model_name(model, (0, 1))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert _model_name(model, (0, 2)) != name
