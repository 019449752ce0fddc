"""Mark a test's parameters as `slow`, and name them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(quick: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters, marked `slow` unless `quick`; a tuple holds several arguments."""
    given = [value if type(value) is tuple else (value,) for value in values]  # a named tuple is one argument
    return [pytest.param(*value, marks=() if quick(*value) else pytest.mark.slow) for value in given]


def name_of(value: Any) -> str:
    """Name of a case or function; a string is its own name."""
    return value if isinstance(value, str) else getattr(value, "name", None) or value.__name__
