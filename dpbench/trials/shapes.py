"""What a value that was read from JSON must look like before anything is done with it.

A shape is one of

    NUMBER, WHOLE, TEXT, FLAG, ANY, ...    a value that passes a test (`Is`)
    None                                   null
    [shape], Some(shape)                   a list of such, of any length; of at least one
    {"a": shape, "b?": shape}              an object with "a", and "b" if it has one; what else it has is its own affair
    Each(shape)                            an object with any keys, all values such
    Or(shape, shape, ...)                  one of these

`flaw` says where a value first differs. Whoever reads on after that may trust keys and types.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

#: No record is nested deeper: a reader that calls itself for what is inside stays far from the limit of Python.
DEPTH = 48
_LARGEST = 2**63
_SHOWN = 40
_AGES = 1e12
_GREATEST = 1e200
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z", re.ASCII)
_FILE_NAME = re.compile(r"[^/\\\0.][^/\\\0]{0,250}")

Shape = Any


@dataclass(frozen=True)
class Is:
    """A value that passes `test`; `words` say what is expected."""

    words: str
    test: Callable[[Any], bool]


@dataclass(frozen=True)
class Each:
    """An object with any keys, all of whose values have this shape."""

    shape: Shape


@dataclass(frozen=True)
class Some:
    """A list of at least one, all of this shape."""

    shape: Shape


class Or:
    """One of several shapes."""

    def __init__(self, *shapes: Shape) -> None:
        self.shapes = shapes


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return abs(value) < _GREATEST  # no axis holds more, and what is not finite is written as a text
    return _is_whole(value) or (isinstance(value, str) and value in ("inf", "-inf", "nan"))


def _is_utc(value: str) -> bool:
    try:
        return _UTC.fullmatch(value) is not None and bool(datetime.fromisoformat(value))
    except ValueError:
        return False


def _is_base64(value: Any) -> bool:
    try:
        return isinstance(value, str) and base64.b64decode(value, validate=True) is not None
    except ValueError:
        return False


ANY = Is("anything", lambda value: True)
FINITE = Is("a finite number", lambda value: not isinstance(value, str) and _is_number(value))
FLAG = Is("true or false", lambda value: isinstance(value, bool))
NUMBER = Is('a number (or "inf", "-inf", "nan")', _is_number)
TEXT = Is("a text", lambda value: isinstance(value, str))
WHOLE = Is("a whole number", _is_whole)
BASE64 = Is("the content of a file in base64", _is_base64)
COUNT = Is("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
SECONDS = Is(
    "a number of at least 0, and of seconds that pass",
    lambda value: not isinstance(value, str) and _is_number(value) and 0 <= value < _AGES,
)
POSITIVE = Is("a whole number of at least 1", lambda value: _is_whole(value) and value >= 1)
ABOVE_0 = Is("a number above 0", lambda value: FINITE.test(value) and value > 0)
UTC = Is("a time as 2026-01-31T12:00:00.000000Z", lambda value: isinstance(value, str) and _is_utc(value))
#: Of a file beside the records, never a way to another folder.
FILE_NAME = Is(
    "the name of a file in this folder",
    lambda value: isinstance(value, str) and _FILE_NAME.fullmatch(value) is not None,
)


def one_of(*names: str) -> Is:
    """The shape of a text that is one of these.

    Args:
        names: the texts.
    """
    return Is(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def flaw(value: Any, shape: Shape, where: str = "") -> str | None:
    """Where and how `value` first differs from `shape`, in words; None if it does not.

    Args:
        value: as read from JSON.
        shape: that it is to have.
        where: the way to it, for the words.
    """
    found = _difference(value, shape)
    if found is None:
        return None
    way, expected, got = found
    shown = repr(got) if not isinstance(got, int) or abs(got) < _LARGEST else "a number of many digits"
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f"{(where + way).removeprefix('.') or 'it'}: expected {expected}, got {shown}"


class _Nothing:
    """Where a value should be."""

    def __repr__(self) -> str:
        return "none"


def _difference(value: Any, shape: Shape) -> tuple[str, str, Any] | None:
    """(way to the first value that differs, what is expected there, what came); None if none does.

    The way is put together on the way back: of most values there is nothing to tell.
    """
    if isinstance(shape, Is):
        return None if shape.test(value) else ("", shape.words, value)
    if shape is None:
        return None if value is None else ("", "null", value)
    if isinstance(shape, Or):
        differences = []
        for each in shape.shapes:
            if (found := _difference(value, each)) is None:
                return None
            differences.append(found)
        # of an object or a list that comes near, what is wrong inside says more than what else there could have been
        return max(differences, key=lambda found: len(found[0]))
    if isinstance(shape, list | Some):
        inner = shape[0] if isinstance(shape, list) else shape.shape
        if not isinstance(value, list) or (isinstance(shape, Some) and not value):
            return "", "a list" if isinstance(shape, list) else "a list that is not empty", value
        for number, each in enumerate(value):
            if (found := _difference(each, inner)) is not None:
                return f"[{number}]{found[0]}", *found[1:]
        return None
    if not isinstance(value, Mapping):
        return "", "an object", value
    if isinstance(shape, Each):
        for key, each in value.items():
            if (found := _difference(each, shape.shape)) is not None:
                return f".{key}{found[0]}", *found[1:]
        return None
    for key, inner in shape.items():
        name = key[:-1] if key[-1] == "?" else key
        if name not in value:
            if name == key:
                return f".{name}", "a value", _Nothing()
        elif (found := _difference(value[name], inner)) is not None:
            return f".{name}{found[0]}", *found[1:]
    return None


def too_deep(value: Any, left: int = DEPTH) -> bool:
    """Whether lists and objects lie in each other more than `DEPTH` deep.

    Args:
        value: as read from JSON.
        left: levels that there may still be.
    """
    if not isinstance(value, dict | list):
        return False
    if not left:
        return True
    return any(too_deep(each, left - 1) for each in (value.values() if isinstance(value, dict) else value))
