"""Check the structure of values read from JSON, by msgspec.

A shape is one of

    NUMBER, WHOLE, TEXT, FLAG, ANY, ...    a type of one value
    [shape], some(shape)                   a list of such values, of any length; of at least one
    {"a": shape, "b?": shape}              an object with "a", optionally "b", and any other keys
    every(shape)                           an object with any keys, all values such
    optional(shape)                        such a value, or null

`check` makes a type of a shape, once; `flaw` tells where a value differs from a type.

Functions take:
    shape, shapes: of a value; of each.
    names: the texts.
    field: name of a field.
    value: as read from JSON.
"""

import functools
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, ValidationError, convert, defstruct

from dpbench.errors import printable

#: Largest nesting of a record, far below Python's recursion limit.
DEPTH = 48
_LARGEST = 2**63 - 1
_GREATEST = 1e200  # axes hold no more than this
_SHOWN = 200
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z", re.ASCII)
#: Of any type, for types that are made here.
_LIST: Any = list
_DICT: Any = dict
_ANNOTATED: Any = Annotated
_LITERAL: Any = Literal

Shape = Any

ANY = Any
FLAG = bool
TEXT = str
WHOLE = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
COUNT = Annotated[int, Meta(ge=0, le=_LARGEST)]
POSITIVE = Annotated[int, Meta(ge=1, le=_LARGEST)]
FINITE = WHOLE | Annotated[float, Meta(gt=-_GREATEST, lt=_GREATEST)]
ABOVE_0 = POSITIVE | Annotated[float, Meta(gt=0, lt=_GREATEST)]
#: A time that passes.
SECONDS = Annotated[int, Meta(ge=0, lt=10**12)] | Annotated[float, Meta(ge=0, lt=1e12)]
#: A number to compute with, or the text of one that is not finite.
NUMBER = FINITE | Literal["inf", "-inf", "nan"]
#: The content of a file in base64.
BASE64 = bytes
#: Noise of a training, such as "blt:3@one_pass".
NOISE = Annotated[str, Meta(pattern=r"\A[a-z]+(:[0-9]{1,9})?(@\w+)?\Z")]
#: A file beside the records, never a path to another folder.
FILE_NAME = Annotated[str, Meta(pattern=r"\A[^/\\\0.][^/\\\0]{0,250}\Z")]


class UTC(str):
    """A time in a record's format: ISO 8601, Z, with microseconds or none."""


def _time(kind: type[UTC], value: Any) -> UTC:
    if not isinstance(value, str) or not _UTC.fullmatch(value):
        raise ValueError("Expected a time as 2026-01-31T12:00:00.000000Z")
    datetime.fromisoformat(value)  # a day that exists
    return kind(value)


def optional(shape: Shape) -> Any:
    """Such a value, or null."""
    return check(shape) | None


def some(shape: Shape) -> Any:
    """A list of at least one value of one shape."""
    return _ANNOTATED[_LIST[check(shape)], Meta(min_length=1)]


def every(shape: Shape) -> Any:
    """An object with any keys, and values of one shape."""
    return _DICT[str, check(shape)]


def one_of(*names: str) -> Any:
    """A text that is one of these names."""
    return _LITERAL[names]


def by_tag(field: str, shapes: Mapping[str, Shape]) -> Any:
    """An object of the shape that its `field` names: the field's value -> shape."""
    first, *others = (_struct(shape, tag_field=field, tag=tag) for tag, shape in shapes.items())
    for other in others:
        first |= other
    return first


def check(shape: Shape) -> Any:
    """The type of a shape, for `flaw`."""
    if isinstance(shape, list):
        return _LIST[check(shape[0])]
    return _struct(shape) if isinstance(shape, dict) else shape


def _struct(shape: Shape, **tag: Any) -> Any:
    required = [(name, check(each)) for name, each in shape.items() if not name.endswith("?")]
    others = {key.removesuffix("?"): check(each) for key, each in shape.items() if key.endswith("?")}
    optionals = [(n, k if k is Any else k | UnsetType, UNSET) for n, k in others.items() if n not in shape]
    return defstruct("Shape", [*required, *optionals], kw_only=True, **tag)


def flaw(value: Any, kind: Any, where: str = "") -> str | None:
    """Where and how `value` first differs from a type, in one line; None if it does not.

    Args:
        kind: the expected type, made by `check`.
        where: path to the value, for the line.
    """
    try:
        convert({"value": value}, _holder(kind), dec_hook=_time)
    except (ValidationError, OverflowError) as error:
        text, _, path = str(error).partition(" - at `$.value")
        where = (where + path.rstrip("`")).removeprefix(".")
        return printable(f"{where}: {text}" if where else text)[:_SHOWN].replace("\n", " ")
    return None


@functools.cache
def _holder(kind: Any) -> Any:
    """An object with a value of the type: msgspec remembers how to read objects, but works out a union at every call.

    There it calls Python, and swallows a KeyboardInterrupt.
    """
    return defstruct("Value", [("value", kind)])


def too_deep(value: Any) -> bool:
    """Returns whether lists and objects are nested more than `DEPTH` deep."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inside for each in values if isinstance(each, (dict, list))]
        if not level:
            return False
    return True
