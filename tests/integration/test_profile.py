"""The step profile of `model.dspark.profile()`: measured, stored, found again, given up."""

from __future__ import annotations

import pytest

from dspark_hf import DSparkForCausalLM
from tiny import ARCHITECTURES


@pytest.mark.parametrize("name", ["llama", "falcon", "qwen3_next", "lfm2"])
def test_a_profile_measures_every_width_and_remembers_it(name):
    model = DSparkForCausalLM.wrap(ARCHITECTURES[name](), drafter=None)
    profile = model.dspark.profile(widths=(1, 3), rows=(2,), context=12, repeats=2)
    seconds = profile.seconds_by_width()
    assert set(seconds) == {1, 3}
    assert set(profile.seconds_by_rows()) == {1, 2}
    assert min(seconds.values()) > 0
    assert model.dspark.costs.predict(3, 12) == seconds[3]
    assert model.dspark.costs.predict(2, 12, 2) == profile.seconds_by_rows()[2]
