"""Check the structure of values read from JSON.

A shape is one of

    NUMBER, WHOLE, TEXT, FLAG, ANY, ...    a value that passes a test (`that`)
    None                                   null
    [shape], some(shape)                   a list of such values, of any length; of at least one
    {"a": shape, "b?": shape}              an object with "a", optionally "b", and any other keys
    every(shape)                           an object with any keys, all values such
    either(shape, shape, ...)              one of these

`check` makes a function of a shape, which returns where a value first differs, or None. All shapes but null, lists and
objects are such functions already. A value that does not differ has the expected keys and types.
"""

import base64
import re
from collections.abc import Callable
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
#: (path to the first value that differs, what is expected there, the value).
Difference = tuple[str, str, Any]
Check = Callable[[Any], Difference | None]


class _Nothing:
    """Stands for a missing value."""

    def __repr__(self) -> str:
        return "none"


def that(words: str, test: Callable[[Any], bool]) -> Check:
    """The shape of a value that passes a test.

    Args:
        words: what is expected.
        test: whether a value is such.
    """
    return lambda value: None if test(value) else ("", words, value)


def either(*shapes: Shape) -> Check:
    """One of several shapes.

    Args:
        shapes: tried in order.
    """
    checks = [check(shape) for shape in shapes]

    def differs(value: Any) -> Difference | None:
        differences = []
        for one in checks:
            if (found := one(value)) is None:
                return None
            differences.append(found)
        # the deepest difference is the most telling
        return max(differences, key=lambda found: len(found[0]))

    return differs


def some(shape: Shape, at_least: int = 1) -> Check:
    """A list of values of one shape.

    Args:
        shape: of each value.
        at_least: 1, or 0 for a list that may be empty.
    """
    inner, words = check(shape), "a list that is not empty" if at_least else "a list"

    def differs(value: Any) -> Difference | None:
        if not isinstance(value, list) or len(value) < at_least:
            return "", words, value
        if not any(map(inner, value)):
            return None
        return next(
            (f"[{number}]{found[0]}", *found[1:]) for number, each in enumerate(value) if (found := inner(each))
        )

    return differs


def every(shape: Shape) -> Check:
    """An object with any keys, and values of one shape.

    Args:
        shape: of each value.
    """
    inner = check(shape)

    def differs(value: Any) -> Difference | None:
        if not isinstance(value, dict):
            return "", "an object", value
        for key, found in zip(value, map(inner, value.values()), strict=True):
            if found is not None:
                return f".{key}{found[0]}", *found[1:]
        return None

    return differs


def check(shape: Shape) -> Check:
    """A function from a value, as read from JSON, to its first difference from a shape, or None.

    Args:
        shape: the expected one.
    """
    if isinstance(shape, list):
        return some(shape[0], at_least=0)
    if shape is None:
        return that("null", lambda value: value is None)
    if not isinstance(shape, dict):
        return shape
    inner = {key.removesuffix("?"): check(each) for key, each in shape.items()}
    needed = {key for key in shape if not key.endswith("?")}

    def differs(value: Any) -> Difference | None:
        if not isinstance(value, dict):
            return "", "an object", value
        if not needed <= value.keys():
            return f".{next(key for key in shape if key in needed - value.keys())}", "a value", _Nothing()
        for key, each in value.items():
            if key in inner and (found := inner[key](each)) is not None:
                return f".{key}{found[0]}", *found[1:]
        return None

    return differs


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_finite(value: Any) -> bool:
    # axes hold no more than this
    return abs(value) < _GREATEST if isinstance(value, float) else _is_whole(value)


def is_number(value: Any) -> bool:
    """Returns whether a value of JSON is a number to compute with, or the text of one that is not finite."""
    return _is_finite(value) or value in ("inf", "-inf", "nan")


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


ANY = that("anything", lambda value: True)
FINITE = that("a finite number", _is_finite)
FLAG = that("true or false", lambda value: isinstance(value, bool))
NUMBER = that('a number (or "inf", "-inf", "nan")', is_number)
TEXT = that("a text", lambda value: isinstance(value, str))
WHOLE = that("a whole number", _is_whole)
BASE64 = that("the content of a file in base64", _is_base64)
COUNT = that("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
SECONDS = that(
    "a number of at least 0, and of seconds that pass", lambda value: _is_finite(value) and 0 <= value < _AGES
)
POSITIVE = that("a whole number of at least 1", lambda value: _is_whole(value) and value >= 1)
ABOVE_0 = that("a number above 0", lambda value: _is_finite(value) and value > 0)
UTC = that("a time as 2026-01-31T12:00:00.000000Z", lambda value: isinstance(value, str) and _is_utc(value))
#: A file beside the records, never a path to another folder.
FILE_NAME = that(
    "the name of a file in this folder",
    lambda value: isinstance(value, str) and _FILE_NAME.fullmatch(value) is not None,
)


def one_of(*names: str) -> Check:
    """A text that is one of these.

    Args:
        names: the texts.
    """
    return that(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def flaw(value: Any, differs: Check, where: str = "") -> str | None:
    """Where and how `value` first differs from a shape, in words; None if it does not.

    Args:
        value: as read from JSON.
        differs: the check of the expected shape.
        where: path to the value, for the words.
    """
    if (found := differs(value)) is None:
        return None
    way, expected, got = found
    shown = repr(got) if not isinstance(got, int) or abs(got) < _LARGEST else "a number of many digits"
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f"{(where + way).removeprefix('.') or 'it'}: expected {expected}, got {shown}"


def too_deep(value: Any) -> bool:
    """Returns whether lists and objects are nested more than `DEPTH` deep."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inside for each in values if isinstance(each, (dict, list))]
        if not level:
            return False
    return True
