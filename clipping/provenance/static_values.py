"""Values of a traced step that depend on shapes alone, although its tensors have no values.

The owners of rows are computed beside the step (`clipping.provenance.row_owners`), from shapes and from the step's own
index tensors. Values from shapes are available during tracing if they are computed outside of it (`with_numbers`). So
are the values of an `arange`, also after operations that only rearrange it (`note`). All others depend on the batch:
another batch may have rows in another order.

A step may then be traced on the values of one batch (`assuming`). Owners are computed within the graph. A decision that
reads them (`holds`) becomes a condition, which the graph checks in each batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from clipping.numerics.per_thread import PerThread
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
"""Operations that only rearrange, select or cast values of their first operand."""
_ASSUMED: PerThread[list[Tensor] | None] = PerThread(None)
_known = WeakTensorKeyDictionary()
"""Tensor of a traced step -> its values, and its version at that time: a write may change them."""


@contextmanager
def with_numbers() -> Iterator[None]:
    """Context that suspends tracing, so that results have values if their operands do.

    Has no effect in a step that is traced on one batch's values: another batch has other values.
    """
    if not is_traced() or _ASSUMED.value is not None:
        yield
        return
    with _disable_current_modes():
        yield


@contextmanager
def assuming() -> Iterator[list[Tensor]]:
    """Context that traces a step on one batch's values; yields the conditions, booleans, that it relies on."""
    conditions = list[Tensor]()
    with _ASSUMED.set(conditions):
        yield conditions


def holds(condition: Tensor) -> bool:
    """Return a condition's value. If it is true, a step that is traced on one batch's values relies on it.

    A caller must be right for any batch if the answer is False.
    """
    if _ASSUMED.value is None:
        return bool(condition)
    with _disable_current_modes():
        found = bool(condition)
    if found:
        _ASSUMED.value.append(condition)
    return found


def rely_on(condition: Callable[[], Tensor]) -> None:
    """Let a step traced on one batch's values rely on a condition if it holds there. Do nothing in other steps."""
    if _ASSUMED.value is not None:
        holds(condition())


def at_most(counts: Tensor) -> int:
    """Return the largest of some counts, at least 1, which a step traced on one batch's values takes for a bound."""
    if _ASSUMED.value is None or not counts.numel():
        return max(1, int(counts.max())) if counts.numel() else 1
    with _disable_current_modes():
        bound = max(1, int(counts.max()))
    _ASSUMED.value.append((counts <= bound).all())
    return bound


def note(func: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Record the values of a traced operation's output, if they are the same for every batch."""
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
    """Return a tensor with the values of x, or None if they depend on the batch."""
    if not isinstance(x, FakeTensor) or not is_traced():
        return x
    found, version = _known.get(x, (None, 0))
    return found if x._version == version else None


def require_numbers(owners: Tensor) -> None:
    """Require owners of rows to have values.

    Raises:
        RuntimeError: a traced step would depend on the values of one batch.
    """
    if is_traced() and isinstance(owners, FakeTensor):
        raise RuntimeError("rows have left the batch's order, and their owners depend on the batch's values")
