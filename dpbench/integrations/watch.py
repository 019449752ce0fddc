"""Between loader and step: what is computed from a batch is noted, in the batches that are looked at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clipping.core.batches import map_tensors, tensors_of
from dpbench.engine.loss_mixing_check import Traced, plain
from dpbench.engine.recorder import Hook
from dpbench.integrations.reduction import Look, Looks


class Watch(ABC):
    """Hooks on a model whose forward passes the engine records already.

    Args:
        model: what trains.
        forget: called when forward passes are let go without a step.
        by: who hands out the batches, for messages.
    """

    def __init__(self, model: nn.Module, forget: Callable[[], None], by: str) -> None:
        self._model, self._forget = model, forget
        self.looks = Looks(by)
        self._look: Look | None = None
        self._by_loader = False
        self._handles: list[Any] = []
        self.open()

    def open(self) -> None:
        """Hook the model: nearer to the caller than the engine's hooks, which are there."""
        self._handles = [
            self._model.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True),
            self._model.register_forward_hook(Hook(self._after), with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._see(None)

    def batch(self, batch: Any) -> Any:
        """What the loader hands out next; its tensors note what is done with them where that is looked at.

        Args:
            batch: of the loader.
        """
        self._see(self.looks.due())
        self._by_loader = True
        return batch if self._look is None else self._look.batch(batch)

    def judge(self, losses: Tensor) -> None:
        """Say whether each loss is made of its own sample alone, if this batch is looked at; it is done with.

        Args:
            losses: [B], of the caller's.

        Raises:
            UnsupportedModel: losses, or what the model read, of which one depends on other samples.
        """
        look = self._taken()
        if look is None:
            return
        try:
            look.judge_losses(losses, len(losses) if losses.dim() == 1 else 0)
        finally:
            look.close()
        if look.done:
            self.looks.done()

    def begin(self, args: Any, kwargs: Any) -> None:  # noqa: B027  (most have nothing to do)
        """Before a forward pass that trains.

        Args:
            args, kwargs: what the model is called with.
        """

    @abstractmethod
    def outputs(self, args: Any, kwargs: Any, output: Any) -> Any:
        """What the caller gets of a forward pass that trains; `output` is None where it has raised.

        Args:
            args, kwargs: what the model was called with.
            output: what it gave.
        """

    def _noted(self, output: Any) -> Any:
        """An output in the place of the engine's, which sees no labels: its tensors note what is done with them."""
        look = self._look
        if look is None:
            return output
        return map_tensors(lambda x: look.begun(plain(x)) if x.is_floating_point() and x.dim() else plain(x), output)

    def _see(self, look: Look | None) -> None:
        if self._look is not None:
            self._look.close()
        self._look, self._by_loader = look, False

    def _taken(self) -> Look | None:
        """The look at the batch that is stepped now, which is done with; the caller closes it."""
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
