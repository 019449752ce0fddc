"""A backend by reference: a name that `clipping.load_backend` takes, or ``path/file.py:Class``, a subclass of
`clipping.Backend`.

Importing this module imports no torch: `validate_backend` serves the parent process. What only an import of the file
can show (no such class, no backend, an error in the file) is found in a trial's process, and handed back as one line.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipping import is_backend, known_backends
from dpbench.errors import UsageError, nearest
from dpbench.reference import load_module

if TYPE_CHECKING:
    from clipping import Backend
    from dpbench.conformance import ResolveTrial


class UnusableBackend(UsageError):
    """What an import of the file has shown, in one line."""

    def __init__(self, line: str) -> None:
        Exception.__init__(self, line)


def is_file(ref: str) -> bool:
    """Whether `ref` means a file, and not a name."""
    return ref.endswith(".py") or ".py:" in ref


def validate_backend(ref: str) -> None:
    """Check what can be checked without importing anything.

    Raises:
        UsageError: an unknown name, with the nearest; a file without a class, or none.
    """
    if is_file(ref):
        _split(ref)
    elif not is_backend(ref):
        known = known_backends()
        expected = f"a backend, one of {', '.join(known)}, or path/file.py:Class"
        raise UsageError(expected, ref, nearest(ref, known))


def backend_class(ref: str) -> type[Backend]:
    """The class that `ref` stands for, which can run here.

    Raises:
        UsageError: the file cannot be imported, has no such class, or it is no backend.
        UnavailableBackend: a package that it needs is missing.
    """
    from dpbench.measure.bench import UnavailableBackend, available_backend

    if not is_file(ref):
        return available_backend(ref)
    found = _from_file(ref)
    reason = found.unavailable()
    if reason is not None:
        raise UnavailableBackend(found.name, reason)
    return found


def run(trial: ResolveTrial) -> dict[str, Any]:
    """{"usage": None, or what is wrong with the reference in one line}."""
    try:
        _from_file(trial.backend)
    except UsageError as error:
        return {"usage": str(error)}
    return {"usage": None}


def _split(ref: str) -> tuple[Path, str]:
    path, _, name = ref.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UsageError("path/file.py:Class", ref)
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise UsageError("path/file.py:Class of an existing file", ref)
    return file, name


def _from_file(ref: str) -> type[Backend]:
    from clipping import Backend

    path, name = _split(ref)
    module = _imported(path)
    classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Backend)]
    found = getattr(module, name, None)
    if found is None:
        raise UsageError(f"a class that {path} has", name, nearest(name, classes))
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise UsageError(f"{name} of {path} to be a subclass of clipping.Backend", type(found).__name__)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UsageError(f"{name} of {path} to have the method {missing}", "none")
    if not hasattr(found, "name"):
        found.name = name  # what messages call it
    return found


def _imported(path: Path) -> Any:
    """The module, which may import its neighbours."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        return load_module(str(path))
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        # a syntax error says its line itself
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        said = (str(error).strip().splitlines() or [""])[0]
        where = f" (line {lines[-1]})" if lines else ""
        raise UsageError(f"{path} to import", f"{type(error).__name__}: {said}{where}") from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
