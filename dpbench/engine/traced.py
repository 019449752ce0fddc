"""The losses once more, with the outputs of other samples replaced: does what the caller computes mix samples?

The engine sees no loss function. So in the steps in which it looks whether samples stay apart, it hands out the model's
outputs as tensors that note each operation on them. At `optimizer.step` what was noted runs again, without gradients:
on the outputs as they were, and on outputs of which all samples but those of S are replaced by one of S, for several S.
The losses of S must be the same. (A gradient tells of most mixing, but not of a detached mean of the losses, nor of
trimming them.)

A number that left torch (`.item()`) and comes back as it was is followed, too. What was made of it outside of torch, or
was decided by it, is a constant here. Losses that come back as other tensors, of a custom function, say, are not looked
at.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping.apart import TOLERANCE, differing, with_others_replaced
from clipping.draws import Draws
from clipping.formats import coarsest
from dpbench.engine.containers import mapped, tensors_in

_BASE: Any = Tensor._base.__get__  # type: ignore[union-attr]
"""What a view is of: nothing is computed. (torch.compile asks for it, and for that of the answer.)"""


class _Note(NamedTuple):
    operation: Any
    args: Any
    kwargs: Any
    result: Any


class Trace:
    """What is computed of some outputs of a model, until it is closed."""

    def __init__(self) -> None:
        self._open = True
        self._outputs: list[Traced] = []
        self._notes: list[_Note] = []
        self._others: dict[int, Tensor] = {}  # identity of the caller's own tensors that were changed -> as they were

    def of(self, output: Any) -> Any:
        """The same output of the model, in the same containers, of tensors that note what is done with them.

        Args:
            output: in nested mappings, lists and tuples.
        """
        return mapped(lambda x: self._begun(x) if x.is_floating_point() else x, output)

    def mixed(self, losses: Tensor, halves: Sequence[Tensor]) -> int | None:
        """A sample whose loss changes where the outputs outside of its half are replaced; None if there is none.

        Args:
            losses: [B], as the caller handed them back.
            halves: [B] bool each.
        """
        if not self._open or not isinstance(losses, Traced) or losses.noted_by is not self:
            return None
        draws = Draws()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            tolerance = coarsest([*self._outputs, losses], TOLERANCE)
            try:
                with draws.again():
                    before = self._again(_copy)[id(losses)]
                for half in halves:
                    with draws.again():
                        after = self._again(partial(with_others_replaced, half=half))[id(losses)]
                    sample = differing([before], [after], half, tolerance)
                    if sample is not None:
                        return sample
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # it runs once, and not again
                return None
        return None

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of the caller's, and keep it if it gives tensors or changes one; those are traced, too.

        Args:
            operation, args, kwargs: what was called, and with what.
        """
        if not self._open:
            return operation(*args, **kwargs)
        changes = _in_place(operation) and isinstance(args[0], Tensor)
        if changes and not isinstance(args[0], Traced):
            self._others.setdefault(id(args[0]), args[0].detach().clone())
        result = operation(*args, **kwargs)
        if changes:
            self._notes.append(_Note(operation, args, kwargs, None))
        elif _is_telling(result) or next(tensors_in(result), None) is not None:
            result = mapped(lambda x: x if isinstance(x, Traced) else Traced.made(x, self), result)
            self._notes.append(_Note(operation, args, kwargs, result))
        return result

    def close(self) -> None:
        """Let go of what was noted; what is done with the tensors from now on gives ordinary ones."""
        self._open = False
        self._outputs.clear()
        self._notes.clear()
        self._others.clear()

    def _begun(self, x: Tensor) -> Tensor:
        traced = Traced.made(x, self)
        self._outputs.append(traced)
        return traced

    def _again(
        self, change: Callable[[Tensor], Tensor], fixed: Callable[[Tensor], Tensor] = lambda x: x
    ) -> dict[int, Any]:
        """Identity of each traced tensor -> its value, where it began with `change` of what it was; others `fixed`."""
        values: dict[int, Any] = {key: x.clone() for key, x in self._others.items()}
        numbers: dict[float, float] = {}  # what left torch -> what it is now
        for x in self._outputs:
            values[id(x)] = change(x)
        for note in self._notes:
            args, kwargs = mapped(lambda x: values[id(x)] if id(x) in values else fixed(x), (note.args, note.kwargs))
            args, kwargs = _numbers(numbers, args), _numbers(numbers, kwargs)
            found = note.operation(*args, **kwargs)
            if _is_telling(note.result):
                numbers[note.result] = found
            _pair(note.result, found, values)
        return values


class Traced(Tensor):
    """A tensor that notes what is done with it."""

    noted_by: Trace

    @staticmethod
    def made(x: Tensor, trace: Trace) -> Traced:
        """The same tensor, as one of this trace.

        Args:
            x: an ordinary tensor.
            trace: which notes what is done with it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            traced: Traced = x.as_subclass(Traced)
        traced.noted_by = trace
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func == _BASE:
                return func(*args)
            traced = [x for x in tensors_in((args, kwargs)) if isinstance(x, Traced)]
            return traced[0].noted_by.run(func, args, kwargs) if traced else func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(plain(self), memo)

    def __format__(self, spec: str) -> str:  # torch formats numbers of its own class alone
        return format(plain(self), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return plain(self).__repr__(**options)


def plain(x: Tensor) -> Tensor:
    """An ordinary tensor: the same memory, the same graph.

    Args:
        x: any tensor.
    """
    if not isinstance(x, Traced):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


def _in_place(operation: Any) -> bool:
    name = getattr(operation, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in {"__int__", "__index__", "__invert__"})
    return bool(name.endswith("_"))


def _is_telling(x: Any) -> bool:
    """A number of so many digits that nobody else has the same."""
    return isinstance(x, float) and math.isfinite(x) and float(f"{x:.6g}") != x


def _numbers(now: dict[float, float], tree: Any) -> Any:
    """The same arguments with what some numbers are now in their places."""
    if isinstance(tree, float):
        return now.get(tree, tree)
    if type(tree) in (tuple, list):
        return type(tree)(_numbers(now, each) for each in tree)
    if type(tree) is dict:
        return {key: _numbers(now, each) for key, each in tree.items()}
    return tree


def _pair(noted: Any, found: Any, values: dict[int, Any]) -> None:
    """Write down what each noted tensor is now."""
    if isinstance(noted, Traced):
        values[id(noted)] = found
    elif isinstance(noted, (tuple, list)):
        for one, other in zip(noted, found, strict=True):
            _pair(one, other, values)
