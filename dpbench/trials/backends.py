"""References to backends: a name for `clipping.load_backend`, or ``path/file.py:Class``.

Importing this module imports no torch, so that the parent process can call `validate_backend`. A trial's process finds
the errors that need an import of the file (no such class, no subclass of `clipping.Backend`, an error in the file), and
returns them as one line.

Functions take:
    ref: a name, or ``path/file.py:Class``.
"""

from dataclasses import dataclass
from typing import ClassVar

from clipping.registry import BACKENDS, VARIANTS, is_backend, known_backends
from dpbench.errors import UsageError, nearest
from dpbench.trials.base import Trial
from dpbench.trials.packages import modules_of_backends
from dpbench.trials.reference import split_file

#: Backends in the order of `clipping.registry`: ours, with ordinary training first, and other libraries'.
OURS = tuple(name for name, info in BACKENDS.items() if not info.peer)
PEERS = tuple(name for name, info in BACKENDS.items() if info.peer)
OWN_VARIANTS = tuple(VARIANTS)

#: The form of a backend in a file.
CLASS = "path/file.py:Class"


@dataclass(frozen=True, kw_only=True)
class BackendTrial(Trial):
    """A trial of one backend, by reference."""

    alone: ClassVar[bool] = False

    backend: str

    def modules(self) -> tuple[str, ...]:
        return ("torch", *modules_of_backends((self.backend,)))


@dataclass(frozen=True, kw_only=True)
class ResolveTrial(BackendTrial):
    """Check that `path/file.py:Class` is a backend, which needs an import of the file and of torch."""

    kind: ClassVar[str] = "resolve"
    body: ClassVar[str] = "dpbench.trials.backend_classes:run"
    timeout: float = 120.0


def is_file(ref: str) -> bool:
    """Returns whether `ref` is a file's class rather than a name."""
    return ref.endswith(".py") or ".py:" in ref


def validate_backend(ref: str) -> None:
    """Check a reference without any import.

    Raises:
        UsageError: an unknown name, with the nearest one; a missing file, or one without a class.
    """
    if is_file(ref):
        split_file(ref, CLASS)
    elif not is_backend(ref):
        known = known_backends()
        raise UsageError("a backend", ref, nearest(ref, known), [*known, f"or {CLASS}"])
