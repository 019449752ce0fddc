"""What is known of a step while it is traced, in which tensors have no numbers: those that shapes alone decide.

Whose the rows of an activation are is computed beside the step (`clipping.provenance.row_owners`), of numbers that come
of shapes and of those in the step's own index tensors. The former are there while a step is traced, too, if they are
computed outside of it (`with_numbers`); and so are those of an `arange`, and of what only rearranges one (`note`). All
others depend on the batch: another one would have rows in another order, and the graph would not be its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from clipping.numerics.traced_operations import is_traced

REARRANGE = {
    torch.Tensor.__getitem__,
    torch.Tensor.expand,
    torch.Tensor.reshape,
    torch.Tensor.to,
    torch.Tensor.unsqueeze,
    torch.Tensor.view,
    torch.unsqueeze,
}
_known = WeakTensorKeyDictionary()
"""A tensor of a traced step -> its numbers, and its version then: what writes into it may make others of them."""


@contextmanager
def with_numbers() -> Iterator[None]:
    """What is computed within it is no part of a step that is traced, and has numbers if its operands do."""
    if not is_traced():
        yield
        return
    with _disable_current_modes():
        yield


def note(func: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Remember the numbers of what an operation of a traced step gave, if they are those of every batch.

    Args:
        func, args, kwargs: the operation, and what it was called with; no operand depends on the batch.
        output: what it gave.
    """
    if func is torch.arange and not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
        given = args
    elif func in REARRANGE and not any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values())):
        known = numbers_of(args[0])
        if known is None or isinstance(known, FakeTensor):
            return
        given = (known, *args[1:])
    else:
        return
    with with_numbers():
        _known[output] = func(*given, **kwargs), output._version


def numbers_of(x: Tensor) -> Tensor | None:
    """A tensor that has the numbers of x; None if they depend on the batch, and there is none.

    Args:
        x: of a step.
    """
    if not isinstance(x, FakeTensor) or not is_traced():
        return x
    found, version = _known.get(x, (None, 0))
    return found if x._version == version else None


def require_numbers(owners: Tensor) -> None:
    """Raise a RuntimeError where whose rows are where would be decided by numbers of one batch.

    Args:
        owners: of rows.
    """
    if is_traced() and isinstance(owners, FakeTensor):
        raise RuntimeError("rows have left the batch's order, and whose they are is known by numbers alone")
