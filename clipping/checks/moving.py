"""Restore what a step that runs once more has written to the model and to the caller's loss.

Functions take:
    kept: list of (tensor, its copy, its version when copied).
    of, entries: a container, or a function with the variables that it names; its entries.
    value, values: any objects.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clipping.core.autograd import version_of
from clipping.numerics.rng_replay import Draws

LEVELS, MANY = 3, 1000
"""Levels of containers and objects, from the model, in which a step may change something; the most entries of a
container that are looked into."""
LARGEST = 2**26
"""Bytes of the largest tensor outside of modules that is copied. A dataset that a loss can reach is larger."""
_CONTAINERS = list, deque, set, dict, FunctionType
"""Types of values that hold others; a function holds the variables from outside of it."""
_WHOLE = int, float, str, bytes, Tensor, type, ModuleType
"""Types of values that are not looked into."""
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"_buffers"}


class Moving:
    """The state that a step may write to: attributes of modules and what they hold, buffers, frozen parameters.

    Args:
        model: before its first step.
        loss_fn: the caller's loss; what it holds or reads from outside of it is part of the state.

    Attributes:
        has_moved: True if a repeated pass wrote to it.
    """

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self._model, self.loss_fn, self.has_moved = model, loss_fn, False
        self._classes: dict[int, list[type]] = {}  # by loss, as several may take turns
        self._versions = {p: version_of(p) for p in model.parameters()}

    def functions(self, *, again: bool = False) -> list[FunctionType]:
        """The functions of the modules' classes: `forward` and what it calls.

        Args:
            again: modules may have changed their classes.
        """
        loss = id(self.loss_fn)
        if again or loss not in self._classes:
            modules, _ = self._reached()
            kinds = {kind for module in modules for kind in type(module).__mro__}
            self._classes[loss] = list(kinds - {*nn.Module.__mro__})
        return [x for kind in self._classes[loss] for x in vars(kind).values() if isinstance(x, FunctionType)]

    def state(self, also: Iterable[Tensor] = ()) -> State:
        """The present state; tensors are copied.

        Args:
            also: other tensors of it.
        """
        modules, containers = self._reached()
        held = [(of, _entries(of)) for of in containers]
        of_modules = {id(of) for module in modules for of in (vars(module), module._buffers)}
        buffers = [
            x
            for of, entries in held
            for x in (entries if len(entries) <= MANY else ())
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
            if id(of) in of_modules or x.nbytes <= LARGEST
        ]
        mine = set(self._model.parameters())
        every = dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None)
        # frees replaced ones; a parameter that replaces one of the model's may be written to already
        self._versions = {p: self._versions.get(p, -1 if p in mine else version_of(p)) for p in every}
        frozen = (p for p in self._versions if not (p.requires_grad or p.is_inference()))
        written = (p for p in frozen if self._versions[p] != p._version)
        tensors = dict.fromkeys([*buffers, *written, *also])
        kept = [(x, x.detach().clone(), x._version) for x in tensors if not x.is_inference()]
        return State(held, kept)

    def _reached(self) -> tuple[list[nn.Module], list[Any]]:
        """The modules, and all containers of state, from the model and the loss."""
        modules, containers = dict[int, nn.Module](), dict[int, Any]()
        values: list[Any] = [self._model, self.loss_fn]
        for level in range(LEVELS):
            inner: list[Any] = []
            for of, owner, entries in _opened(values, ours=level == 0):
                if id(of) in containers:
                    continue
                containers[id(of)] = of
                if isinstance(owner, nn.Module):
                    modules[id(owner)] = owner
                if len(entries) <= MANY:
                    inner += entries
            values = inner
        return list(modules.values()), list(containers.values())

    @contextmanager
    def repeated(self, draws: Draws, begin: State | None = None) -> Iterator[None]:
        """Draw the random numbers that followed `draws`, and restore the model on exit.

        Args:
            draws: the state of the generators to begin from.
            begin: the state of the model to begin from; None for the present one.
        """
        present = self.state(() if begin is None else (x for x, *_ in begin.kept))
        try:
            with draws.again():
                if begin is not None:
                    modes = [(module, module.training) for module in self._model.modules()]
                    begin.restore()
                    for module, mode in modes:  # a look may run in eval mode
                        module.training = mode
                yield
        finally:
            self.has_moved |= present.restore()


class State(NamedTuple):
    """A copy of the state of `Moving`.

    Attributes:
        held: (a module's attributes, or a container or an object's attributes among them; their entries).
        kept: as for `put_back`.
    """

    held: list[tuple[Any, list[Any]]]
    kept: list[tuple[Tensor, Tensor, int]]

    def restore(self) -> bool:
        """Restore the state, and return whether it was another one."""
        moved = any(x._version != version for x, _, version in self.kept)
        for of, before in self.held:
            now = _entries(of)
            if len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True)):
                moved = True
                _refill(of, before)
        put_back(self.kept)
        return moved


def _opened(values: Iterable[Any], *, ours: bool) -> Iterator[tuple[Any, Any, Sequence[Any]]]:
    """Yield the containers of each value, their owners, and the entries to open next.

    Args:
        ours: open objects of this library, too.
    """
    for value in values:
        if isinstance(value, nn.Module):
            for module in value.modules():
                attributes = vars(module)
                yield module._buffers, module, ()
                yield attributes, module, [x for name, x in attributes.items() if name not in _OF_EVERY_MODULE]
        elif isinstance(value, tuple):
            yield from _opened(value, ours=ours)
        elif isinstance(value, MethodType):
            yield from _opened((value.__func__, value.__self__), ours=ours)
        elif isinstance(value, functools.partial):
            yield from _opened((value.func, value.args, value.keywords), ours=ours)
        elif not isinstance(value, _WHOLE) and (ours or not _is_ours(value)):
            of = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
            if isinstance(of, _CONTAINERS):
                yield of, value, _entries(of)


def _is_ours(value: Any) -> bool:
    """Whether it is a function or an object of this library, or a function of torch's."""
    is_function = isinstance(value, FunctionType)
    package = str((value if is_function else type(value)).__module__).partition(".")[0]
    return package in ("clipping", "dpbench") or (is_function and package == "torch")


def _entries(of: Any) -> list[Any]:
    of = _variables(of) if isinstance(of, FunctionType) else of
    return [*of, *of.values()] if isinstance(of, dict) else [*of]


def _variables(function: FunctionType) -> dict[str, Any]:
    """The variables from outside that a function names: those of its closure, and globals."""
    code, outside = function.__code__, function.__globals__
    found = {name: outside[name] for name in code.co_names if name in outside}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _refill(of: Any, entries: Sequence[Any]) -> None:
    """Restore the entries of a container."""
    pairs = zip(entries[: len(entries) // 2], entries[len(entries) // 2 :], strict=False)
    if isinstance(of, FunctionType):
        cells = dict(zip(of.__code__.co_freevars, of.__closure__ or (), strict=True))
        for name, value in pairs:
            if name in cells:
                cells[name].cell_contents = value
            else:
                of.__globals__[name] = value
        return
    of.clear()
    if isinstance(of, dict):
        of.update(pairs)
    else:
        (of.update if isinstance(of, set) else of.extend)(entries)


def put_back(kept: Iterable[tuple[Tensor, Tensor, int]]) -> None:
    """Restore the values of tensors that were written to."""
    with torch.no_grad():
        for x, copy, version in kept:
            if x._version != version:
                x.copy_(copy)
