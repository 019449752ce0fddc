"""Reports the running phase of a step: forward, from a call of the model to its loss, or backward, all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

FORWARD, BACKWARD = "forward", "backward"
NAMES = ("model", FORWARD, BACKWARD, "step")
"""In the order of a record: permanent memory, and the peaks of the forward pass, the rest, and the whole step."""

LossFunction = Callable[[Any, Any], Any]


class Phases:
    """Detects phases by a hook on the model and by the loss function, for any backend.

    Attributes:
        entered: called with FORWARD or BACKWARD when that phase begins.
    """

    def __init__(self) -> None:
        self.entered: Callable[[str], None] = lambda phase: None

    @contextmanager
    def watched(self, model: nn.Module, loss_fn: LossFunction) -> Iterator[LossFunction]:
        """Hook the model, and yield the loss function to open a backend with; unhook afterwards.

        Args:
            loss_fn: (outputs, targets) -> [B].
        """

        def loss_of(outputs: Any, targets: Any) -> Any:
            losses = loss_fn(outputs, targets)
            self.entered(BACKWARD)
            return losses

        handle = model.register_forward_pre_hook(lambda *_: self.entered(FORWARD))
        try:
            yield loss_of
        finally:
            handle.remove()
