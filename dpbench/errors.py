"""Errors that a person at the command line meets: one line, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """Something that a person typed cannot be used.

    The message is one line: what was expected, what came, and the nearest known name if there is one.
    """

    def __init__(self, expected: str, came: object, nearest: str | None = None) -> None:
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        super().__init__(f"expected {expected}, got {came!r}{hint}")


class RunEnded(Exception):
    """A run that cannot go on, for a reason that is none of its trials': one line, exit code 1.

    What ended is recorded, and the same command goes on from there.
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None if none resembles it.

    Args:
        name: what was typed.
        known: what could have been.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def one_of(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known.

    Args:
        what: the kind of name, with its article: "a backend".
        name: what was typed.
        known: what could have been.

    Raises:
        UsageError: naming every known `what`, and the nearest to `name`.
    """
    names = list(known)
    if name not in names:
        raise UsageError(f"{what}, one of {', '.join(names)}", name, nearest(name, names))
    return name
