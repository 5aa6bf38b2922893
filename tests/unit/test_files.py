"""Where kept files go, and that a file is replaced whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark_hf.benchmarks.results import save_results
from dspark_hf.files import cache_folder, written_whole
from dspark_hf.training import texts
from dspark_hf.verification.profile import ThroughputProfile


def test_kept_files_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    default = Path("~/.cache/dspark_hf").expanduser()
    for value, folder in (("/some/where", Path("/some/where")), ("", default)):
        monkeypatch.setenv("DSPARK_HF_CACHE", value)
        assert cache_folder() == folder
    monkeypatch.setenv("DSPARK_HF_CACHE", "~/there")
    assert cache_folder() == Path("~/there").expanduser()
    monkeypatch.delenv("DSPARK_HF_CACHE")
    assert cache_folder() == default


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("new", encoding="utf-8"),
    "bytes": lambda path: path.write_bytes(b"\x00new"),
    "tensors": lambda path: torch.save({"step": 3}, path),
}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_the_old_one_until_the_new_one_is_whole(
    tmp_path: Path, name: str, is_shared: bool
) -> None:
    path, alone = tmp_path / "kept.json", tmp_path / "alone"
    path.write_text("old", encoding="utf-8")
    WRITERS[name](alone)
    with written_whole(path, is_shared=is_shared) as partial:
        WRITERS[name](partial)
        assert path.read_text(encoding="utf-8") == "old"
    if name == "tensors":
        assert torch.load(path, weights_only=True) == {"step": 3}
    else:
        assert path.read_bytes() == alone.read_bytes()
    assert sorted(tmp_path.iterdir()) == [alone, path]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_failing_write_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, error: type[BaseException], is_begun: bool, is_shared: bool
) -> None:
    path = tmp_path / "kept.json"

    def fail() -> None:
        with written_whole(path, is_shared=is_shared) as partial:
            if is_begun:
                partial.write_text("ne", encoding="utf-8")
            raise error

    with pytest.raises(error):
        fail()
    assert not list(tmp_path.iterdir())
    path.write_text("old", encoding="utf-8")
    with pytest.raises(error):
        fail()
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_take_its_place_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"kept\.json"), written_whole(path) as partial:
        partial.write_text("new", encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


def test_two_who_write_a_shared_file_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    with written_whole(path, is_shared=True) as first:
        first.write_text("fir", encoding="utf-8")
        with written_whole(path, is_shared=True) as second:
            second.write_text("second", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "second"
        first.write_text("first", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_taken_over_by_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with written_whole(path) as partial:
        partial.write_text("first", encoding="utf-8")
    partial.write_text("half of a long file", encoding="utf-8")
    with written_whole(path) as partial:
        partial.write_text("whole", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "whole"
    assert list(tmp_path.iterdir()) == [path]


CALLERS: dict[str, Callable[[Path], object]] = {
    "facts of texts": lambda folder: texts._replace(folder / "texts.json", "{}"),
    "profile": ThroughputProfile({"machine": "a CPU"}, "2031-05-06", ()).save,
    "results": lambda folder: save_results(folder / "generate.json", {"runs": {}}),
}


@pytest.mark.parametrize("name", CALLERS)
def test_those_who_write_such_files_keep_the_old_one_when_they_fail(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CALLERS[name](tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()

    def full(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text[:1].encode())
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        CALLERS[name](tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before
