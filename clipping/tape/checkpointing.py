"""What activation checkpointing computes once more in a backward pass: by the same handlers as in the forward pass.

Autograd compares what the two of them save, and a handler may run another operation than the model wrote: group norm
with a scale for each sample is one norm of a batch of one.

And what will be computed once more need not be held for a norm meanwhile (`LetGo`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Gradient, Rule

hooks_of_saving: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""Those that autograd has for the tensors it saves, as within a checkpoint; None where there are none."""

Handled = Callable[[Any, Any, Any, Any], Any]
"""(function, types, arguments, keyword arguments) -> its output: `__torch_function__` of a tape."""


class Replay(TorchFunctionMode):
    """The operations of a recomputation, `handled`, and the backward passes in which it happens."""

    def __init__(self, handled: Handled) -> None:
        super().__init__()
        self._handled = handled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if hooks_of_saving(True) is not None:
            return self._handled(func, types, args, kwargs)
        if func is not torch.autograd.grad or kwargs.get("grad_outputs") is not None:
            return func(*args, **kwargs)  # of norms and sums, not of the model
        with self:
            outputs, inputs = args
            return _of_scalar(outputs, inputs, kwargs["retain_graph"], kwargs["allow_unused"])


def _of_scalar(outputs: Any, inputs: tuple[Any, ...], retain_graph: bool, allow_unused: bool) -> Any:
    """`torch.autograd.grad`, which would ask the mode what to do; the engine takes it along, to every thread."""
    (output,) = (outputs,) if isinstance(outputs, Tensor) else outputs
    engine: Any = torch.autograd.Variable._execution_engine
    ones = (torch.ones_like(output),)
    return engine.run_backward((output,), ones, bool(retain_graph), False, inputs, allow_unused, accumulate_grad=False)


OfSources = list[tuple[Source, Gradient]]
"""For each source what its rule is made of."""
SMALL = 1024
"""Entries of a tensor that is not worth a ticket."""


class LetGo:
    """Inputs of uses within checkpoints: let go of, and found anew before the gradient of the use arrives.

    A use leaves a ticket among the tensors that autograd saves there, in the forward pass and when it is computed once
    more. To ask for the ticket has the part computed, and what comes back is the number of the second one.

    Args:
        on: whether anything is let go of.
    """

    def __init__(self, on: bool) -> None:
        self._on, self._asked, self._count = on, False, 0
        self._found: dict[int, OfSources] = {}

    def __bool__(self) -> bool:
        """Whether anything was let go of."""
        return self._count > 0

    @contextmanager
    def asked(self) -> Iterator[None]:
        """In here, what is computed once more is asked for, and not for the gradients of the parameters alone."""
        self._asked = True
        try:
            yield
        finally:
            self._asked = False
            self._found.clear()

    def taken(self, mine: OfSources) -> tuple[OfSources, Callable[[], OfSources] | None]:
        """What to hold on to instead of `mine`, and what gives that back in a backward pass, if it is let go of.

        It is called in both passes, with the same shapes: all that a checkpoint saves must be saved twice.

        Args:
            mine: sources, and the gradients of an operation with respect to them.
        """
        hooks = hooks_of_saving(True) if self._on else None
        large = any(_is_large(part) for _, gradient in mine for part in gradient[1:])
        if hooks is None or hooks[0].__module__ != torch.utils.checkpoint.__name__ or not large:
            return mine, None
        pack, unpack = hooks
        self._count += 1
        if self._asked and "_recomputation_hook" in pack.__qualname__:
            self._found[self._count] = _each(mine, Tensor.detach)  # or all of the part would be held by its graph
        ticket = pack(torch.empty_strided((0,), (self._count,)))  # no entry, and a number nobody else looks at
        return _each(mine, _stand_in), lambda: self._found.pop(unpack(ticket).stride(0))


def _is_large(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.numel() >= SMALL


def _each(mine: OfSources, made: Callable[[Tensor], Tensor]) -> OfSources:
    return [
        (source, (first, *(made(part) if _is_large(part) else part for part in rest)))
        for source, (first, *rest) in mine
    ]


def _stand_in(x: Tensor) -> Tensor:
    """Of its shape, dtype and device, in the memory of one entry."""
    return x.new_empty(()).expand(x.shape)


def with_numbers(rule: Rule) -> Rule:
    """The rule of a use whose input was let go of, on random numbers in its place: to be timed.

    Args:
        rule: of the use.
    """
    filled = copy.copy(rule)
    for name, value in vars(rule).items():
        if _is_large(value) and not any(value.stride()):
            setattr(filled, name, torch.randn_like(value, memory_format=torch.contiguous_format))
    return filled
