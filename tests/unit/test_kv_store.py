"""Keys and values out of use: tiers, what leaves first, files that come back, and damaged ones."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf.serving.store import KvStore

ENTRY = 400
"""Bytes of an entry."""


def entry(value: int) -> dict[str, torch.Tensor]:
    return {"keys0": torch.full((2, 25), float(value)), "values0": torch.full((50,), value).float()}


def held(store: KvStore, key: str) -> float | None:
    found = store.get(key)
    return None if found is None else float(found["keys0"][0, 0])


def test_what_is_put_is_got_and_does_not_follow_its_source() -> None:
    store, source = KvStore(10 * ENTRY), torch.ones(2, 3).bfloat16()
    assert store.put("a", {"x": source.clone()})
    found = store.get("a")
    assert found is not None
    assert torch.equal(found["x"], source)
    assert found["x"].dtype == torch.bfloat16
    assert store.get("b") is None
    assert (store.host.hits, store.misses) == (1, 1)
    store.discard("a")
    assert "a" not in store
    assert (store.host.num_bytes, store.host.entries) == (0, 0)


def test_without_disk_the_least_recently_used_leaves() -> None:
    store = KvStore(3 * ENTRY)
    for i in range(3):
        store.put(str(i), entry(i))
    assert held(store, "0") == 0
    store.put("3", entry(3))
    assert [held(store, str(i)) for i in range(4)] == [0, None, 2, 3]
    assert store.host.moved_out == 1
    assert not store.put("large", {"x": torch.zeros(4 * ENTRY)})
    assert "large" not in store


def test_with_disk_it_moves_there_and_comes_back(tmp_path: Path) -> None:
    store = KvStore(2 * ENTRY, tmp_path, 100 * ENTRY)
    for i in range(6):
        store.put(str(i), entry(i))
    assert store.host.entries == 2
    assert [held(store, str(i)) for i in range(6)] == list(range(6))
    assert store.disk.hits >= 4
    assert store.host.num_bytes <= 2 * ENTRY
    assert store.disk.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_are_those_of_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"keys0": torch.randn(2, 5, 8).to(dtype), "values0": torch.randn(2, 5, 8).to(dtype)}
    KvStore(1, tmp_path, 100 * ENTRY).put("a", tensors)
    (path,) = tmp_path.iterdir()
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.dtype == dtype


def test_files_of_many_sizes_leave_no_types_behind(tmp_path: Path) -> None:
    store, before = KvStore(1, tmp_path, 10**6), len(ctypes._pointer_type_cache)
    for length in range(1, 60):
        store.put("row", {"keys0": torch.zeros(1, length, 7)}, pinned=True)
        assert store.disk.entries == 1
    assert len(ctypes._pointer_type_cache) == before


def test_the_disk_has_an_end_too(tmp_path: Path) -> None:
    store = KvStore(ENTRY, tmp_path, 2000)
    for i in range(12):
        store.put(str(i), entry(i))
    assert store.disk.num_bytes <= 2000
    assert store.disk.moved_out > 0
    assert held(store, "11") == 11
    assert held(store, "0") is None


def test_pinned_entries_stay_whatever_comes(tmp_path: Path) -> None:
    alone = KvStore(ENTRY)
    for i in range(3):
        assert alone.put(f"row-{i}", entry(i), pinned=True)
    alone.put("page", entry(9))
    assert [held(alone, f"row-{i}") for i in range(3)] == [0, 1, 2]
    assert "page" not in alone
    store = KvStore(ENTRY, tmp_path, 3000)
    store.put("row-0", entry(7), pinned=True)
    for i in range(9):
        store.put(str(i), entry(i))
    assert held(store, "row-0") == 7
    taken = store.take("row-0")
    assert taken is not None
    assert "row-0" not in store


def test_another_process_finds_pages_but_no_parked_rows(tmp_path: Path) -> None:
    first = KvStore(ENTRY, tmp_path, 100 * ENTRY)
    for i in range(3):
        first.put(f"page{i}", entry(i))
    first.put("row-1", entry(8), pinned=True)
    first.clear()
    assert first.host.entries == 0
    second = KvStore(ENTRY, tmp_path, 100 * ENTRY)
    assert [held(second, f"page{i}") for i in range(3)] == [0, 1, 2]
    assert "row-1" not in second
    second.clear(keeps_files=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "gone"])
def test_a_damaged_file_counts_as_not_there(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = KvStore(ENTRY, tmp_path, 100 * ENTRY)
    first.put("a", entry(1))
    first.put("b", entry(2))
    first.clear()
    store = KvStore(ENTRY, tmp_path, 100 * ENTRY)
    path = next(tmp_path.glob("a*"))
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        broken = {
            "cut": content[:-8], "flipped": content[:-1] + bytes([content[-1] ^ 1]), "emptied": b"",
        }  # fmt: skip
        path.write_bytes(broken[damage])
    with caplog.at_level(logging.WARNING):
        assert held(store, "a") is None
    assert "damaged" in caplog.text
    assert store.disk.damaged == 1
    assert not path.exists()
    assert held(store, "b") == 2
    store.put("a", entry(5))
    assert held(store, "a") == 5


def test_a_folder_that_cannot_be_written_drops_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KvStore(ENTRY, tmp_path, 100 * ENTRY)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store.put("a", entry(1))
    store.put("b", entry(2))
    assert held(store, "a") is None
    assert held(store, "b") == 2
    assert not list(tmp_path.iterdir())
