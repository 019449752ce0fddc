"""Import the modules of `clipping.accel` in `PLACES` at first use.

The folder can be deleted. A stand-in that supports nothing then takes a module's place, so that torch's own
operations run: slower or in more memory, and just as exact.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

PLACES = ("ways", "cpu", "cuda", "tiles", "fused", "chunked_conv", "nodes", "overwriting")


class Missing:
    """Stands in for a missing module: every function without a method here returns False.

    Methods take:
        rule, rules, g, gs, factors, layers, func, args, kwargs: as the functions of the modules.
    """

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False

    def of(self, rule: Any) -> tuple[()]:
        """Return no ways."""
        return ()

    def weighted(self, rules: Any, gs: Any, factors: Any) -> None:
        """Form no sum."""

    def normed_together(self, layers: Any) -> dict[int, Any]:
        """Find no norms."""
        return {}

    def together(self, layers: Any) -> int:
        """One layer at a time."""
        return 1

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation unchanged."""
        return func(*args, **kwargs)

    def of_any_size(self) -> AbstractContextManager[None]:
        """Context in which nothing is overwritten."""
        return nullcontext()


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
