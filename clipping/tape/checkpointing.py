"""Recompute checkpointed activations by the same handlers as in the forward pass.

Autograd compares the tensors saved by the forward pass and by the recomputation, and a handler may run another
operation than the model wrote: group norm with a scale for each sample runs as one norm of a batch of one.

Checkpointed inputs of uses are freed after the forward pass, and recomputed for the norm (`LetGo`).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipping.rules.base import Rule
from clipping.tape.uses import OfSources

hooks_of_saving: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns autograd's hooks for saved tensors, as a checkpoint sets them; None if there are none."""

Handled = Callable[[Any, Any, Any, Any], Any]
"""(function, types, arguments, keyword arguments) -> its output: `__torch_function__` of a tape."""


class Replay(TorchFunctionMode):
    """Runs recomputed operations by `handled`, in every backward pass within the context."""

    sees_functions = True

    def __init__(self, handled: Handled) -> None:
        super().__init__()
        self._handled = handled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if hooks_of_saving(True) is not None:
            return self._handled(func, types, args, kwargs)
        if func is not torch.autograd.grad or kwargs.get("grad_outputs") is not None:
            return func(*args, **kwargs)  # an operation of norms and sums, not of the model
        with self:
            outputs, inputs = args
            return _of_scalar(outputs, inputs, kwargs["retain_graph"], kwargs["allow_unused"])


def _of_scalar(outputs: Any, inputs: tuple[Any, ...], retain_graph: bool, allow_unused: bool) -> Any:
    """`torch.autograd.grad` without dispatch to the mode; the engine carries the mode to all its threads."""
    (output,) = (outputs,) if isinstance(outputs, Tensor) else outputs
    engine: Any = torch.autograd.Variable._execution_engine
    ones = (torch.ones_like(output),)
    return engine.run_backward((output,), ones, bool(retain_graph), False, inputs, allow_unused, accumulate_grad=False)


SMALL = 1024
"""Tensors with fewer entries are kept."""


class LetGo:
    """Frees inputs of uses within checkpoints, and recovers them before the gradient of the use arrives.

    A use saves a ticket with autograd, in the forward pass and in the recomputation. Unpacking the ticket runs the
    recomputation, and returns the number of the second ticket.

    Args:
        on: whether to free inputs.

    Attributes:
        count: how often inputs were freed.
    """

    def __init__(self, on: bool) -> None:
        self._on, self._asked, self.count = on, False, 0
        self._found: dict[int, OfSources] = {}

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Context in which recomputation is requested by a ticket, and not only for the parameters' gradients."""
        self._asked = True
        try:
            yield
        finally:
            self._asked = False
            self._found.clear()

    def taken(self, mine: OfSources) -> tuple[OfSources, Callable[[], OfSources] | None]:
        """Return what to keep instead of `mine`, and a function that recovers it in a backward pass if it was freed.

        Called in both passes with the same shapes: a checkpoint's tensors must all be saved twice.

        Args:
            mine: sources, and the gradients of an operation with respect to them.
        """
        hooks = hooks_of_saving(True) if self._on else None
        large = any(_is_large(part) for _, gradient in mine for part in gradient[1:])
        if hooks is None or hooks[0].__module__ != torch.utils.checkpoint.__name__ or not large:
            return mine, None
        pack, unpack = hooks
        self.count += 1
        if self._asked and "_recomputation_hook" in pack.__qualname__:
            self._found[self.count] = _each(mine, Tensor.detach)  # its graph would keep the whole checkpoint alive
        ticket = pack(torch.empty_strided((0,), (self.count,)))  # no entries; the stride is the ticket's number
        return _each(mine, _stand_in), lambda: self._found.pop(unpack(ticket).stride(0))


def _is_large(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.numel() >= SMALL


def _each(mine: OfSources, made: Callable[[Tensor], Tensor]) -> OfSources:
    return [
        (source, (first, *(made(part) if _is_large(part) else part for part in rest)))
        for source, (first, *rest) in mine
    ]


def _stand_in(x: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device with the memory of one entry."""
    return x.new_empty(()).expand(x.shape)


def with_numbers(rule: Rule) -> Rule:
    """Return a copy of a rule with its freed input replaced by random numbers, so that it can be timed."""
    filled = copy.copy(rule)
    for name, value in vars(rule).items():
        if _is_large(value) and not any(value.stride()):
            setattr(filled, name, torch.randn_like(value, memory_format=torch.contiguous_format))
    return filled
