"""The backward pass of a tape: for activation gradients alone, and each use's must arrive exactly once.

It must have something to differentiate by. Where an operation's own input needs no gradient (the first layer, an
embedding), its output is tied to a zero scalar, the anchor: the gradient with respect to the anchors runs through every
use and computes no weight gradient. (autograd asks each node only for the inputs that lie on the way.) What is made of
parameters alone, a copy for each sample, is asked for itself; so is a leaf that the model made, a hidden state that it
said requires a gradient.

A use gets a hook before the node of the graph that its output comes from, which is handed the gradient of the output as
it was before any in-place change: there module hooks and custom functions fail on an in-place ReLU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import without_autocast
from clipping.numerics import kernels
from clipping.rules.base import Refused
from clipping.tape.uses import Noted, Use

Arrival = Callable[[Use, Tensor], None]


class Arrivals:
    """Of the gradients of the uses of one forward pass.

    Attributes:
        by_hand: called when a gradient arrives in a backward pass that is not run here.
        graph: the number of the losses' graph; see `clipping.tape.graph`.
    """

    def __init__(self) -> None:
        self.by_hand: Callable[[], None] | None = None
        self.graph = 0
        self._anchors: dict[torch.device, Tensor] = {}
        self._copies: list[tuple[Use, Tensor]] = []
        self._leaves: list[Tensor] = []
        self._hooks: list[Any] = []
        self._expected: dict[Use, list[str]] | None = None
        self._arrived: Counter[Use] = Counter()
        self._arrival: Arrival | None = None

    def anchor(self, device: torch.device) -> Tensor:
        """A zero scalar to tie outputs to.

        Args:
            device: of the outputs.
        """
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def hook(self, use: Use, noted: Noted) -> None:
        """The gradient of this use is to arrive.

        Args:
            use: whose gradient it is.
            noted: where the gradient is to be had.
        """
        if noted.copies is not None:
            self._copies.append((use, noted.copies))
        if noted.copies is None or self.by_hand is not None:
            with suppress(RuntimeError):  # of a node that is gone, to torch 2.11: no gradient reaches it
                self._hooks.append(noted.node.register_prehook(partial(self._hooked, use, noted.at)))

    def expect(self, uses: list[Use], leaves: list[Tensor], graph: int) -> None:
        """What the graph of the losses has: uses, the gradient of each of which must arrive exactly once; leaves that
        are no parameters, and which uses may be led to by alone; and its number.

        Args:
            uses: in the graph of the losses.
            leaves: of that graph, no parameters.
            graph: its number.
        """
        anchors = {id(anchor) for anchor in self._anchors.values()}
        self._leaves = [leaf for leaf in leaves if id(leaf) not in anchors]
        self._expected = {use: [name for source, _ in use.rules for name in source.parameters] for use in uses}
        self.graph = graph

    def run(self, losses: Tensor, arrival: Arrival, *, retain_graph: bool = True) -> None:
        """Backward of Σ_i ℓ_i: `arrival(use, g)` for each use whose gradient arrives. The hooks stay.

        Args:
            losses: ℓ [B], with their graph.
            arrival: called as arrival(use, g), g of the shape of the use's output.
            retain_graph: for another backward pass.
        """
        self._arrival = arrival
        self._arrived.clear()
        try:
            uses = [use for use, _ in self._copies]
            wanted = [*(copies for _, copies in self._copies), *self._anchors.values(), *self._leaves]
            if wanted and losses.requires_grad:
                with kernels.overwriting.from_losses():
                    found = torch.autograd.grad(losses.sum(), wanted, retain_graph=retain_graph, allow_unused=True)
                with torch.no_grad():
                    for use, g in zip(uses, found, strict=False):
                        self._arrive(use, None if g is None else g.reshape(use.output.shape))
        finally:
            self._arrival = None

    def require_complete(self) -> None:
        """After `run`.

        Raises:
            Refused: a use that was expected and whose gradient has not arrived once.
        """
        expected = self._expected
        if expected is None:
            return
        for use, names in expected.items():
            if self._arrived[use] != 1:
                raise Refused(
                    f"the gradient of {use.operation} with {', '.join(names)} arrived {self._arrived[use]} times, "
                    "expected once",
                    "use microbatch or vmap, and please report the model",
                )

    def close(self) -> None:
        """Take the hooks off, and let go of what leads to them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._copies.clear()
        self._leaves.clear()

    def _hooked(self, use: Use, at: int, gradients: tuple[Tensor | None, ...]) -> None:
        g = gradients[at]
        self._arrive(use, g if g is None or g.shape == use.output.shape else g.reshape(use.output.shape))

    def _arrive(self, use: Use, g: Tensor | None) -> None:
        """None: a gradient that is zero."""
        if self._arrival is not None:
            self._arrived[use] += 1
            if g is not None:
                with without_autocast(g.device):
                    self._arrival(use, g)
        elif g is not None and self.by_hand is not None:
            self.by_hand()


class Anchored(torch.autograd.Function):
    """Identity on its first argument, in place, so that it costs nothing; the zero scalar's gradient is none at all."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class AnchoredCopy(torch.autograd.Function):
    """The same with a copy of its first argument."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
