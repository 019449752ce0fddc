"""Step the engine from framework loops that compute losses in one place and call `optimizer.step()` in another.

A logical batch comes in as many physical pieces as its records need, known only when it is drawn; a framework expects a
fixed number of batches a step. So the framework receives turns instead of batches. A turn takes at most one piece, and
the last turn of a logical batch takes the rest. Nothing is drawn ahead of its step.
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
    """One of a framework's batches within a logical batch.

    Args:
        is_last: the last of its logical batch; the framework then calls `optimizer.step()`.

    Attributes:
        pieces: the physical batches taken in it.
    """

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self.pieces: list[Any] = []


class Pieces:
    """The physical batches of a loader, turn by turn, epoch after epoch."""

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader = loader
        self._drawn: Iterator[Any] = iter(())
        self._left: list[Any] = []  # the last piece of a logical batch, drawn before its last turn

    def take(self, turn: Turn) -> Iterator[tuple[Any, bool]]:
        """Yield (piece, is it the last of its logical batch): at most one, and all that are left in the last turn.

        Args:
            turn: of the framework's loop; stores the yielded pieces.
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
    """An optimizer's step for loops that compute losses in one place and call `optimizer.step()` in another.

    Attaches the engine. Then `step()` takes the private step on the held losses. It first calls a closure, which
    computes and holds them.

    Args:
        engine: not attached yet.
        optimizer: of the model's parameters.
        caller: what a user of the framework must do, for the error without losses.

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
        """Clip and add a piece that is not the last of its logical batch.

        Args:
            losses: of the piece, [B] with their graph.
        """
        self._step(loss=losses)

    def hold(self, losses: Tensor | None) -> None:
        """Hold the last piece's losses.

        Args:
            losses: [B] with their graph; None if the piece has no samples and the model was not called.
        """
        self._losses, self._held = losses, True


class Judge(Watch):
    """Checks some of the pieces for a loss that depends on other samples, also through labels and inputs.

    The engine sees neither of these; it checks the model and the operations on its outputs. Hooks are on the model only
    between a checked piece and its losses.

    Args:
        model: attached to its engine.
        by: yields the pieces, for messages.
    """

    def __init__(self, model: nn.Module, by: str) -> None:
        super().__init__(model, lambda: None, by)
        self.close()

    def batch(self, batch: Any) -> Any:
        self.close()  # drop a piece without losses
        found = super().batch(batch)
        if self._look is not None:
            self.open()
        return found

    @property
    def is_looking(self) -> bool:
        """Whether the current piece is checked."""
        return self._look is not None

    def judge(self, losses: Tensor) -> None:
        try:
            super().judge(losses)
        finally:
            self.close()

    def outputs(self, args: Any, kwargs: Any, output: Any) -> Any:
        return None if output is None else self._noted(output)


class Mean:
    """The mean loss of a logical batch's own records, without padding: depends on the data, and not private."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self._engine = engine
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, losses: Tensor) -> None:
        """Add the losses of the piece that the model has read, before its step.

        Args:
            losses: [B], with or without a graph.
        """
        mine = plain(losses).detach()[self._engine.mask.to(losses.device)]
        self._sum, self._count = self._sum + mine.sum(), self._count + len(mine)

    def take(self) -> Any:
        """Return the mean, 0 without records, and reset it."""
        found = self._sum / max(1, self._count)
        self._sum, self._count = 0.0, 0
        return found


def to_skip(piece: Any, engine: PrivacyEngine) -> bool:
    """Returns whether a physical batch has no samples, and need not run: all processes run it if they share parameters.

    Args:
        piece: of the engine's loader.
        engine: of the model.
    """
    return any(x.dim() and not len(x) for x in tensors_of(piece)) and not sharded_modules(engine.model)


def per_sample(losses: Any, piece: Any, where: str) -> Tensor:
    """Return the losses if there is one for each sample.

    Args:
        losses: computed by the caller.
        piece: their physical batch.
        where: the name of the caller's function.

    Raises:
        Misuse: another shape or type.
    """
    size = next((len(x) for x in tensors_of(piece) if x.dim()), None)
    if not isinstance(losses, Tensor) or losses.dim() != 1 or (size is not None and len(losses) != size):
        came = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise Misuse(
            f"expected one loss a sample from {where}, shape [{'B' if size is None else size}], got {came}: use "
            "reduction='none' and average over each sample's own tokens; a loss over the batch cannot be private"
        )
    return losses
