"""A backend by reference: a name that `clipping.load_backend` takes, or ``path/file.py:Class``, a subclass of
`clipping.Backend`.

Importing this module imports no torch: `validate_backend` serves the parent process. What only an import of the file
can show (no such class, no backend, an error in the file) is found in a trial's process, and handed back as one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clipping.registry import BACKENDS, VARIANTS, is_backend, known_backends
from dpbench.errors import UsageError, nearest
from dpbench.trials.base import Trial
from dpbench.trials.packages import modules_of_backends
from dpbench.trials.reference import split_file

#: Names of backends in the order of `clipping.registry`: ours, ordinary training first, and other libraries'.
OURS = tuple(name for name, info in BACKENDS.items() if not info.peer)
PEERS = tuple(name for name, info in BACKENDS.items() if info.peer)
OWN_VARIANTS = tuple(VARIANTS)

#: The form of a backend in a file.
CLASS = "path/file.py:Class"


@dataclass(frozen=True, kw_only=True)
class BackendTrial(Trial):
    """A trial of one backend, by reference."""

    backend: str

    @property
    def alone(self) -> bool:
        return False

    def modules(self) -> tuple[str, ...]:
        return ("torch", *modules_of_backends((self.backend,)))


@dataclass(frozen=True, kw_only=True)
class ResolveTrial(BackendTrial):
    """Whether `path/file.py:Class` is a backend: to know that, the file has to be imported, and with it torch."""

    kind: ClassVar[str] = "resolve"
    body: ClassVar[str] = "dpbench.trials.backend_classes:run"
    timeout: float = 120.0


class UnusableBackend(UsageError):
    """What an import of the file has shown, in one line."""

    def __init__(self, line: str) -> None:
        Exception.__init__(self, line)


def is_file(ref: str) -> bool:
    """Whether `ref` means a file, and not a name.

    Args:
        ref: a name, or ``path/file.py:Class``.
    """
    return ref.endswith(".py") or ".py:" in ref


def validate_backend(ref: str) -> None:
    """Check what can be checked without importing anything.

    Args:
        ref: a name, or ``path/file.py:Class``.

    Raises:
        UsageError: an unknown name, with the nearest; a file without a class, or none.
    """
    if is_file(ref):
        split_file(ref, CLASS)
    elif not is_backend(ref):
        known = known_backends()
        raise UsageError("a backend", ref, nearest(ref, known), [*known, f"or {CLASS}"])
