"""What several commands share: a folder as an option, and files that cannot be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dpbench.errors import UsageError


def folder(text: str) -> Path:
    """A folder's path, as after --output."""
    if not text:  # as "$OUT" is if OUT is not set: it would mean the current folder
        raise UsageError("a folder after --output", text)
    return Path(text)


@contextlib.contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn an error of writing to `path` into one line.

    Args:
        what: the kind of place, "a folder".
        path: the place.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} that can be written to", f"{error.filename or path}: {error.strerror}") from error
