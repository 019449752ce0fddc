"""References to Python objects as text: ``package.module:name``, or ``/path/to/file.py:name``.

They name a trial's code across processes, as JSON. A module from a file is registered under its absolute path, so that
the ``__module__`` of its definitions is again a reference.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from dpbench.errors import UsageError


def load_module(name: str) -> ModuleType:
    """Import a module by its dotted name, or by the path of its ``.py`` file.

    Args:
        name: ``package.module``, or a path that ends in ``.py``.

    Raises:
        ImportError: no such module; exceptions of the module itself pass through.
    """
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = str(Path(name).resolve())
    if path in sys.modules:
        return sys.modules[path]
    spec = importlib.util.spec_from_file_location(path, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path] = module  # before it runs, as dataclasses look up their own module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path]
        raise
    return module


@contextlib.contextmanager
def importable(path: Path) -> Iterator[None]:
    """Let the file import its neighbours.

    Args:
        path: of a file.
    """
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def load_object(reference: str) -> Any:
    """Load the object of a reference.

    Args:
        reference: ``module:name`` or ``file.py:name``.
    """
    module, _, name = reference.rpartition(":")
    return getattr(load_module(module), name)


def split_file(ref: str, expected: str) -> tuple[Path, str]:
    """(path, name) of ``path/file.py:name``.

    Args:
        expected: the expected form, for the error, such as "path/file.py:Class".

    Raises:
        UsageError: no name, or no such file.
    """
    path, _, name = ref.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UsageError(expected, ref)
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise UsageError(f"{expected} of an existing file", ref)
    return file, name


def reference_to(obj: Any) -> str:
    """Return the reference of a function or class at the top level of its module.

    Args:
        obj: with a module and a qualified name.
    """
    return f"{obj.__module__}:{obj.__qualname__}"
