"""Which of a test's parameters are `slow`, and what each is called."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(quick: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """The values, of which those that are not `quick` are `slow`; a tuple is of several arguments."""
    given = [value if type(value) is tuple else (value,) for value in values]  # a case may be a named one
    return [pytest.param(*value, marks=() if quick(*value) else pytest.mark.slow) for value in given]


def name_of(value: Any) -> str:
    """Of a case or a function its name; a text is one."""
    return value if isinstance(value, str) else getattr(value, "name", None) or value.__name__
