"""What `clipping.accel` provides to the modules beneath it: `cpu`, `cuda`, `fused`, `chunked_conv` and `overwriting`.

Each is looked up when it is first used. Where it is missing (the folder can be deleted) an object stands in that
supports nothing, so that torch's own operations run: slower, or in more memory, and as exact.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

PLACES = ("cpu", "cuda", "fused", "chunked_conv", "overwriting")


class Missing:
    """Supports nothing: whatever it is asked, it says no."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation as it is.

        Args:
            func, args, kwargs: the operation, and what it is called with.
        """
        return func(*args, **kwargs)

    def from_losses(self) -> AbstractContextManager[None]:
        """In here nothing is written over."""
        return nullcontext()

    of_any_size = from_losses


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found: Any = importlib.import_module(f"clipping.accel.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("clipping.accel", f"clipping.accel.{name}"):
            raise
        found = Missing()
    globals()[name] = found
    return found
