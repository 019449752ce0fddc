"""Errors that a person at the command line meets: one line, never a traceback.

Functions take:
    text: any.
    expected, what: a noun with its article, "a backend".
    came, name: what was typed.
    nearest: the known name that resembles it.
    known: what could have been typed.
    outcome, evidence: how a trial ended; lines on it, such as a traceback.
"""

import contextlib
import difflib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

#: Control characters, but for the end of a line and the tabulator; what turns the direction of a text; half characters,
#: as in a file's name that is not UTF-8.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with control characters as escapes, so that what stands in a record does nothing to a terminal."""
    return _CONTROL.sub(lambda sign: ascii(sign[0])[1:-1], text)


LISTED = 30
"""Most names in a message."""


class UsageError(Exception):
    """Something that a person typed cannot be used; the message is the line of `complaint`."""

    def __init__(self, expected: str, came: object, nearest: str | None = None, known: Iterable[str] = ()) -> None:
        super().__init__(complaint(expected, came, nearest, known))

    @classmethod
    def of(cls, line: str) -> Self:
        """The error with this message, such as another process gave.

        Args:
            line: a complaint in one line.
        """
        error = cls.__new__(cls)
        Exception.__init__(error, line)
        return error


def complaint(expected: str, came: object, nearest: str | None = None, known: Iterable[str] = ()) -> str:
    """One line: what was expected, what came, the nearest known name if there is one, and the first known ones."""
    first = list(known)
    more = f" and {len(first) - LISTED} more" if len(first) > LISTED else ""
    names = ", ".join(first[:LISTED]) + more
    if nearest:
        return f"expected {expected}, got {came!r}; did you mean {nearest!r}?" + (f" (one of {names})" if names else "")
    return f"expected {expected}" + (f", one of {names}" if names else "") + f", got {came!r}"


def last_line(evidence: str | None) -> str:
    """Of a traceback, what was raised; of our own errors without the name of the class, for they are sentences."""
    lines = (evidence or "").strip().splitlines() or ["no evidence"]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
    return re.sub(r"^dpbench\.[\w.]+Error: ", "", (raised or lines)[-1].strip())


def telling_line(outcome: str, evidence: str | None) -> str:
    """The line that says most: a traceback's last one names the exception, and our own texts begin with the cause."""
    if outcome == "error":
        return last_line(evidence)
    return next((line.strip() for line in (evidence or "").splitlines() if line.strip()), "")


def in_words(error: BaseException) -> str:
    """An error in one line: a UsageError's message, or the class and message of another.

    Args:
        error: that was raised.
    """
    return " ".join((str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}").split())


@contextlib.contextmanager
def their_code(
    expected: str, but: tuple[type[Exception], ...] = (), path: Path | None = None, kind: type[UsageError] = UsageError
) -> Iterator[None]:
    """Turn whatever code of a person's own raises into one line, and have it print to standard error.

    Args:
        but: errors that pass.
        path: of the person's file, to name its line; or None.
        kind: of the error.

    Raises:
        UsageError: of any other error, or of an exit.
    """
    passed: tuple[type[BaseException], ...] = (KeyboardInterrupt, *but)  # the first is nobody's code
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except passed:
        raise
    except BaseException as error:  # a syntax error names its own line
        frames = traceback.extract_tb(error.__traceback__) if path is not None else ()
        lines = [frame.lineno for frame in frames if path and Path(frame.filename) == path.resolve()]
        raise kind(expected, in_words(error) + (f" (line {lines[-1]})" if lines else "")) from error


class RunEnded(Exception):
    """A run that cannot go on, for a reason that is none of its trials': one line, exit code 1.

    What ended is recorded, and the same command goes on from there.
    """


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """While a run goes on: an error of the operating system is the run's end, and nothing that a person typed.

    Raises:
        RunEnded: a full disk, a folder that has moved, a limit; it names the file.
    """
    try:
        yield
    except OSError as error:
        raise RunEnded(f"the run cannot go on: {error}; what ended before is recorded") from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or that begins with it; None if none resembles it.

    Case and the dashes before an option are ignored.
    """
    plain = {each.lstrip("-").lower(): each for each in known}
    typed = name.lstrip("-").lower()
    longer = [each for each in plain if typed and each.startswith(typed)]
    close = difflib.get_close_matches(typed, longer or list(plain), n=1, cutoff=0.0 if longer else 0.5)
    return plain[close[0]] if close else None


def one_of(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known.

    Raises:
        UsageError: naming every known `what`, and the nearest to `name`.
    """
    names = list(known)
    if name not in names:
        raise UsageError(what, name, nearest(name, names), names)
    return name
