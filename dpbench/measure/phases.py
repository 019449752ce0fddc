"""Which part of a step runs: the forward pass, from a call of the model to its loss, or all else (backward)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

FORWARD, BACKWARD = "forward", "backward"
NAMES = ("model", FORWARD, BACKWARD, "step")
"""In the order of a record: what lives all the time, and the peaks of the forward pass, the rest, and the whole."""

LossFunction = Callable[[Any, Any], Any]


class Phases:
    """Told of by a hook on the model and by the loss function, whatever the backend calls in between.

    Attributes:
        entered: called with FORWARD or BACKWARD when that begins.
    """

    def __init__(self) -> None:
        self.entered: Callable[[str], None] = _nobody

    @contextmanager
    def watched(self, model: nn.Module, loss_fn: LossFunction) -> Iterator[LossFunction]:
        """The loss function to open a backend with; the hook is off the model afterwards.

        Args:
            model: whose forward pass is watched.
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
            self.entered = _nobody


def _nobody(_: str) -> None:
    pass
