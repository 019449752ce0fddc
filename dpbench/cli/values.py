"""Values of options that several commands take."""

from __future__ import annotations

from pathlib import Path

from dpbench.errors import UsageError


def folder(text: str) -> Path:
    """A folder's path, such as comes after --output.

    Args:
        text: that was typed.

    Raises:
        UsageError: it is empty, as "$OUT" is where OUT is not set: that would mean the current folder.
    """
    if not text:
        raise UsageError("a folder after --output", text)
    return Path(text)
