"""The step profile of `model.dspark.profile()`, on a flat, a row-by-row and a hybrid model."""

from __future__ import annotations

import pytest

from dspark_hf import DSparkForCausalLM
from tiny import ARCHITECTURES


@pytest.mark.parametrize("name", ["llama", "falcon", "qwen3_next", "lfm2"])
def test_a_profile_measures_every_width_and_remembers_it(name):
    model = DSparkForCausalLM.wrap(ARCHITECTURES[name](), drafter=None)
    seconds = model.dspark.profile(widths=(1, 3), context=12, repeats=2)
    assert set(seconds) == {1, 3}
    assert min(seconds.values()) > 0
    assert model.dspark.costs.measured(3, 12)
    assert not model.dspark.costs.measured(2, 12)
