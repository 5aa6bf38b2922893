"""The step profile of `model.dspark.profile()`: measured, stored, found again, given up."""

from __future__ import annotations

import pytest

from dspark_hf import DSparkForCausalLM
from dspark_hf.verification.costs import RATIOS_JUDGED
from dspark_hf.verification.profile import ThroughputProfile
from harness import generate
from tiny import ARCHITECTURES, llama, prompt


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
    cells = {(entry.num_rows, entry.num_tokens) for entry in profile.entries}
    assert cells == {(1, 1), (1, 3), (2, 2), (2, 4), (2, 8)}


def test_a_profile_is_measured_only_where_there_is_none(monkeypatch):
    wrap(llama()).dspark.ensure_profile()
    monkeypatch.setattr("dspark_hf.handle.measure_profile", lambda *_: pytest.fail("again"))
    model = wrap(llama())
    model.dspark.ensure_profile()
    assert model.dspark.costs.is_seeded
    model.dspark.ensure_profile()
    fresh = wrap(llama(num_hidden_layers=1))
    with pytest.raises(pytest.fail.Exception, match="again"):
        fresh.dspark.ensure_profile()


def wrap(model):
    return DSparkForCausalLM.wrap(model, drafter="lookup")


def test_another_wrapper_of_the_same_model_starts_from_the_stored_profile():
    profile = wrap(llama()).dspark.profile(context=12, repeats=2)
    model = wrap(llama(1))
    assert model.dspark.costs.predict(4, 12) == 1.0
    generate(model, [prompt(9)], max_new_tokens=2)
    assert model.dspark.costs.predict(16, 12) == profile.seconds_by_width()[16]


def test_another_model_dtype_or_number_of_threads_does_not_use_it(monkeypatch):
    wrap(llama()).dspark.profile(context=12, repeats=2)
    for model in (llama(num_hidden_layers=1), llama().double()):
        generate(wrap(model), [prompt(9)], max_new_tokens=2)
        assert not model.dspark.costs._seeds
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    model = wrap(llama())
    generate(model, [prompt(9)], max_new_tokens=2)
    assert not model.dspark.costs._seeds


def test_a_profile_that_forwards_contradict_is_given_up_and_not_loaded_again(monkeypatch):
    profile = wrap(llama()).dspark.profile(context=12, repeats=2)
    model = wrap(llama())
    generate(model, [prompt(9)], max_new_tokens=2)
    for _ in range(RATIOS_JUDGED):
        model.dspark.costs.observe(4, 12, 10 * profile.seconds_by_width()[4])
    assert not model.dspark.costs._seeds
    later = wrap(llama())
    generate(later, [prompt(9)], max_new_tokens=2)
    assert not later.dspark.costs._seeds


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_warning(monkeypatch, caplog):
    def refuse(self, folder):
        raise PermissionError("read-only")

    monkeypatch.setattr(ThroughputProfile, "save", refuse)
    model = wrap(llama())
    profile = model.dspark.profile(context=12, repeats=2)
    assert model.dspark.costs.predict(4, 12) == profile.seconds_by_width()[4]
    assert "cannot be stored: read-only" in caplog.text
