"""KvStore: keys and values that are not in use, in host memory and behind it on disk.

What is used least recently moves from memory to disk, and from disk out. Files are safetensors with
a checksum in the name of their content; one that is damaged counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, TensorSpec, serialize
from safetensors.torch import load

from dspark_hf.files import written_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

SUFFIX = ".kv.safetensors"
CHECKSUM = "checksum"
ROW = "row-"
"""Begins the keys of rows that are parked: of no use to another process."""
STALE_S = 86400.0
"""Age at which a parked row's file must be one that a killed process left."""


@dataclass
class TierStats:
    """What a tier did, and holds.

    Attributes:
        num_bytes: Held now.
        entries: Held now.
        hits: Found here when asked for.
        moved_out: Entries that had to leave for others.
        damaged: Files whose content was not what was written.
    """

    num_bytes: int = 0
    entries: int = 0
    hits: int = 0
    moved_out: int = 0
    damaged: int = 0


class KvStore:
    """Entries of named tensors, each under a key of letters, digits, - and _."""

    def __init__(self, host_bytes: int, folder: Path | None = None, disk_bytes: int = 0) -> None:
        """Open a store; what a folder holds from earlier is there again.

        Args:
            host_bytes: Most memory, in bytes; pinned entries may exceed it where there is no disk.
            folder: Where files go; None for no disk.
            disk_bytes: Most disk, in bytes.
        """
        self.host_bytes, self.disk_bytes = host_bytes, disk_bytes
        self.folder = folder if disk_bytes > 0 else None
        self.host, self.disk = TierStats(), TierStats()
        self.misses = 0
        self._lock = threading.RLock()
        self._held: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._files: OrderedDict[str, int] = OrderedDict()
        self._pinned: set[str] = set()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
            for path in found:
                if not path.name.startswith(ROW):
                    self._count_file(path.name.removesuffix(SUFFIX), path.stat().st_size)
                elif time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink(missing_ok=True)

    def __contains__(self, key: str) -> bool:
        """Tell whether an entry is held in either tier."""
        with self._lock:
            return key in self._held or key in self._files

    def put(self, key: str, tensors: Mapping[str, torch.Tensor], *, pinned: bool = False) -> bool:
        """Keep an entry.

        Args:
            key: Its name; an entry of that name is replaced.
            tensors: By name; copied to host memory where they lie elsewhere.
            pinned: Whether it must not be dropped, only moved to disk.

        Returns:
            bool: Whether it is kept; False if it is larger than the store and not pinned.
        """
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        size = _bytes(kept)
        with self._lock:
            self.discard(key)
            if not pinned and size > max(self.host_bytes, self.disk_bytes):
                return False
            if pinned:
                self._pinned.add(key)
            self._held[key] = kept
            self.host.num_bytes += size
            self.host.entries += 1
            self._shrink()
            return key in self

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """Return an entry's tensors, in host memory; None if it is not there or damaged.

        Args:
            key: Its name.
        """
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
                self.host.hits += 1
                return found
            if key not in self._files:
                self.misses += 1
                return None
            read = self._read(key)
            if read is None:
                self.misses += 1
                return None
            self.disk.hits += 1
            self._files.move_to_end(key)
            self._held[key] = read
            self.host.num_bytes += _bytes(read)
            self.host.entries += 1
            self._shrink()
            return read

    def take(self, key: str) -> dict[str, torch.Tensor] | None:
        """Return an entry's tensors and drop it."""
        with self._lock:
            found = self.get(key)
            self.discard(key)
            return found

    def discard(self, key: str) -> None:
        """Drop an entry, if it is there."""
        with self._lock:
            self._pinned.discard(key)
            self._drop_held(key)
            self._drop_file(key)

    def clear(self, *, keeps_files: bool = True) -> None:
        """Drop everything in memory, and files unless they are kept for a later process.

        Args:
            keeps_files: Whether entries that are not pinned stay on disk.
        """
        with self._lock:
            for key in [*self._held, *self._files]:
                if key in self._pinned or not keeps_files:
                    self.discard(key)
                elif key in self._held:
                    self._to_disk(key)
                    self._drop_held(key)

    def _shrink(self) -> None:
        """Move or drop what is over budget, least recently used first."""
        while self.host.num_bytes > self.host_bytes and self._held:
            key = next(iter(self._held))
            if self._to_disk(key) or key not in self._pinned:
                self._drop_held(key)
                self.host.moved_out += 1
            else:
                # A pinned entry without disk to go to: it stays, others go.
                self._held.move_to_end(key)
                if all(name in self._pinned for name in self._held):
                    return

    def _to_disk(self, key: str) -> bool:
        """Write an entry to disk; tell whether it is there."""
        if self.folder is None:
            return False
        if key in self._files:
            return True
        tensors = self._held[key]
        size = _bytes(tensors)
        while self.disk.num_bytes + size > self.disk_bytes:
            oldest = next((name for name in self._files if name not in self._pinned), None)
            if oldest is None:
                return False
            self._drop_file(oldest)
            self.disk.moved_out += 1
        content = _packed(tensors)
        path = self._path(key)
        try:
            with written_whole(path) as partial:
                Path(partial).write_bytes(content)
        except OSError as error:
            logger.warning("Keys and values cannot be kept in %s: %s", self.folder, error)
            return False
        # What lies there by now may be another's doing.
        self._count_file(key, len(content))
        return True

    def _read(self, key: str) -> dict[str, torch.Tensor] | None:
        """Return a file's tensors; one that is damaged is deleted."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            tensors: dict[str, torch.Tensor] = load(content)
            if _stated_checksum(content) == _checksum(tensors):
                return tensors
            why = "its checksum differs"
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            why = str(error)
        logger.warning("%s is damaged and computed again: %s", path, why)
        self.disk.damaged += 1
        self._drop_file(key)
        return None

    def _drop_held(self, key: str) -> None:
        tensors = self._held.pop(key, None)
        if tensors is not None:
            self.host.num_bytes -= _bytes(tensors)
            self.host.entries -= 1

    def _drop_file(self, key: str) -> None:
        size = self._files.pop(key, None)
        if size is not None:
            self.disk.num_bytes -= size
            self.disk.entries -= 1
            self._path(key).unlink(missing_ok=True)

    def _count_file(self, key: str, size: int) -> None:
        self._files[key] = size
        self.disk.num_bytes += size
        self.disk.entries += 1

    def _path(self, key: str) -> Path:
        if self.folder is None:
            raise ValueError("a store without a folder has no files.")
        return self.folder / f"{key}{SUFFIX}"


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _packed(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a file's content, as safetensors.torch.save() does.

    Which makes a ctypes type of 6 KB for every size it meets, for ever: rows are parked at any
    length.
    """
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    }
    return bytes(serialize(specs, {CHECKSUM: _checksum(tensors)}))


def _stated_checksum(content: bytes) -> str:
    """Return the checksum in a safetensors file's header."""
    end = 8 + int.from_bytes(content[:8], "little")
    return str(json.loads(content[8:end])["__metadata__"][CHECKSUM])


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(bytes(tensor.view(-1).view(torch.uint8).numpy().data))
    return digest.hexdigest()
