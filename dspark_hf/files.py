"""Files this package keeps between processes: where they go."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return where things kept between processes go: `$DSPARK_HF_CACHE`, or its default."""
    return Path(os.environ.get("DSPARK_HF_CACHE") or "~/.cache/dspark_hf").expanduser()
