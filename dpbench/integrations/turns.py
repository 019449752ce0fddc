"""Step the engine from framework loops that compute losses in one place and call `optimizer.step()` in another.

The number of physical pieces of a logical batch is known only when it is drawn, but a framework expects a fixed number
of batches a step. So the framework receives `Turn` objects instead of batches. The last turn of a logical batch takes
all its pieces, and the others take none. Nothing is drawn ahead of its step.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from clipping.core.batches import tensors_of
from clipping.distributed.spread import sharded_modules
from clipping.program.graphs import Compile
from dpbench.engine import Misuse, PrivacyEngine
from dpbench.engine.distributed import place
from dpbench.engine.loader import PrivateLoader
from dpbench.engine.trace import is_followed, plain
from dpbench.engine.whole_step import Programs


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

    def __getitem__(self, index: Any) -> Any:
        """Raise a Misuse, also where it is unpacked or iterated over."""
        raise Misuse(
            "expected batch.pieces, the physical batches of a step (none before it), got the batch itself indexed or "
            "unpacked: how many records it has is known only when it is drawn"
        )


class Steps:
    """Private steps on the pieces of turns: `take` yields them, and `run` computes, checks and keeps their losses.

    Attaches the engine. The optimizer's `step()` first calls a closure, if given, which may take a turn; then it takes
    the private step on the losses of the last piece.

    Args:
        engine: not attached yet.
        optimizer: of the model's parameters.
        losses_of: a piece as the caller's loss takes it -> [B].
        advice: what a user of the framework must do, for the error without losses.
        compile: as in `clipping.Backend`.

    Attributes:
        programs: the steps' programs; `programs.graphs` is None if all steps run eagerly.

    Raises:
        Misuse: as `PrivacyEngine.attach`.
    """

    def __init__(
        self,
        engine: PrivacyEngine,
        optimizer: torch.optim.Optimizer,
        losses_of: Callable[[Any], Tensor],
        *,
        advice: str,
        compile: Compile,
    ) -> None:
        self._engine, self._losses_of, self._advice = engine, losses_of, advice
        self.programs = Programs(engine, losses_of, compile=compile)
        self._sum: Tensor | float = 0.0
        self._count = 0
        self._last: Tensor | None = None  # losses of the last piece, None if it has no samples
        self._is_held = False
        self._attach(optimizer)

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        self._engine.attach(optimizer)
        private: Any = optimizer.step

        def step(this: Any, closure: Any = None) -> Any:
            result = None if closure is None else closure()
            if not self._is_held:
                raise Misuse(f"expected losses before optimizer.step(), got none: {self._advice}")
            losses, self._last, self._is_held = self._last, None, False
            if losses is None:
                self._engine.empty_step()
            else:
                private(loss=losses)
            return result

        self._step, self._optimizer = private, optimizer
        if hasattr(private, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def close(self) -> None:
        """Restore the optimizer, and detach the engine."""
        self._optimizer.step = self._step  # type: ignore[method-assign]
        self._engine.detach()

    def begin(self, loader: PrivateLoader) -> None:
        """Take the next pieces from this loader, epoch after epoch.

        Args:
            loader: of the engine.
        """
        self._loader = loader
        self._drawn: Iterator[Any] = iter(())

    def take(self, turn: Turn) -> Iterator[Any]:
        """Yield the pieces that have samples of a logical batch in its last turn; `run` each before the next.

        Args:
            turn: of the framework's loop; stores its pieces.

        Raises:
            Misuse: the last logical batch had no step.
        """
        if turn.is_last and self._is_held:
            raise Misuse(
                "expected optimizer.step() after each logical batch, got the next one before it, so that its records "
                "would be left out: step each time; for larger batches raise the engine's batch_size"
            )
        while turn.is_last:
            piece = self._next()
            turn.pieces.append(piece)
            # all processes run a piece if they share parameters, or may communicate in the caller's loss
            alone = place()[1] == 1 or not len(self._engine.mask)
            if self._loader.is_empty and alone and not sharded_modules(self._engine.model):
                self._last, self._is_held = None, True
            else:
                yield piece
            if self._loader.is_last:
                return

    def _next(self) -> Any:
        for piece in self._drawn:
            return piece
        self._drawn = iter(self._loader)
        return next(self._drawn)

    def run(self, given: Any) -> bool:
        """Compute the losses of a piece; clip and add it, or hold the last one of its logical batch.

        Args:
            given: the piece as `losses_of` takes it.

        Returns:
            Whether a program computed them.
        """
        plain_given = dict(given) if isinstance(given, Mapping) else given
        losses = None if is_followed(given) else self.programs.program(plain_given, None)
        is_program = losses is not None
        if losses is None:
            losses = self._losses_of(given)
        mine = plain(losses).detach()[self._engine.mask.to(losses.device)]
        self._sum, self._count = self._sum + mine.sum(), self._count + len(mine)
        if self._loader.is_last:
            self._last, self._is_held = losses, True
        else:
            self._step(loss=losses)
        return is_program

    def mean(self) -> Tensor | float:
        """Return the mean loss of a logical batch's own records, 0 without any, and reset it: not private."""
        found = self._sum / max(1, self._count)
        self._sum, self._count = 0.0, 0
        return found


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
