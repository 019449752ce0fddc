"""Load the class behind a reference to a backend, in the process that runs it."""

import inspect
from typing import Any

from clipping import Backend, load_backend
from dpbench.errors import UsageError, nearest, their_code
from dpbench.trials.backends import CLASS, ResolveTrial, is_file
from dpbench.trials.not_here import NotHere
from dpbench.trials.reference import importable, load_module, split_file


class UnavailableBackend(NotHere):
    """A package that the backend needs is missing on this machine."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"{backend} is not available here: {reason}")


def backend_class(ref: str) -> type[Backend]:
    """Return the class of a reference, if it can run here.

    Raises:
        UsageError: the file cannot be imported or lacks the class, or the class is not a backend.
        UnavailableBackend: a package that it needs is missing.
    """
    found = _from_file(ref) if is_file(ref) else load_backend(ref)
    if (reason := found.unavailable()) is not None:
        raise UnavailableBackend(found.name if is_file(ref) else ref, reason)
    return found


def run(trial: ResolveTrial) -> dict[str, Any]:
    """{"usage": None, or what is wrong with the reference in one line}."""
    try:
        _from_file(trial.backend)
    except UsageError as error:
        return {"usage": str(error)}
    return {"usage": None}


def _from_file(ref: str) -> type[Backend]:
    path, name = split_file(ref, CLASS)
    with importable(path), their_code(f"{path} to import", (MemoryError,), path):
        module = load_module(str(path))
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
        found.name = name  # for messages
    return found
