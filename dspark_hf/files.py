"""Files this package writes: where its own go, and that none is ever seen half."""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def cache_folder() -> Path:
    """Return where things kept between processes go: `$DSPARK_HF_CACHE`, or its default."""
    return Path(os.environ.get("DSPARK_HF_CACHE") or "~/.cache/dspark_hf").expanduser()


@contextmanager
def written_whole(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Yield a partial file to write; it is renamed into place when the block ends without error.

    Until then a file that is there stays as it was; after an error it does, and nothing is left.

    Args:
        path: The file to create or replace; its folder must exist.
        is_shared: Whether others may write the same file at the same time. Each writer then has a
            partial file of its own, which a killed process leaves behind; otherwise the next write
            takes over the one that was left.
    """
    mark = f".{secrets.token_hex(4)}" if is_shared else ""
    partial = path.with_name(f".{path.name}{mark}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
