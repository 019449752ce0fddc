"""References to Python objects as text: ``package.module:name``, or ``/path/to/file.py:name``.

What a trial runs is named by such a text, because it crosses a process boundary as JSON. A module that comes from a
file is registered under its absolute path, so that the ``__module__`` of what it defines is again a reference.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dpbench.errors import UsageError


def load_module(name: str) -> ModuleType:
    """Import a module by its dotted name, or by the path of its ``.py`` file.

    Args:
        name: ``package.module``, or a path that ends in ``.py``.

    Raises:
        ImportError: if there is none; whatever the module itself raises on import passes through.
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
    sys.modules[path] = module  # before it runs: dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path]
        raise
    return module


def load_object(reference: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` refers to.

    Args:
        reference: ``module:name`` or ``file.py:name``.
    """
    module, _, name = reference.rpartition(":")
    return getattr(load_module(module), name)


def split_file(ref: str, expected: str) -> tuple[Path, str]:
    """(path, name) of ``path/file.py:name``, such as was `expected`: "path/file.py:Class".

    Args:
        ref: what was typed.
        expected: what was to be typed, for the error.

    Raises:
        UsageError: nothing is named, or there is no such file.
    """
    path, _, name = ref.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UsageError(expected, ref)
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise UsageError(f"{expected} of an existing file", ref)
    return file, name


def reference_to(obj: Any) -> str:
    """The reference of a function or class at the top level of its module.

    Args:
        obj: with a module and a qualified name.
    """
    return f"{obj.__module__}:{obj.__qualname__}"
