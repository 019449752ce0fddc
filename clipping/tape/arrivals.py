"""Run the backward pass for activation gradients alone, and check that each use's gradient arrives exactly once.

The backward pass needs something to differentiate with respect to. If an operation's own input needs no gradient (the
first layer, an embedding), its output is tied to a zero scalar, the anchor. The gradient with respect to the anchors
runs through every use and computes no weight gradient, as autograd computes only the inputs on the path. Gradients are
also requested directly for copies of tensors made of parameters, and for leaves that the model made (a hidden state
that requires a gradient).

Each use has a hook before the node that its output comes from. The hook receives the output's gradient before any
in-place change. Module hooks and custom functions fail if an in-place ReLU follows.

A hook of the model's may run a backward pass within this one, as a deep equilibrium layer solves for its gradient. What
arrives in that pass is no gradient of the losses. A hook may also remove itself, or write to what it holds: each pass
of a step begins with the hooks, and with what they hold, as the first pass found them.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipping.core.dtypes import without_autocast
from clipping.rules.base import Refused
from clipping.tape.uses import Use

Arrival = Callable[[Use, Tensor], None]


class Arrivals:
    """Tracks the gradients of the uses of one forward pass.

    Attributes:
        by_hand: called when a gradient arrives in a backward pass that `run` did not start, such as the user's.
        expected: the uses whose gradient must arrive.
        graph: number of the losses' graph; see `clipping.tape.graph`.
        hooks: of activations.
        state_of: returns the present state of hooks, and of the modules' backward hooks, to restore.
    """

    def __init__(self) -> None:
        self.by_hand: Callable[[], None] | None = None
        self.expected: list[Use] = []
        self.graph = 0
        self.hooks: list[Any] = []
        self.state_of: Callable[[list[Any]], Any] | None = None
        self._begin: Any = None
        self._anchors: dict[torch.device, Tensor] = {}
        self._copies: list[tuple[Use, Tensor]] = []
        self._leaves: list[Tensor] = []
        self._alone: list[Any] = []
        self._hooks: list[Any] = []
        self._arrived: Counter[Use] = Counter()
        self._arrival: Arrival | None = None
        self._pass = -1  # autograd's number of the backward pass of `run`

    def anchor(self, device: torch.device) -> Tensor:
        """Return a zero scalar to tie outputs to."""
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def hook(self, use: Use) -> None:
        """Register a hook for the gradient of a use."""
        (node, at), use.arrives = use.arrives, (None, 0)
        copies, use.copies = use.copies, None
        if copies is not None:
            self._copies.append((use, copies))
        if copies is None or self.by_hand is not None:
            with suppress(RuntimeError):  # torch 2.11: the node is freed, and no gradient reaches it
                self._hooks.append(node.register_prehook(partial(self._reached, use, at)))

    def expect(self, uses: list[Use], leaves: list[Tensor], graph: int, alone: list[Any]) -> None:
        """State the uses and leaves in the graph of the losses. Each use's gradient must arrive exactly once.

        Args:
            graph: number of the graph.
            alone: its activation functions that may overwrite the gradient that they receive.
            leaves: leaves of the graph that are no parameters, such as anchors; some uses may be reachable only
                through them.
        """
        self.expected, self.graph, self._leaves, self._alone = uses, graph, leaves, alone

    def run(self, losses: Tensor, arrival: Arrival, *, retain_graph: bool = True) -> None:
        """Backpropagate Σ_i ℓ_i, and call `arrival(use, g)` for each use whose gradient arrives. Keeps the hooks."""
        self._arrival = arrival
        self._arrived.clear()
        if retain_graph or self._begin is not None:
            self.begin()
        try:
            uses, copies = zip(*self._copies, strict=True) if self._copies else ((), ())
            wanted = list(dict.fromkeys((*copies, *self._anchors.values(), *self._leaves)))
            if wanted and losses.requires_grad:
                for node in self._alone:
                    node.alone = True
                total: Any = losses.sum()
                total.grad_fn.register_prehook(self._begun)
                found = torch.autograd.grad(total, wanted, retain_graph=retain_graph, allow_unused=True)
                with torch.no_grad():
                    for at, use in enumerate(uses):
                        self._arrive(use, at, found)
        finally:
            self._arrival = None
            for node in self._alone:  # a backward pass of the caller's may include other nodes
                node.alone = False

    def begin(self) -> None:
        """Prepare one of several passes through a graph: restore the model's hooks, and what they hold."""
        if self._begin is not None:
            self._begin.restore()
        elif self.state_of is not None:
            self._begin = self.state_of(self.hooks)

    def require_complete(self) -> None:
        """Check after `run` that all gradients have arrived.

        Raises:
            Refused: the gradient of an expected use has not arrived exactly once.
        """
        for use in self.expected:
            if self._arrived[use] != 1:
                raise Refused(
                    f"the gradient of {use.operation} with {', '.join(use.names)} arrived {self._arrived[use]} times, "
                    "expected once",
                    "use microbatch or vmap, and please report the model",
                )

    def close(self) -> None:
        """Remove the hooks, and free the references to the graph."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._copies.clear()
        self._leaves.clear()
        self._alone.clear()

    def _begun(self, _: Any) -> None:
        self._pass = torch._C._current_graph_task_id()

    def _reached(self, use: Use, at: int, gradients: tuple[Tensor | None, ...]) -> None:
        if self._arrival is None or torch._C._current_graph_task_id() == self._pass:  # else a pass within a hook
            self._arrive(use, at, gradients)

    def _arrive(self, use: Use, at: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Record the arrival of the gradient with index `at`; None is a zero gradient, as is one without entries."""
        g = gradients[at]
        if self._arrival is not None:
            self._arrived[use] += 1
            if g is not None and g.numel():
                with without_autocast():
                    self._arrival(use, g if g.shape == use.output.shape else g.reshape(use.output.shape))
        elif g is not None and self.by_hand is not None:
            self.by_hand()


class Anchored(torch.autograd.Function):
    """Identity in its first argument, in place or as a copy; the anchor's gradient is None."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, in_place: bool) -> Tensor:
        if not in_place:
            return output.clone()
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None
