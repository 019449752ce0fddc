"""The result of loading a model: a `Workload`, or a `ModelError`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpbench.errors import UsageError

if TYPE_CHECKING:
    import torch


class ModelError(UsageError, ValueError):
    """A model of a reference cannot be built, or not in the requested size. One line."""


@dataclass
class Workload:
    """The model, loss and data of a training step.

    model: in train mode, its parameters on `device` in `dtype`.
    loss_fn: (outputs, targets) -> losses [B], no reduction over samples.
    batch: B -> (inputs, targets) with B samples, on the model's device; floating inputs in its dtype. `inputs` is a
        tensor, a tuple (positional) or a dict (keyword arguments). The same B gives the same batch every time.
    """

    model: torch.nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor]
    batch: Callable[[int], tuple[Any, Any]]
