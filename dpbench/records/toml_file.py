"""Reads the TOML files that a person writes: of phases, of a cluster."""

import tomllib
from pathlib import Path
from typing import Any

from dpbench.errors import UsageError, in_words
from dpbench.records.store import content_of


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file.

    Args:
        what: the file is, for the error.

    Raises:
        UsageError: it cannot be read, or has no TOML, a number of too many digits, or endless brackets.
    """
    try:
        return tomllib.loads(content_of(path).decode())
    except OSError as error:
        raise UsageError(f"{what} ({error.strerror})", str(path)) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"TOML in {path}", in_words(error)) from error
