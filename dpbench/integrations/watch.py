"""`Watch`: base class of hooks that record a model's operations on those batches that `loss_check` checks."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from clipping.core.batches import map_tensors, tensors_of
from dpbench.engine.recorder import Hook
from dpbench.engine.trace import Traced, plain
from dpbench.integrations.loss_check import Look

FIRST, RATE, KNOWN = 3, 1 / 200, 32
"""Number of first batches to check, share of later ones, and number of losses told apart."""


class Watch:
    """Hooks on a model whose forward passes the engine records already. Decides which batches to check.

    Args:
        model: in training.
        by: yields the batches, for messages.

    Methods take:
        args, kwargs: the model's inputs.
    """

    def __init__(self, model: nn.Module, by: str) -> None:
        self._model, self._by = model, by
        self._first, self._random = FIRST, random.Random(0)
        self._graphs: set[tuple[str, ...]] = set()
        self._look: Look | None = None
        self._by_loader = False
        self._handles: list[Any] = []

    def open(self) -> None:
        """Hook the model, outside of the engine's hooks."""
        self._handles = [
            self._model.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True),
            self._model.register_forward_hook(Hook(self._after), with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._see(None)

    def batch(self, batch: Any) -> Any:
        """Return the loader's next batch; if it is checked, its tensors record the operations on them.

        Args:
            batch: of the loader.
        """
        self._see(self._due())
        self._by_loader = True
        return batch if self._look is None else self._look.batch(batch)

    def judge(self, losses: Tensor) -> None:
        """Check, if this batch is checked, that each loss depends on its own sample alone, and end the check.

        Args:
            losses: the caller's, [B].

        Raises:
            UnsupportedModel: a loss, or the model's input for a sample, depends on other samples.
        """
        look = self._taken()
        if look is None:
            return
        try:
            look.judge_losses(losses, len(losses) if losses.dim() == 1 else 0)
        finally:
            look.close()
        self._count(look)

    def begin(self, args: Any, kwargs: Any) -> None:
        """Called before a forward pass in training."""

    def outputs(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the output of a forward pass in training to the caller. That of a checked batch also follows labels.

        Args:
            output: the model's output, which the engine may record already; None if the pass raised.
        """
        look = self._look
        if look is None or output is None:
            return output
        return map_tensors(lambda x: look.begun(plain(x)) if x.is_floating_point() and x.dim() else plain(x), output)

    def _due(self) -> Look | None:
        """A check for the next batch, or None."""
        return Look(self._by) if self._random.random() < RATE or self._first > 0 else None

    def _count(self, look: Look) -> None:
        """Count a batch if it was checked."""
        if look.done and self._first > 0:
            self._first -= 1

    def _ran(self, nodes: tuple[str, ...]) -> None:
        """Request one more check after a backward pass of a new kind: the nodes between loss and outputs, by name."""
        if nodes not in self._graphs and len(self._graphs) < KNOWN:
            self._graphs.add(nodes)
            self._first = max(self._first, 1)

    def _see(self, look: Look | None) -> None:
        if self._look is not None:
            self._look.close()
        self._look, self._by_loader = look, False

    def _taken(self) -> Look | None:
        """The current check, which ends here; the caller closes it."""
        look, self._look, self._by_loader = self._look, None, False
        return look

    def _trains(self, module: nn.Module) -> bool:
        return module is self._model and module.training and torch.is_grad_enabled()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._trains(module):
            self.begin(args, kwargs)
            if self._look is not None:
                self._look.read(args, kwargs)
        noted = any(isinstance(x, Traced) for x in tensors_of((args, kwargs)))
        return map_tensors(plain, (args, kwargs)) if noted else None

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return self.outputs(args, kwargs, output) if self._trains(module) else None
