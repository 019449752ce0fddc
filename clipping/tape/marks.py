"""Mark the tensors of a forward pass that depend on data: made from the batch, or written to from it."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipping.numerics.traced_operations import is_traced
from clipping.provenance.derived_parameters import (
    CONSTANTS,
    depends_on_data,
    forget_data,
    is_marked,
    mark_constant,
    mark_data,
    samples_of,
)
from clipping.provenance.row_owners import Rows
from clipping.provenance.static_values import note, with_numbers
from clipping.tape.batch_dimension import dimension_after
from clipping.tape.mover import Mover, Place
from clipping.tape.moves import GATHERS, MOVES, VIEWS, of_later_dimension
from clipping.tape.rewritten import CHANGES, LIKE, MIXING
from clipping.tape.writes import WRITES

UNUSUAL = CONSTANTS | LIKE | CHANGES | MIXING
"""Operations that ignore the values of some operands, write into one, or mix samples."""


class Marks:
    """Marks tensors that depend on data, and removes the marks.

    Args:
        mixes: called for operations that may mix samples.
    """

    def __init__(self, batch_size: int, mixes: Callable[[Any, Any, Any], None]) -> None:
        self._batch_size, self._mixes = batch_size, mixes
        self._marked: list[weakref.ref[Tensor]] = []
        self._in_order = True
        self.order: Rows | None = None
        """Rows of the current use; None if they are in the samples' order."""

    def mark(self, func: Any, args: Any, kwargs: Any, output: Any, data: list[Tensor]) -> Any:
        """Mark and return the output of an operation on `data`."""
        if not data:
            for made in tensors((output,), None):
                if made.requires_grad and torch.is_grad_enabled():  # else it may be a view of a parameter
                    mark_constant(made)
            if is_traced():
                note(func, args, kwargs, output)
        if (func in GATHERS or not self._in_order) and data and self._moved(func, args, kwargs, output, data):
            return output
        if not data or (func in UNUSUAL and not self._is_made_of(func, args, kwargs, data)):
            return output
        for made in (output,) if isinstance(output, Tensor) else tensors((output,), None):
            at: Place = dimension_after(func, args, kwargs, data, made, self._batch_size)
            if not at and func in VIEWS and samples_of(args[0]):
                with with_numbers():
                    at = of_later_dimension(Mover(func, args, kwargs, made, data, self._batch_size))
                self._in_order &= not isinstance(at, Rows)
            if (at or not made.requires_grad) and not is_marked(made):  # else requires_grad suffices
                self._marked.append(weakref.ref(mark_data(made, at)))
        return output

    def put(self, x: Tensor, place: Place) -> Tensor:
        """Mark and return a tensor with its samples at `place`.

        Args:
            place: dimension of its samples, or owners of its rows.
        """
        self._in_order &= not isinstance(place, Rows)
        self._marked.append(weakref.ref(mark_data(x, place)))
        return x

    def placed(self, x: Tensor) -> Tensor:
        """Return a tensor with the rows of the current use; mark it if these are not in the samples' order."""
        return x if self.order is None else self.put(x, self.order)

    def _moved(self, func: Any, args: Any, kwargs: Any, output: Any, data: list[Tensor]) -> bool:
        """Mark the output of an operation if rows leave, or have left, the samples' order; return whether it did."""
        irregular = not self._in_order and any(isinstance(samples_of(x), Rows) for x in data)
        if func in CONSTANTS or not (irregular or func in GATHERS):
            return False
        mover = Mover(func, args, kwargs, output, data, self._batch_size)
        move = (MOVES if irregular else GATHERS).get(func)
        with with_numbers():
            moved = None if move is None else move(mover)
        if func in WRITES:
            made = [args[0] if func is torch.Tensor.__setitem__ else output]
        else:
            made = [output] if isinstance(output, Tensor) else tensors((output,), None)
        if moved is None and irregular and func not in WRITES:
            moved = [mover.inherited(data, x) for x in made]
        if moved is None:
            return False
        places: list[Place] = moved if isinstance(moved, list) else [moved] * len(made)
        for x, place in zip(made, places, strict=True):
            if irregular and isinstance(place, Rows):
                place = place.simplest  # reads values only where rows have left their order
            self.put(x, place)
        return True

    def forget(self) -> None:
        """Remove marks from tensors that outlive the forward pass (a buffer that it updated)."""
        for reference in self._marked:
            forget_data(reference())
        self._marked.clear()

    def _is_made_of(self, func: Any, args: Any, kwargs: Any, data: list[Tensor]) -> bool:
        """True if the output of an unusual operation holds values of the data."""
        if func in MIXING:
            self._mixes(func, args, kwargs)
        target = args[0] if args else None
        if func in CHANGES and isinstance(target, Tensor):
            for changed in (target, target._base):  # `x[:, 0] = y` returns nothing, and x may be a view
                if changed is not None and not depends_on_data(changed):
                    self._marked.append(weakref.ref(mark_data(changed)))
        return func not in CONSTANTS and (func not in LIKE or any(x is target for x in data))


def tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among arguments, and in tuples and lists among them."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors(value, None)
    return found
