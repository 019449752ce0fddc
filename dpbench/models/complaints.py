"""Turns errors of a user's model or file into one line with a working example."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dpbench.models.workload import ModelError

#: A complete working function, in a line.
EXAMPLE = "def build(): return nn.Linear(20, 3), (torch.randn(16, 20), torch.randint(0, 3, (16,)))"
HINT = (
    f"what works: `{EXAMPLE}`, a model and (inputs, targets) of a few records, perhaps a loss after them; "
    "`python -m dpbench template mine.py` writes such a file"
)


@contextmanager
def hinting() -> Iterator[None]:
    """Add to a ModelError raised in the body how to use any other model."""
    try:
        yield
    except ModelError as error:
        error.args = (f"{error}; {HINT}",)
        raise


@contextmanager
def one_line(expected: str, path: Path | None = None) -> Iterator[None]:
    """Turn an error raised in the body into a ModelError, with the line of `path` where it happened.

    Args:
        expected: for the error.
        path: the user's file, or None.
    """
    try:
        yield
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if path and Path(f.filename) == path.resolve()
        ]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        raise ModelError(expected, describe(error) + (f" (line {lines[-1]})" if lines else "")) from error


def describe(error: BaseException) -> str:
    """Type and first line of an error.

    Args:
        error: of any kind.
    """
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip()  # a SyntaxError's text has its line
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
