"""`Mover`: an operation with the owners of its operands' rows, as the functions of `clipping.tape.moves` take it."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.provenance.derived_parameters import samples_of
from clipping.provenance.row_owners import NOBODY, Rows, in_order
from clipping.provenance.static_values import holds, rely_on, require_numbers

Place = int | Rows
"""Place of an activation's samples: a dimension, or rows in any order."""
Moved = Place | list[Place] | None
"""Place of the output, or of each output; None if this call keeps rows in place."""


class Mover:
    """One operation, and its effect on rows.

    Args:
        data: its operands that depend on the batch; tensors made of parameters have no owner.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, output: Any, data: Sequence[Tensor], batch_size: int) -> None:
        self.func, self.args, self.kwargs, self.output = func, args, kwargs, output
        self.data, self.batch_size = data, batch_size

    def owners(self, x: Tensor, dims: int, beside: int | None = None) -> Tensor | None:
        """Return the owners of x for at least `dims` leading dimensions; None if unknown.

        Args:
            beside: dimension along which x is joined to rows in the batch's order. A constant with B·k rows there has
                the same owners.
        """
        place = samples_of(x)
        constant = not isinstance(place, Rows) and not any(x is operand for operand in self.data)
        if constant and beside is not None and x.shape[beside] % self.batch_size == 0:
            constant, place = False, beside
        if isinstance(place, Rows):
            found = place.owners
            if place.unknown:
                return None
        elif constant:
            found = torch.full((), NOBODY, device=x.device)
        elif x.dim() <= place or not x.shape[place] or x.shape[place] % self.batch_size:
            return None
        else:
            numbers = in_order(x.shape[place], self.batch_size, x.device)
            found = numbers.expand(x.shape[: place + 1])
        if found.dim() < dims:
            more = dims - found.dim()
            found = found.view(*found.shape, *[1] * more).expand(x.shape[:dims])
        return found

    def rows(self, owners: Tensor) -> Rows:
        """Return `Rows` of these owners, in this batch."""
        return Rows(owners, self.batch_size)

    def unknown(self) -> Rows:
        """Return rows that have unknown owners after this operation."""
        return Rows(
            torch.full((), NOBODY, device="cpu"), self.batch_size, getattr(self.func, "__name__", str(self.func))
        )

    def inherited(self, data: Sequence[Tensor], output: Tensor) -> Place:
        """Return the place of the operand that has the output's rows, for an operation that keeps rows in place."""
        places = [place for x in data if isinstance(place := samples_of(x), Rows)]
        known = [place for place in places if not place.unknown]
        fitting = [place for place in known if output.shape[: place.owners.dim()] == place.owners.shape]
        if fitting:
            most = max(fitting, key=lambda place: place.owners.dim())
            require_numbers(most.owners)
            if len(fitting) > 1 and not most.owners.dim() and not isinstance(most.owners, FakeTensor):
                same = all(holds(place.owners == most.owners) for place in fitting if place is not most)
                return most if same else self.unknown()
            for place in fitting:  # rows of two orders that meet; either is right while they agree
                if place.owners is not most.owners:
                    rely_on(functools.partial(_agree, most.owners, place.owners))
            return most
        if output.shape[:1] == (self.batch_size,):
            return 0
        return self.unknown() if known else places[0] if places else 0

    def option(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument of the operation.

        Args:
            position: position among the positional arguments.
            name: name as a keyword.
            default: value if it was not given.
        """
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)


def _agree(owners: Tensor, others: Tensor) -> Tensor:
    """True if no row has two owners; `others` may have fewer dimensions."""
    others = others.view(*others.shape, *[1] * (owners.dim() - others.dim()))
    return ((owners == others) | (owners == NOBODY) | (others == NOBODY)).all()
