"""What activation checkpointing computes once more in a backward pass: by the same handlers as in the forward pass.

Autograd compares what the two of them save, and a handler may run another operation than the model wrote: group norm
with a scale for each sample is one norm of a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
        if func is not torch.autograd.grad or kwargs.get("grad_outputs") is not None:
            return self._handled(func, types, args, kwargs)
        with self:
            outputs, inputs = args
            return _of_scalar(outputs, inputs, kwargs["retain_graph"], kwargs["allow_unused"])


def _of_scalar(outputs: Any, inputs: tuple[Any, ...], retain_graph: bool, allow_unused: bool) -> Any:
    """`torch.autograd.grad`, which would ask the mode what to do; the engine takes it along, to every thread."""
    (output,) = (outputs,) if isinstance(outputs, Tensor) else outputs
    engine: Any = torch.autograd.Variable._execution_engine
    ones = (torch.ones_like(output),)
    return engine.run_backward((output,), ones, bool(retain_graph), False, inputs, allow_unused, accumulate_grad=False)
