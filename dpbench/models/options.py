"""Parses options in a model's reference: ``NAME?option=value&option=value``, then ``@T`` if the scheme has it.

Values are ``6``, ``0.1``, ``true``, ``false``, ``none``, ``(3,3,9,3)`` or ``[3,3,9,3]`` (both give a tuple), or else
text. Imports no torch, for the parent process.
"""

import ast
import re
from collections.abc import Collection
from typing import Any

from dpbench.models.workload import ModelError

_WORDS = {"true": True, "false": False, "none": None}


def split_options(name: str) -> tuple[str, dict[str, Any]]:
    """(name without its options, the options in order): ``a?x=1@T`` -> (``a@T``, {"x": 1}).

    Args:
        name: of a model, with its options.

    Raises:
        ModelError: an option without a name or a value, or given twice.
    """
    plain, mark, rest = name.partition("?")
    text, at, length = rest.partition("@")
    if not mark:
        return name, {}
    options: dict[str, Any] = {}
    for part in text.split("&"):
        key, _, value = part.partition("=")
        if not (key.isidentifier() and value):
            raise ModelError("a model's options as NAME?option=value&option=value", name)
        if key in options:
            raise ModelError(f"the option {key} once", name)
        options[key] = parse_value(value)
    return plain + at + length, options


def parse_value(text: str) -> Any:
    """A number, a truth value, None, a tuple of such, or the text itself.

    Args:
        text: of one option, not empty.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[0] in "([" and text[-1] in ")]":
        inner = [part.strip() for part in text[1:-1].split(",")]
        return tuple(parse_value(part) for part in inner if part)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text


def refuse_taken(model: str, options: Collection[str], taken: Collection[str]) -> None:
    """Refuse options that the harness sets itself: the `taken` ones, and every dropout, which is off in all models.

    Args:
        model: its name, for the error.
        options: names of the given options.
        taken: names of options that the trial sets.

    Raises:
        ModelError: naming the first.
    """
    for key in options:
        if key in taken:
            raise ModelError(f"an option of {model} that is not set already by the trial", key)
        if "drop" in key:
            raise ModelError(f"an option of {model} other than dropout, which is off in every model", key)


def refuse_unknown(model: str, error: TypeError, options: Collection[str]) -> None:
    """Raise a one-line error if a constructor rejected an option; return if `error` is of another kind.

    Args:
        model: its name, for the error.
        error: raised by the constructor.
        options: names of the given options.

    Raises:
        ModelError: naming the option.
    """
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found is not None and found[1] in options:
        raise ModelError(f"an option that {model} takes", found[1]) from error
