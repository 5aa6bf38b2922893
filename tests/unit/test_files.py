"""Where kept files go, and that a file is replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_hf.files import cache_folder


def test_kept_files_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    default = Path("~/.cache/dspark_hf").expanduser()
    for value, folder in (("/some/where", Path("/some/where")), ("", default)):
        monkeypatch.setenv("DSPARK_HF_CACHE", value)
        assert cache_folder() == folder
    monkeypatch.setenv("DSPARK_HF_CACHE", "~/there")
    assert cache_folder() == Path("~/there").expanduser()
    monkeypatch.delenv("DSPARK_HF_CACHE")
    assert cache_folder() == default
