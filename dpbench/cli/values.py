"""Parses values of options that several commands share."""

from __future__ import annotations

from pathlib import Path

from dpbench.errors import UsageError


def folder(text: str) -> Path:
    """A folder's path, as after --output.

    Args:
        text: as typed.

    Raises:
        UsageError: it is empty, as "$OUT" is if OUT is not set: that would mean the current folder.
    """
    if not text:
        raise UsageError("a folder after --output", text)
    return Path(text)
