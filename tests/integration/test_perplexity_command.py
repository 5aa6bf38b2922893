"""`eval perplexity`, the needle and the sweep's plot, on a tiny target."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dspark_hf.attention.policy import SparsePolicy, SparsePrefill
from dspark_hf.cli.app import app
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation import LayerBudgets, needle
from dspark_hf.evaluation.drift_tables import read_tables
from dspark_hf.evaluation.needle import DEPTHS, NEEDLE, hide, needle_check
from evaluation_files import save_target
from harness import wrapped

FULL = SparsePolicy(tokens=4096)
SIZES = ("--context", 200, "--scored", 30, "--dtype", "float32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("target")
    return folder, *save_target(folder)


def run(*arguments: object, fails: bool = False) -> str:
    """Run a command of `eval`: perplexity, unless the first argument is another's name."""
    words = list(map(str, arguments))
    words = ["eval", *([] if words[0] == "budgets" else ["perplexity"]), *words]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code != 0) == fails, result.output
    return " ".join(result.output.split())


def test_plain_perplexity_of_a_file_is_printed_and_stored(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat and the dog . " * 40, encoding="utf-8")
    out = tmp_path / "out.json"
    printed = run(saved[0], "--data", text, "--policy", "none", "--json", out, *SIZES)
    held = json.loads(out.read_text(encoding="utf-8"))
    assert held["perplexity"]["scored"] == 30
    assert f"{held['perplexity']['ppl']:.4f}" in printed
    assert held["data"] == "text.txt"
    assert "drift" not in held


def test_bos_stands_before_windows_as_asked_and_the_table_tells(tmp_path: Path) -> None:
    _, tokenizer = save_target(tmp_path)
    tokenizer.bos_token = "?"  # noqa: S105 - a token of text
    tokenizer.save_pretrained(tmp_path)
    out = tmp_path / "out.json"
    options = (tmp_path, "--json", out, *SIZES)
    measured, printed = {}, {}
    for bos in ((), ("--bos", "every")):
        printed[bos] = run(*options, "--policy", "fast", "--tokens", 80, *bos)
        held = json.loads(out.read_text(encoding="utf-8"))["drift"][0]
        run(*options, "--policy", "none", *bos)
        plain = json.loads(out.read_text(encoding="utf-8"))["perplexity"]
        measured[bos] = (held["bos"], plain["bos"], held["ppl_dense"])
    default, every = measured.values()
    assert (default[:2], every[:2]) == (("none", "once"), ("every", "every"))
    assert default[2] != every[2]
    assert ["BOS" in text for text in printed.values()] == [False, True]


def test_a_sweep_is_printed_stored_and_drawn(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "sweep.png"
    printed = run(
        saved[0], "--policy", "fast", "--tokens", 160, "--tokens", 80, "--tokens", 256,
        "--json", out, "--plot", plot, *SIZES,
    )  # fmt: skip
    few, more, full = json.loads(out.read_text(encoding="utf-8"))["drift"]
    assert (few["tokens"], more["tokens"], full["tokens"]) == (80, 160, 256)
    assert few["share"] < more["share"] < full["share"] == 1
    assert abs(full["drift"]) < 1e-5
    assert min(few["sparse_calls"], few["dense_s"], few["sparse_s"]) > 0
    assert "fast 160" in printed
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_prompts_read_in_blocks_have_a_drift_of_their_own(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "sweep.png"
    printed = run(
        saved[0], "--policy", "fast", "--tokens", 80, "--tokens", 90, "--prefill",
        "--json", out, "--plot", plot, *SIZES,
    )  # fmt: skip
    reports = json.loads(out.read_text(encoding="utf-8"))["drift"]
    for report in reports:
        assert (report["path"], report["step_tokens"]) == ("prefill", 64)
        assert report["sparse_calls"] > 0
        assert 0 < report["share"] < 1
    assert "Drift of sparse prompts" in printed
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_budgets_by_layer_are_measured_stored_and_put_to_use(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    file, out = tmp_path / "budgets.json", tmp_path / "out.json"
    sizes = ("--context", 400, "--dtype", "float32", "--tokens", 144)
    printed = run("budgets", saved[0], "--policy", "fast", "--out", file, "--queries", 6, *sizes)
    found = LayerBudgets.load(file)
    assert len(found.factors) == 3
    assert len(set(found.factors)) > 1
    assert all(f"{factor:.3f}" in printed for factor in found.factors)
    assert f"{found.missed:.2%}" in printed
    assert f"{found.error:.4f}" in printed
    drifts = []
    for options in ((), ("--budgets", file)):
        run(saved[0], "--policy", "fast", "--scored", 20, "--json", out, *sizes, *options)
        held = json.loads(out.read_text(encoding="utf-8"))
        assert held["budgets"] == ("budgets.json" if options else None)
        drifts.append(held["drift"][0])
    # Twice nine pages in the first sixteen of twenty steps.
    assert drifts[0]["mean_pages"] == drifts[1]["mean_pages"] == pytest.approx(16.2)
    assert drifts[0]["spread_pages"] == pytest.approx(3.6)
    assert drifts[1]["spread_pages"] > drifts[0]["spread_pages"]
    assert drifts[0]["ppl_sparse"] != drifts[1]["ppl_sparse"]


def test_a_preset_may_be_checked_with_a_needle(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    printed = run(saved[0], "--policy", "quality", "--needle", "--json", out, *SIZES)
    held = json.loads(out.read_text(encoding="utf-8"))
    assert len(held["drift"]) == 1
    assert len(held["needle"]) == 20
    assert "of 10" in printed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--policy", "quick"), "fast"),
        (("--policy", "none", "--needle"), "needle"),
        (("--policy", "none", "--prefill"), "prefill"),
        (("--policy", "none", "--tokens", 80), "--tokens"),
        (("--policy", "none", "--budgets", __file__), "--budgets"),
        (("--policy", "fast", "--budgets", __file__), "LayerBudgets.save"),
        (("--tokens", 16), "tokens must cover"),
        (("--bos", "once"), "bos must be one of"),
        (("--policy", "none", "--bos", "auto"), "bos must be one of"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    saved: tuple[Path, Any, Any], options: tuple[object, ...], named: str
) -> None:
    assert named in run(saved[0], *options, fails=True)


def test_a_haystack_has_its_length_and_its_needle_in_place(saved: tuple[Path, Any, Any]) -> None:
    tokenizer = saved[2]
    hidden = tokenizer(NEEDLE.format(code="2"), add_special_tokens=False)["input_ids"]
    for depth in DEPTHS:
        ids = hide(tokenizer, [3] * 500, 200, depth, "2").ids
        assert len(ids) == 200
        place = next(i for i in range(200) if ids[i : i + len(hidden)] == hidden)
        assert ids[:place] == [3] * place
        assert place == round(depth * ids.count(3))
    for context in (10, 5000):
        with pytest.raises(ConfigError, match="context"):
            hide(tokenizer, [3] * 500, context, 0.5, "2")


def test_with_all_pages_the_answers_are_the_dense_ones(saved: tuple[Path, Any, Any]) -> None:
    _, model, tokenizer = saved
    with wrapped(model, drafter=None):
        answers = needle_check(
            model, tokenizer, {"all": FULL}, context=200, depths=(0.2, 0.9), max_new_tokens=4
        )
    for dense, full in (answers[:2], answers[2:]):
        assert (dense.policy, full.policy) == ("dense", "all")
        assert (dense.code, dense.answer) == (full.code, full.answer)
        assert dense.calls == 0 < full.calls


class Letters:
    """A tokenizer of characters."""

    bos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: torch.Tensor, **_: Any) -> str:
        return "".join(map(chr, ids.tolist()))


@pytest.mark.parametrize("begins_texts", [True, False])
def test_a_haystack_begins_as_the_tokenizer_begins_texts(begins_texts: bool) -> None:
    class WithBos(Letters):
        bos_token_id = 7

        def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> Any:
            lead = [7] if begins_texts and add_special_tokens else []
            return {"input_ids": lead + [ord(c) for c in text]}

    tokenizer: Any = WithBos()
    ids = hide(tokenizer, [3] * 500, 200, 0.5, "2").ids
    assert len(ids) == 200
    assert ids.count(7) == begins_texts
    assert (ids[0] == 7) == begins_texts


def test_a_code_counts_as_found_only_in_whole(
    saved: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = itertools.count()

    def answer(_model: Any, tokenizer: Any, _target: Any, ids: list[int], _most: int) -> str:
        code = tokenizer.decode(torch.tensor(ids)).split("code is ")[1][:5]
        return str(code[:-1]) if next(asked) % 2 else f" {code}."

    monkeypatch.setattr(needle, "read_prompt", lambda _target, _ids: None)
    monkeypatch.setattr(needle, "_answer", answer)
    tokenizer: Any = Letters()
    answers = needle_check(saved[1], tokenizer, {"few": FULL}, "grass " * 100, context=300)
    assert [answer.found for answer in answers] == [True, False] * 10
    assert len({answer.code for answer in answers}) == 10


def test_prompts_in_blocks_are_read_by_each_policy_and_others_once(
    saved: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, tokenizer = saved
    reads, read = [], needle.read_prompt
    monkeypatch.setattr(needle, "read_prompt", lambda *args: reads.append(read(*args)))
    blocks = replace(FULL, prefill=SparsePrefill(tokens=96, min_context=0))
    policies = {"all": FULL, "blocks": blocks, "again": FULL}
    answers = needle_check(model, tokenizer, policies, context=200, depths=(0.5,), max_new_tokens=2)
    assert len(reads) == 3
    assert len({a.answer for a in answers if a.policy != "blocks"}) == 1
    assert answers[2].calls > answers[1].calls


def test_a_result_file_fills_the_places_of_a_document(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    out, document = tmp_path / "drift.json", tmp_path / "page.md"
    run(saved[0], "--policy", "quality", "--policy", "fast", "--needle", "--json", out, *SIZES)
    names = ("drift-pydoc-data-topics", "needle-pydoc-data-topics")
    document.write_text("".join(f"<!-- eval:{name} -->\n<!-- /eval -->\n" for name in names))
    result = CliRunner().invoke(app, ["eval", "table", str(out), "--update", str(document)])
    assert result.exit_code == 0, result.output
    held, text = json.loads(out.read_text()), document.read_text()
    for report in held["drift"]:
        assert f"| {report['policy']} | {report['ppl_dense']:.4f} |" in text
        assert f"{report['kl']:.4f} | {report['top1']:.1%} | {report['overlap']:.1%}" in text
    for name in ("dense", "quality", "fast"):
        count = sum(entry["found"] for entry in held["needle"] if entry["policy"] == name)
        assert f"| {name} | {count} of 10 |" in text
    printed = CliRunner().invoke(app, ["eval", "table", str(out)])
    assert f"## {names[0]}" in printed.output


@pytest.mark.parametrize(
    ("held", "says"), [("no braces", "got no JSON"), ('{"drifts": []}', "of format 1; got another")]
)
def test_a_file_without_results_is_refused_by_its_name(
    tmp_path: Path, held: str, says: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(held, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"other.json must be a result file.*{says}"):
        read_tables(path)
