"""Check the structure of values read from JSON.

A shape is one of

    NUMBER, WHOLE, TEXT, FLAG, ANY, ...    a value that passes a test (`Is`)
    None                                   null
    [shape], Some(shape)                   a list of such values, of any length; of at least one
    {"a": shape, "b?": shape}              an object with "a", optionally "b", and any other keys
    Each(shape)                            an object with any keys, all values such
    Or(shape, shape, ...)                  one of these

`flaw` says where a value first differs. A value without a flaw has the expected keys and types.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

#: Largest nesting of a record, far below Python's recursion limit.
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
    """A value that passes `test`; `words` describe what is expected."""

    words: str
    test: Callable[[Any], bool]


@dataclass(frozen=True)
class Each:
    """An object with any keys, and values of one shape."""

    shape: Shape


@dataclass(frozen=True)
class Some:
    """A list of at least one value, all of one shape."""

    shape: Shape


class Or:
    """One of several shapes."""

    def __init__(self, *shapes: Shape) -> None:
        self.shapes = shapes


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return abs(value) < _GREATEST  # axes hold no more, and values that are not finite are text
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
#: A file beside the records, never a path to another folder.
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
        shape: the expected one.
        where: path to the value, for the words.
    """
    if (found := _difference(value, shape)) is None:
        return None
    way, expected, got = found
    shown = repr(got) if not isinstance(got, int) or abs(got) < _LARGEST else "a number of many digits"
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f"{(where + way).removeprefix('.') or 'it'}: expected {expected}, got {shown}"


class _Nothing:
    """Stands for a missing value."""

    def __repr__(self) -> str:
        return "none"


def _difference(value: Any, shape: Shape) -> tuple[str, str, Any] | None:
    """(path to the first value that differs, what is expected there, the value); None if none does.

    The path is built while returning, as most values do not differ.
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
        # the deepest difference is the most telling
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


def too_deep(value: Any) -> bool:
    """Returns whether lists and objects are nested more than `DEPTH` deep."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inside for each in values if isinstance(each, (dict, list))]
        if not level:
            return False
    return True
