"""`Trace`: record the caller's operations on some tensors, and rerun them with other values.

The engine does not know the loss function. So in the steps that check whether samples stay apart, the loader's batch
and the model's outputs are tensors that record each operation on them. A rerun repeats these operations and the model's
forward passes.

A number that leaves torch (`.item()`) and returns unchanged is followed. A value computed from it outside of torch, or
a branch that it decides, stays constant. A tensor returned by a custom function, say, cannot be followed.

A tensor computed in one such step, or after it, may be read in the next one (a queue of outputs, a running mean of
losses). It is known as kept from an earlier batch, and so is everything that is computed from it.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping.core.batches import map_tensors, tensors_of
from clipping.numerics.rng_replay import Draws

_BASE: Any = Tensor._base.__get__  # type: ignore[union-attr]
"""Returns the tensor that a view refers to, and computes nothing. (torch.compile reads it, also of results.)"""

_CONSTANT = {torch.zeros_like, torch.ones_like, torch.empty_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty}
"""Functions whose results depend on no value."""
_SCALES = {"mul", "mul_", "div", "div_", "true_divide", "__rdiv__"}
"""Names of functions that may scale by a number of Python's."""
_OPEN: weakref.WeakSet[Trace] = weakref.WeakSet()


class _Note(NamedTuple):
    operation: Any
    args: Any
    kwargs: Any
    result: Any
    autocast: Sequence[Any]


class Trace:
    """Records the operations on some tensors until closed.

    Args:
        of: identifies the training: the same in all of its steps.

    Attributes:
        room: most memory of results before the model reads the batch, relative to the batch.
        draws: the state of the random generators before the first operation.
        size: B of the loader's batch; 0 without one.
    """

    room = 32.0  # all results are kept, and those of a frozen network would be too large

    def __init__(self, of: int = 0) -> None:
        self.draws, self.size, self.of = Draws(), 0, of
        self._open, self._room = True, math.inf  # bytes that results may still take
        _OPEN.add(self)
        self._begun_with: list[Tensor] = []
        self._notes: list[_Note] = []
        self._passes: list[int] = []  # places of the model's forward passes among the notes
        self._others: dict[int, Tensor] = {}  # identity of a tensor changed in place -> its original values

    def batch(self, batch: Any) -> Any:
        """Make the tensors [B, ...] of the loader's batch record the operations on them.

        A batch stays as it is if its tensors differ in length (labels joined to one row, say), or if it may be a list
        of records.

        Args:
            batch: nested containers of tensors.
        """
        sizes = {len(x) if x.layout == torch.strided else -1 for x in tensors_of(batch) if x.dim()}
        fields = list(batch.values()) if isinstance(batch, Mapping) else [batch, *batch] if _is_list(batch) else []
        if len(sizes) != 1 or any(_is_list(x) and len(x) in sizes and _are_alike(x) for x in fields):
            return batch
        self._room, self.size = self.room * max(1, _bytes(batch)), sizes.pop()
        return map_tensors(self._begun, batch)

    def passed(self, model: Callable[..., Any], args: Any, kwargs: Any, output: Any) -> Any:
        """Record a forward pass; return its output, in the same containers, of tensors that record operations on them.

        Args:
            model: called again in a rerun, on replaced tensors.
            args, kwargs: its inputs.
            output: its output, in nested mappings, lists and tuples.
        """
        self._room = math.inf
        self._begun_with += [x for x in tensors_of((args, kwargs)) if not self.follows(x)]
        shapes = [x.shape for x in tensors_of(output)]
        result = map_tensors(lambda x: Traced.made(x, self) if x.is_floating_point() else x, output)

        def again(*args: Any, **kwargs: Any) -> Any:
            left = iter(shapes)
            args, kwargs = map_tensors(plain, (args, kwargs))
            with torch._C._EnableTorchFunction():  # else operators of a library would not be shown to the tape
                found = model(*args, **kwargs)
            return map_tensors(lambda x: _filled(x, next(left)), found)

        self._passes.append(len(self._notes))
        kept = map_tensors(lambda x: x, result)  # a distribution holds more tensors once they are asked for
        self._notes.append(_Note(again, args, kwargs, kept, _autocast_now()))
        return result

    @property
    def is_computed(self) -> bool:
        """Whether operations came before the first forward pass, so that samples may have traded places."""
        return bool(self._passes) and self._passes[0] > 0

    def scaled_by(self, number: int, found: Sequence[Tensor]) -> set[int]:
        """Return the places of operations that multiply or divide by a number of Python's, on the way to some tensors.

        Args:
            number: at least 1; its inverse counts, too.
            found: followed tensors.
        """
        wanted, places = set(map(id, found)), set()
        for place, note in reversed(list(enumerate(self._notes))):
            if not wanted.isdisjoint(map(id, tensors_of(note.args[:1] if note.result is None else note.result))):
                wanted.update(map(id, tensors_of((note.args, note.kwargs))))
                numbers = [x for x in note.args if isinstance(x, (int, float))]
                if getattr(note.operation, "__name__", "") in _SCALES and {number, 1 / number} & set(numbers):
                    places.add(place)
        return places

    def follows(self, x: Tensor) -> bool:
        """Returns whether the trace knows how `x` was computed."""
        return self._open and self.knows(x)

    def knows(self, x: Tensor) -> bool:
        """Returns whether `x` was computed, or changed in place, while the trace recorded."""
        return id(x) in self._others or (isinstance(x, Traced) and x.noted_by is self)

    def is_kept(self, x: Tensor) -> bool:
        """Returns whether `x` was computed from an earlier batch of the same training."""
        return isinstance(x, Traced) and x.noted_by.of == self.of and x.noted_by not in (self, *_OPEN)

    def kept(self, result: Any) -> Any:
        """Mark the result of an operation on this batch's tensors after its step: a later step may read it.

        Args:
            result: nested containers.
        """
        return map_tensors(lambda x: x if isinstance(x, Traced) else Traced.made(x, self), result)

    def again(
        self,
        found: Sequence[Tensor],
        change: Callable[[Tensor], Tensor],
        fixed: Callable[[Tensor], Tensor],
        *,
        late: bool = False,
    ) -> list[Tensor]:
        """Rerun the operations, and return the new values of followed tensors.

        Args:
            found: followed tensors.
            change: applied to the loader's batch, and to other inputs of the model.
            fixed: applied to every other tensor.
            late: change the model's inputs in place of the loader's batch.
        """
        with torch._C.DisableTorchFunctionSubclass():
            values = self._again(lambda x: change(plain(x)), fixed, late)
            return [values[id(x)] for x in found]

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of the caller's; record it if it returns tensors or changes one in place."""
        changes = _in_place(operation) and isinstance(args[0], Tensor)
        if changes and not (isinstance(args[0], Traced) and args[0].requires_grad):
            self._others.setdefault(id(args[0]), plain(args[0]).detach().clone())
        result = operation(*args, **kwargs)
        if changes:
            self._notes.append(_Note(operation, args, kwargs, None, _autocast_now()))
        elif _is_telling(result) or tensors_of(result):
            result = map_tensors(lambda x: x if isinstance(x, Traced) else Traced.made(x, self), result)
            self._notes.append(_Note(operation, args, kwargs, result, _autocast_now()))
            self._room -= _bytes(result)
        if self._room < 0:
            self.close()
        return result

    def pause(self) -> None:
        """Stop recording; later operations return ordinary tensors."""
        self._open = False
        _OPEN.discard(self)

    def close(self) -> None:
        """Stop recording, and free the record."""
        self.pause()
        self._begun_with.clear()
        self._notes.clear()
        self._passes.clear()
        self._others.clear()

    def _begun(self, x: Tensor) -> Tensor:
        traced = Traced.made(x, self)
        self._begun_with.append(traced)
        return traced

    def _again(
        self, change: Callable[[Tensor], Tensor], fixed: Callable[[Tensor], Tensor] = lambda x: x, late: bool = False
    ) -> dict[int, Any]:
        """Identity of each traced tensor -> its new value: `change` of initial tensors, `fixed` of other ones."""
        values: dict[int, Any] = {key: x.clone() for key, x in self._others.items()}
        numbers: dict[float, float] = {}  # number that left torch -> its new value
        for x in self._begun_with:
            before = self._others.get(id(x), x)
            values[id(x)] = fixed(before.clone()) if late else change(before)
        for place, note in enumerate(self._notes):
            args, kwargs = map_tensors(
                lambda x: values[id(x)] if id(x) in values else fixed(x), (note.args, note.kwargs)
            )
            args, kwargs = _numbers(numbers, args), _numbers(numbers, kwargs)
            if late and place in self._passes:
                args, kwargs = map_tensors(change, (args, kwargs))
            with _under(note.autocast):
                found = note.operation(*args, **kwargs)
            if _is_telling(note.result):
                numbers[note.result] = found
            _pair(note.result, found, values)
        return values


class Traced(Tensor):
    """A tensor that records the operations on it."""

    noted_by: Trace

    @staticmethod
    def made(x: Tensor, trace: Trace) -> Traced:
        """View a tensor as one of this trace.

        Args:
            x: an ordinary tensor.
            trace: records its operations.
        """
        with torch._C.DisableTorchFunctionSubclass():
            traced: Traced = x.as_subclass(Traced)
        traced.noted_by = trace
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func == _BASE or func in _CONSTANT:
                return func(*args)
            traces = [x.noted_by for x in tensors_of((args, kwargs)) if isinstance(x, Traced)]
            for trace in traces:
                if trace._open:
                    return trace.run(func, args, kwargs)
            result = func(*args, **kwargs)
            return traces[0].kept(result) if traces else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(plain(self), memo)

    def __format__(self, spec: str) -> str:  # torch formats numbers of class Tensor alone
        return format(plain(self), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return plain(self).__repr__(**options)


def plain(x: Any) -> Any:
    """View a traced tensor as an ordinary one, of the same memory and graph; other values are unchanged."""
    if not isinstance(x, Traced):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def is_followed(batch: Any) -> bool:
    """Returns whether a batch holds tensors that record the operations on them.

    Args:
        batch: nested containers.
    """
    return any(isinstance(x, Traced) for x in tensors_of(batch))


def _filled(x: Tensor, shape: torch.Size) -> Tensor:
    """Pad an output to its first shape with noise, as it may be as long as the batch's longest record."""
    if x.dim() != len(shape) or x.shape == shape or not x.is_floating_point():
        return x
    generator = torch.Generator(x.device).manual_seed(0)
    whole = torch.randn(shape, generator=generator, device=x.device, dtype=torch.float64).to(x.dtype)
    whole[tuple(slice(size) for size in x.shape)] = x
    return whole


def _autocast_now() -> list[tuple[str, torch.dtype]]:
    """(device type, dtype) of each active autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]


@contextmanager
def _under(autocast: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype in autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


def _in_place(operation: Any) -> bool:
    name = getattr(operation, "__name__", "")
    if name.endswith("__"):
        return name in {"__setitem__", "__set__"} or (
            name.startswith("__i") and name not in {"__int__", "__index__", "__invert__"}
        )
    return bool(name.endswith("_"))


def _bytes(tree: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_of(tree))


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether they may be records: fields are tensors that differ in shape or dtype."""
    return len({(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in values} - {None}) < 2


def _is_telling(x: Any) -> bool:
    """Whether a float has so many digits that an equal float must come from the same computation."""
    return isinstance(x, float) and math.isfinite(x) and float(f"{x:.6g}") != x


def _numbers(now: dict[float, float], tree: Any) -> Any:
    """The arguments, with new values in place of numbers that left torch."""
    if isinstance(tree, float):
        return now.get(tree, tree)
    if type(tree) in (tuple, list):
        return type(tree)(_numbers(now, each) for each in tree)
    if type(tree) is dict:
        return {key: _numbers(now, each) for key, each in tree.items()}
    return tree


def _pair(noted: Any, found: Any, values: dict[int, Any]) -> None:
    """Store the new value of each recorded tensor; None was recorded for an operation in place."""
    for one, other in zip(tensors_of(noted), () if noted is None else tensors_of(found), strict=True):
        if isinstance(one, Traced):
            values[id(one)] = other
