"""A whole step in one call: forward pass, clipping, noise and optimizer, for a known loss function.

If the caller runs the forward pass, autograd and the tape work between its operations. Here none of the caller's code
runs in between, so all but noise and optimizer can be one program (`clipping.program.graphs`). It clips, adds noise and
counts as `optimizer.step(loss=losses)` does; only the computation of the sum differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipping.core.batches import forward, leading_dimension
from clipping.core.types import ClippedGradient, LossFunction, Parameters, UnsupportedModel
from clipping.program.graphs import Compile, Graphs
from clipping.program.step import Batch
from dpbench.engine.errors import Misuse
from dpbench.engine.release import masked, only_real

if TYPE_CHECKING:
    from dpbench.engine.engine import PrivacyEngine


class WholeStep:
    """step(inputs, targets) -> losses [B], detached, 0 for padding; moves the parameters, or accumulates a piece.

    Args:
        engine: attached to an optimizer.
        loss_fn: loss_fn(outputs, targets) -> [B].
        compile: run steps as programs where that is faster: True raises if a step cannot be one, "auto" runs it
            eagerly.

    Raises:
        ValueError: `compile` is True, and the backend or the model does not allow a program.
    """

    def __init__(self, engine: PrivacyEngine, loss_fn: LossFunction, *, compile: Compile) -> None:
        self._engine, self._loss_fn = engine, loss_fn
        self._code: Any = loss_fn  # the caller's, whose state is part of a step
        backend = engine._recorder.backend
        self.graphs = backend.use_graphs(self._losses_of, compile, timing=engine.timing, lends=True)

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Step one physical batch, from a `data_loader` or the caller.

        Raises:
            Misuse: as `optimizer.step` does.
        """
        engine = self._engine
        step: Any = engine._attached().optimizer.step
        try:
            inputs, targets = engine._recorder.own((inputs, targets))
            losses = self.program(inputs, targets)
        except UnsupportedModel as error:  # `step` raises it, so that all processes end this step
            losses = torch.zeros(len(self._real_samples(inputs, leading_dimension(inputs, targets))))
            engine._recorder.hand_over(losses, error)
        if losses is None:
            with engine._recorder.knowing(self._loss_fn, targets):
                outputs = forward(engine.model, inputs)
                with engine._recorder.of_loss(targets):
                    losses = self._loss_fn(outputs, targets)
        ticket = engine._tickets.current
        step(loss=losses)
        return losses.detach() if ticket is None else masked(losses.detach(), ticket.real, ticket.handed)

    def program(self, inputs: Any, targets: Any) -> Tensor | None:
        """Run a program, and return the losses [B] to step next; None if nothing ran and the step must run eagerly."""
        self._engine._recorder.backend.moving.loss_fn = self._code
        if self.graphs is None or self._engine._recorder.is_refused:
            return None
        size = leading_dimension(inputs, targets)
        if not size:
            return None
        gradient: ClippedGradient | Exception | None
        try:
            gradient = self._by_graph(self.graphs, inputs, targets, size)
        except Exception as error:  # `step` raises it, so that all processes end this step
            gradient = error
        if gradient is None:
            return None
        losses = gradient.losses if isinstance(gradient, ClippedGradient) else torch.zeros(size)
        self._engine._recorder.hand_over(losses, gradient)
        return losses

    def _by_graph(self, graphs: Graphs, inputs: Any, targets: Any, size: int) -> ClippedGradient | None:
        """Σ_i c_i g_i of the data's own samples; None if the step must be recorded instead."""
        engine, recorder = self._engine, self._engine._recorder
        if not (engine.model.training and torch.is_grad_enabled()):
            return None
        parameters: Parameters = {n: p for n, p in recorder.backend.members().items() if p.requires_grad}
        with recorder.paused(), torch.enable_grad():
            found = graphs(Batch(parameters, inputs, (targets, self._real_samples(inputs, size)), size))
        if graphs.is_new:
            recorder.insist()
        return found

    def _real_samples(self, inputs: Any, size: int) -> Tensor:
        """[B] bool: True for the data's own samples, False for the loader's padding."""
        tickets = self._engine._tickets
        tickets.read(inputs, size, False)
        ticket, device = tickets.current, next(self._engine.model.parameters()).device
        if ticket is None:
            return torch.ones(size, dtype=torch.bool, device=device)
        if ticket.handed != size:
            raise Misuse(f"expected the {ticket.handed} samples that data_loader handed out, got {size}")
        return torch.arange(size, device=device) < ticket.real

    def _losses(self, inputs: Any, targets: Any) -> Tensor:
        return self._loss_fn(forward(self._engine.model, inputs), targets)

    def _losses_of(self, inputs: Any, targets: Any) -> Tensor:
        """ℓ [B], 0 for padding. `targets` is (targets of the loss, [B] bool that is False for padding)."""
        targets, real = targets
        return only_real(self._losses(inputs, targets), real)


class Programs(WholeStep):
    """The programs of a framework's loop, which computes losses and steps in separate places.

    Args:
        engine, compile: as in `WholeStep`.
        losses_of: batch -> [B]: forward pass and loss.
    """

    def __init__(self, engine: PrivacyEngine, losses_of: Callable[[Any], Tensor], *, compile: Compile) -> None:
        super().__init__(engine, lambda outputs, targets: outputs, compile=compile)
        self._of_batch = self._code = losses_of

    def _losses(self, inputs: Any, targets: Any) -> Tensor:
        return self._of_batch(inputs)
