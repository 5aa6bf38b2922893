"""Tables of made-up timings, and the documents they are written into."""

from __future__ import annotations

from typing import Any

import pytest

from benchmark_runs import THREE_CALLS, file_of, run_of, sample
from dspark_hf.benchmarks import markers, tables
from dspark_hf.benchmarks.comparing import Difference
from dspark_hf.errors import ConfigError


def test_a_table_shows_the_baseline_beside_every_number_and_its_conditions_below() -> None:
    differing = sample("dspark-lookup", 3, 1.0, differences=[Difference(0, 4, 1, 2, 0.25, 0.1)])
    held = file_of(prompts_bfloat16=run_of([*THREE_CALLS, sample("plain", 3), differing]))
    lines = markers.as_markdown(tables.all_tables(held)["prompts-bfloat16"]).splitlines()
    assert lines[1].startswith("| --- | --- | ---: |")
    assert lines[2].startswith("| chat | plain | 15.0 |")
    assert "| 1.50x | 1.00-2.80 |" in lines[3]
    assert lines[3].endswith("| 2.11 | 3/4, 1 others, margin to 0.25 |")
    assert lines[5] == (
        "prompts: toy, bfloat16; 1 x 3 calls each; Toy CPU, 2 cores, 2 threads, load 0.10 to ?; "
        "torch 2.13, transformers 5.24; 2031-05-06."
    )


def test_the_overview_has_one_row_per_contender_of_prompts_and_batch() -> None:
    batch = [sample("plain", num_rows=8), sample("dspark-none", wall_s=0.5, num_rows=8)]
    held = file_of(prompts_bfloat16=run_of(THREE_CALLS), batch_bfloat16=run_of(batch, "batch"))
    overview = tables.all_tables(held)["overview"][0]
    assert [[row[0], row[2], row[5]] for row in overview.rows] == [
        ["plain", "1", "1"], ["dspark-lookup", "1", "2.00x"],
        ["plain", "8", "1"], ["dspark-none", "8", "2.00x"],
    ]  # fmt: skip


@pytest.fixture
def two_tables() -> dict[str, list[markers.Table]]:
    return {name: [markers.Table(name, ["a", "b"], [[name, "1|2"]])] for name in ("one", "two")}


def test_only_what_lies_between_markers_is_replaced(two_tables: Any) -> None:
    text = "# T\n<!-- bench:two -->\nold\n<!-- /bench -->\nmid <!-- bench:one --><!-- /bench -->\n"
    filled, names = markers.update_markers(text, two_tables)
    assert names == ["two", "one"]
    assert filled == (
        "# T\n<!-- bench:two -->\n| a | b |\n| --- | --- |\n| two | 1\\|2 |\n<!-- /bench -->\n"
        "mid <!-- bench:one -->\n| a | b |\n| --- | --- |\n| one | 1\\|2 |\n<!-- /bench -->\n"
    )
    assert markers.update_markers(filled, two_tables)[0] == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no markers", r"got neither.*\['one', 'two'\]"),
        ("<!-- bench:one -->", "must be closed"),
        ("<!-- bench:one --> <!-- bench:two --> <!-- /bench -->", "must be closed"),
        ("<!-- bench:six --><!-- /bench -->", r"one of \['one', 'two'\]; got 'six'"),
    ],
)
def test_wrong_markers_are_refused(two_tables: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        markers.update_markers(text, two_tables)
