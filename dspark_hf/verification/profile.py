"""ThroughputProfile: what a machine's forwards of one model cost, kept on disk between processes.

Its inverse is the paper's SPS(N), steps per second by tokens verified (arXiv:2607.05147), here by
number of rows and cached context as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from dspark_hf.files import cache_folder, written_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file; another one is measured anew."""
MOST_DAYS = 30
"""Age beyond which a profile is measured anew: drivers, libraries and machines change."""


@dataclass(frozen=True)
class StepSeconds:
    """One measured cell.

    Attributes:
        num_rows: Rows of the forward.
        num_tokens: New tokens over all rows.
        context: Cached tokens over all rows.
        seconds: Median over the repeats.
    """

    num_rows: int
    num_tokens: int
    context: int
    seconds: float


@dataclass(frozen=True)
class ThroughputProfile:
    """Seconds of a model's forwards on one machine.

    Attributes:
        key: What must be the same for it to hold: machine, threads, versions, model.
        date: When it was measured, in ISO format with the time zone.
        entries: The measured cells.
    """

    key: Mapping[str, str]
    date: str
    entries: tuple[StepSeconds, ...]

    def seconds_by_width(self) -> dict[int, float]:
        """Return the seconds of one row's forwards by their number of new tokens."""
        return {entry.num_tokens: entry.seconds for entry in self.entries if entry.num_rows == 1}

    def seconds_by_rows(self) -> dict[int, float]:
        """Return the seconds of forwards over one token a row, by the number of rows."""
        return {e.num_rows: e.seconds for e in self.entries if e.num_rows == e.num_tokens}

    def save(self, folder: Path) -> Path:
        """Write the profile; another process never sees half of it.

        Args:
            folder: Where profiles are kept; made if absent.

        Returns:
            Path: The file, named by the key.
        """
        entries = [asdict(entry) for entry in self.entries]
        values = {"format": FORMAT, "key": dict(self.key), "date": self.date, "entries": entries}
        return _write(profile_path(folder, self.key), values)

    @classmethod
    def load(cls, folder: Path, key: Mapping[str, str]) -> ThroughputProfile | None:
        """Read the profile of a key.

        Args:
            folder: Where profiles are kept.
            key: Of the machine and model at hand.

        Returns:
            ThroughputProfile | None: None if there is none, or if it cannot be read, is of another
            key or format, older than `MOST_DAYS`, or marked stale.
        """
        path = profile_path(folder, key)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            is_ours = values["format"] == FORMAT and values["key"] == dict(key)
            age = datetime.now(timezone.utc) - datetime.fromisoformat(values["date"])
            entries = tuple(_entry(value) for value in values["entries"])
            is_fresh = timedelta(days=-1) < age < timedelta(days=MOST_DAYS)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.info("The profile %s cannot be used and is left alone: %s", path, error)
            return None
        if not is_ours or not is_fresh or values.get("is_stale"):
            return None
        return cls(key, values["date"], entries)


def mark_stale(folder: Path, key: Mapping[str, str]) -> None:
    """Note in the profile's file that forwards contradict it, so that it is not loaded again.

    Args:
        folder: Where profiles are kept.
        key: Of the profile; without a file nothing happens.
    """
    path = profile_path(folder, key)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        _write(path, {**values, "is_stale": True})
    except (OSError, ValueError, TypeError) as error:
        logger.info("The profile %s cannot be marked as stale: %s", path, error)


def profile_folder() -> Path:
    """Return where profiles are kept: `profiles` under `$DSPARK_HF_CACHE` or its default."""
    return cache_folder() / "profiles"


def profile_path(folder: Path, key: Mapping[str, str]) -> Path:
    """Return the file of a key."""
    text = json.dumps(dict(key), sort_keys=True)
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def _entry(value: dict[str, Any]) -> StepSeconds:
    entry = StepSeconds(
        int(value["num_rows"]),
        int(value["num_tokens"]),
        int(value["context"]),
        float(value["seconds"]),
    )
    if not (0 < entry.seconds < float("inf") and 0 < entry.num_rows <= entry.num_tokens):
        raise ValueError(f"an entry must be a measured forward; got {entry}.")
    return entry


def _write(path: Path, values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Every process that measures this model writes this file.
    with written_whole(path, is_shared=True) as partial:
        partial.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return path
