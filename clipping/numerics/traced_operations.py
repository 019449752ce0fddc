"""Make kernels traceable: each becomes one graph operation, `dpbench::kernel`, that runs with the graph.

A tracer follows torch's operations. It does not see a kernel write its results, so the graph would omit the kernel and
read uninitialised memory. While a step is traced, a kernel is therefore not run but recorded: its name, its tensors,
and its other arguments as text.
"""

import ast
import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from clipping.numerics.per_thread import PerThread

P = ParamSpec("P")
R = TypeVar("R", Tensor, tuple[Tensor, Tensor])

_TRACES = PerThread(False)


def is_traced() -> bool:
    """True while a step is traced: tensors have no values then, and nothing may depend on them."""
    return _TRACES.value


def tracing() -> AbstractContextManager[bool]:
    """Context in which a step is traced, in this thread."""
    return _TRACES.set(True)


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a kernel, a function of a module, so that it can be traced.

    Args:
        function: takes tensors, numbers and strings, in nested lists and tuples; returns new tensors.
    """
    name, alone = f"{function.__module__}:{function.__name__}", function.__annotations__["return"] in (Tensor, "Tensor")

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _TRACES.value:
            return function(*args, **kwargs)
        tensors: list[Tensor] = []
        text = repr(_noted((args, kwargs), tensors))
        found: Any = torch.ops.dpbench.kernel(name, text, tensors)
        result: Any = found[0] if alone else tuple(found)
        return cast(R, result)

    return called


def _noted(given: Any, tensors: list[Tensor]) -> Any:
    """Move each tensor to the list, and replace it by {its index}."""
    if isinstance(given, Tensor):
        tensors.append(given)
        return {len(tensors) - 1}
    if isinstance(given, dict):
        return {key: _noted(each, tensors) for key, each in given.items()}
    if isinstance(given, (list, tuple)):
        return tuple(_noted(each, tensors) for each in given)
    return given


def _given(noted: Any, tensors: Sequence[Tensor]) -> Any:
    """Inverse of `_noted`."""
    if isinstance(noted, set):
        return tensors[next(iter(noted))]
    if isinstance(noted, dict):
        return {key: _given(each, tensors) for key, each in noted.items()}
    if isinstance(noted, tuple):
        return tuple(_given(each, tensors) for each in noted)
    return noted


@functools.lru_cache(maxsize=4096)
def _read(name: str, text: str) -> tuple[Callable[..., Any], Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function).__wrapped__, ast.literal_eval(text)


def _run(name: str, arguments: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    function, noted = _read(name, arguments)
    args, kwargs = _given(noted, tensors)
    found = function(*args, **kwargs)
    return [found] if isinstance(found, Tensor) else list(found)


_LIBRARY = torch.library.Library("dpbench", "DEF")
_LIBRARY.define("kernel(str name, str arguments, Tensor[] tensors) -> Tensor[]")
_LIBRARY.impl("kernel", _run, "CompositeExplicitAutograd")
torch.library.register_fake("dpbench::kernel", _run, lib=_LIBRARY)
