"""Where what was timed or compiled once is kept for the next run."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path | None:
    """DPBENCH_CACHE, else dpbench in $XDG_CACHE_HOME or ~/.cache; None if it says "off", or without a home."""
    named, home = os.environ.get("DPBENCH_CACHE"), os.path.expanduser("~/.cache")
    if named == "off" or (not named and home.startswith("~")):
        return None
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or home) / "dpbench"
