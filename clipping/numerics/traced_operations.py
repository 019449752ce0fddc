"""Kernels in a step that is traced to a graph: each is one operation of it, `dpbench::kernel`, and runs with it.

A tracer follows torch's operations, and sees nothing of what a kernel does to the memory of its results: the graph
would lack it, and read numbers that nobody wrote. So while a step is traced a kernel is not run but noted: its name,
its tensors and, as text, its other arguments.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R", Tensor, tuple[Tensor, Tensor])

_tracing = False


def is_traced() -> bool:
    """Is a step traced? Then tensors have no numbers that anything could be decided by, and still will have them."""
    return _tracing


@contextmanager
def tracing() -> Iterator[None]:
    """Within it a step is traced, in all threads."""
    global _tracing
    before, _tracing = _tracing, True
    try:
        yield
    finally:
        _tracing = before


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """A kernel that can be traced: a function of a module.

    Args:
        function: of tensors, numbers and texts, in nested lists and tuples; to new tensors.
    """
    name, alone = f"{function.__module__}:{function.__name__}", function.__annotations__["return"] == "Tensor"

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _tracing:
            return function(*args, **kwargs)
        tensors: list[Tensor] = []
        text = repr(_noted((args, kwargs), tensors))
        found: Any = torch.ops.dpbench.kernel(name, text, tensors)
        result: Any = found[0] if alone else tuple(found)
        return cast(R, result)

    return called


def _noted(given: Any, tensors: list[Tensor]) -> Any:
    """The same arguments with each tensor moved to the list: {its place}."""
    if isinstance(given, Tensor):
        tensors.append(given)
        return {len(tensors) - 1}
    if isinstance(given, dict):
        return {key: _noted(each, tensors) for key, each in given.items()}
    if isinstance(given, (list, tuple)):
        return tuple(_noted(each, tensors) for each in given)
    return given


def _given(noted: Any, tensors: Sequence[Tensor]) -> Any:
    """The arguments that `_noted` was given."""
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
