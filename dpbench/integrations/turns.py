"""What loops of frameworks have in common: they draw batches, compute losses, and call `optimizer.step()` without them.

A logical batch comes from the engine's loader in as many physical pieces as its records need, which nobody knows before
it is drawn; a framework counts on a fixed number of batches a step. So it is handed turns, not batches: pieces are
drawn when a turn is taken, and the last turn of a logical batch takes all that are left. Nothing is drawn ahead of its
step.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clipping.core.batches import tensors_of
from clipping.distributed.spread import sharded_modules
from dpbench.engine import Misuse, PrivacyEngine
from dpbench.engine.loader import PrivateLoader
from dpbench.engine.loss_mixing_check import plain
from dpbench.integrations.watch import Watch


class Turn:
    """One of the parts in which a framework steps through a logical batch.

    Args:
        is_last: the last of its logical batch, after which the framework calls `optimizer.step()`.

    Attributes:
        pieces: the physical batches that were taken in it.
    """

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self.pieces: list[Any] = []


class Pieces:
    """The physical batches of a loader, turn by turn; it goes on with the next epoch by itself."""

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader = loader
        self._drawn: Iterator[Any] = iter(())
        self._left: list[Any] = []  # the last piece of a logical batch, drawn before its last turn

    def take(self, turn: Turn) -> Iterator[tuple[Any, bool]]:
        """(piece, is it the last of its logical batch): one at the most, and in the last turn all that are left.

        Args:
            turn: of the outer loop; it gets what is handed out.
        """
        while not self._left:
            piece = self._next()
            if self._loader.is_last:
                self._left.append(piece)
            else:
                turn.pieces.append(piece)
                yield piece, False
                if not turn.is_last:
                    return
        if turn.is_last:
            turn.pieces.append(self._left.pop())
            yield turn.pieces[-1], True

    def _next(self) -> Any:
        for piece in self._drawn:
            return piece
        self._drawn = iter(self._loader)
        return next(self._drawn)


class HeldLosses:
    """The step of an optimizer, for loops that compute losses at one place and call `optimizer.step()` at another.

    Attaches the engine; afterwards `step()` is the private step of what was held. A closure is called first, for it
    computes the losses and holds them.

    Args:
        engine: not attached yet.
        optimizer: of the model's parameters.
        caller: what a user of the framework would have to do, for the message where nothing was held.

    Raises:
        Misuse: as `PrivacyEngine.attach`.
    """

    def __init__(self, engine: PrivacyEngine, optimizer: torch.optim.Optimizer, caller: str) -> None:
        self._engine, self._held = engine, False
        self._losses: Tensor | None = None
        engine.attach(optimizer)
        private: Any = optimizer.step

        def step(this: Any, closure: Any = None) -> Any:
            result = None if closure is None else closure()
            if not self._held:
                raise Misuse(f"expected losses before optimizer.step(), got none: {caller}")
            losses, self._losses, self._held = self._losses, None, False
            if losses is None:
                engine.empty_step()
            else:
                private(loss=losses)
            return result

        self._step = private
        if hasattr(private, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def add(self, losses: Any) -> None:
        """A piece that is not the last of its logical batch: it is clipped and added.

        Args:
            losses: of the piece, [B] with their graph.
        """
        self._step(loss=losses)

    def hold(self, losses: Tensor | None) -> None:
        """The last piece's, [B] with their graph; None if it has no samples and the model was not called.

        Args:
            losses: of the piece.
        """
        self._losses, self._held = losses, True


class Judge(Watch):
    """Looks at some of the pieces whether a loss is made of its own sample alone: by way of labels and inputs, too.

    The engine, which sees neither, looks at the model and at what is made of its outputs. Between a piece that is
    looked at and its losses there are hooks on the model, and at no other time.

    Args:
        model: attached to its engine.
        by: who hands out the pieces, for messages.
    """

    def __init__(self, model: nn.Module, by: str) -> None:
        super().__init__(model, lambda: None, by)
        self.close()

    def batch(self, batch: Any) -> Any:
        self.close()  # of a piece whose losses never came
        found = super().batch(batch)
        if self._look is not None:
            self.open()
        return found

    @property
    def is_looking(self) -> bool:
        """Is the piece that was handed out looked at?"""
        return self._look is not None

    def judge(self, losses: Tensor) -> None:
        try:
            super().judge(losses)
        finally:
            self.close()

    def outputs(self, args: Any, kwargs: Any, output: Any) -> Any:
        return None if output is None else self._noted(output)


class Mean:
    """The mean loss of a logical batch's own records, padding left out: of the data, and not private."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self._engine = engine
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, losses: Tensor) -> None:
        """Of the piece that the model has read, [B], before its step.

        Args:
            losses: with a graph or without.
        """
        mine = plain(losses).detach()[self._engine.mask.to(losses.device)]
        self._sum, self._count = self._sum + mine.sum(), self._count + len(mine)

    def take(self) -> Any:
        """The mean; 0 of no records. The next one begins."""
        found = self._sum / max(1, self._count)
        self._sum, self._count = 0.0, 0
        return found


def to_skip(piece: Any, engine: PrivacyEngine) -> bool:
    """Has this physical batch no samples? Where processes share the parameters, all of them call the model even so.

    Args:
        piece: of the engine's loader.
        engine: whose model would read it.
    """
    return any(x.dim() and not len(x) for x in tensors_of(piece)) and not sharded_modules(engine.model)


def per_sample(losses: Any, piece: Any, where: str) -> Tensor:
    """The losses, if there is one for each sample.

    Args:
        losses: what somebody else's code has computed.
        piece: of which physical batch.
        where: the name of that code.

    Raises:
        Misuse: something else.
    """
    size = next((len(x) for x in tensors_of(piece) if x.dim()), None)
    if not isinstance(losses, Tensor) or losses.dim() != 1 or (size is not None and len(losses) != size):
        came = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise Misuse(
            f"expected one loss a sample from {where}, shape [{'B' if size is None else size}], got {came}: use "
            "reduction='none' and average over each sample's own tokens; a loss over the batch cannot be private"
        )
    return losses
