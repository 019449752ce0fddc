"""Recover per-sample gradients from `loss.backward()` of a loss over the batch.

Opacus' loops reduce the loss themselves: L = (1/B) Σ_i ℓ_i(o_i), o_i the model's outputs for sample i. In training the
model returns equal tensors with another graph, which records the gradient v_i = ∂L/∂o_i. As o_i depends on sample i
alone,

    ∂ℓ_i/∂θ = (∂o_i/∂θ)ᵀ B v_i = ∂/∂θ ⟨o_i, B v_i⟩,    v_i held fixed,

so the engine receives the losses ⟨o_i, B v_i⟩ (⟨o_i, v_i⟩ for a sum). Their gradients are the samples' own if v_i
depends on sample i alone, which `dpbench.integrations.opacus.loss_check` checks.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from clipping.core.autograd import nodes
from clipping.core.batches import leading_dimension, map_tensors, tensors_of
from dpbench.engine import Misuse
from dpbench.engine.recorder import Hook
from dpbench.engine.trace import is_followed, plain
from dpbench.integrations.opacus.inner_loss import MANY, LossInside, depends_on
from dpbench.integrations.opacus.loss_check import Look

FIRST, RATE, KNOWN = 3, 1 / 200, 32
"""Number of first batches to check, share of later ones, and number of losses to distinguish."""
ACCUMULATION = (
    "expected optimizer.step() after each backward(), got another batch before it: gradients of several batches are "
    "not accumulated; take a larger batch_size, and BatchMemoryManager(max_physical_batch_size=...) for its pieces"
)


class Cut:
    """One forward pass: its outputs with their graph, and the gradient of each.

    Args:
        batch_size: B.
        ran: called with the nodes of each backward pass that reaches it.

    Attributes:
        outputs: [B·k, ...] each.
        gradients: of each output, summed over backward passes; None without one.
        passes: autograd's numbers of the backward passes that reached it.
    """

    def __init__(self, batch_size: int, ran: Callable[[tuple[str, ...]], None]) -> None:
        self.batch_size, self._ran = batch_size, ran
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.passes: set[int] = set()
        self._leaves: list[Tensor] = []
        self._done = False

    def take(self, x: Tensor) -> Tensor:
        """Return an equal tensor with its own graph.

        Args:
            x: an output of the model, [B, ...].
        """
        self.outputs.append(x)
        self.gradients.append(None)
        place = len(self.outputs) - 1

        def arrived(gradient: Tensor) -> None:
            if self._done:
                raise Misuse(
                    "expected a loss inside of the model beside its outputs, got one that they are computed from: "
                    "compute the loss outside of the model, from its logits"
                )
            before = self.gradients[place]
            self.gradients[place] = gradient if before is None else before + gradient
            number = torch._C._current_graph_task_id()
            if number not in self.passes:
                self.passes.add(number)
                self._ran(_running(self.anchors))

        handed, anchor = _handed(x, arrived)
        self._leaves.append(anchor)
        return handed

    @property
    def anchors(self) -> set[int]:
        """Identities of the leaves of the returned tensors' graphs."""
        return {id(anchor) for anchor in self._leaves}

    def losses(self, scale: float) -> Tensor:
        """[B]: Σ over the outputs of ⟨o_i, scale · v_i⟩. Later gradients are refused.

        Args:
            scale: of the gradients.
        """
        self._done = True
        found = [
            (output * (gradient * scale).to(output.dtype)).reshape(self.batch_size, -1).sum(1)
            for output, gradient in zip(self.outputs, self.gradients, strict=True)
            if gradient is not None
        ]
        return torch.stack([each.to(found[0]) for each in found]).sum(0)


class Outputs:
    """Replaces a model's outputs by equal tensors with a graph of their own; turns their gradients into losses [B].

    In some batches it checks the loss (`loss_check`).

    Args:
        model: the engine records its forward passes already.
        mean: the loss is a mean over the batch; else a sum.
        forget: called when forward passes are dropped without a step.
    """

    def __init__(self, model: nn.Module, mean: bool, forget: Callable[[], None]) -> None:
        self._model, self._mean, self._forget = model, mean, forget
        self._cuts: list[Cut] = []
        self._cut: Cut | None = None
        self._inside: LossInside | None = None
        self._first, self._random = FIRST, random.Random(0)
        self._graphs: set[tuple[str, ...]] = set()
        self._look: Look | None = None
        self._by_loader = False
        self._handles = [  # outside of the engine's hooks
            model.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True),
            model.register_forward_hook(Hook(self._after), with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks, and drop the gradients."""
        for handle in self._handles:
            handle.remove()
        self._see(None)
        self._cuts.clear()

    def batch(self, batch: Any) -> Any:
        """Return the loader's next batch; if it is checked, its tensors record the operations on them.

        Args:
            batch: of the loader.
        """
        self._see(self._due())
        self._by_loader = True
        return batch if self._look is None else self._look.batch(batch)

    @property
    def pending(self) -> bool:
        """Whether there is a backward pass without a step."""
        return any(cut.passes for cut in self._cuts)

    def clear(self) -> None:
        """Drop the gradients, for `zero_grad()`; forward passes without a backward pass stay."""
        if self.pending:
            self._cuts.clear()
            self._see(None)
            self._forget()

    def take(self) -> Tensor:
        """Return the losses [B] of the batch, with their graph, and drop its record.

        Raises:
            Misuse: no backward pass, or several batches.
            UnsupportedModel: the gradient of a sample's loss depends on other samples.
        """
        everything, self._cuts = self._cuts, []
        try:
            return self._losses(everything, self._look)
        finally:
            for cut in everything:  # the caller's loss may keep the cut alive
                cut.outputs.clear()
            self._see(None)

    def _losses(self, everything: list[Cut], look: Look | None) -> Tensor:
        cuts = [cut for cut in everything if cut.passes]
        if not cuts:
            raise Misuse(
                "expected loss.backward() of a forward pass in training mode before optimizer.step(), got no gradient "
                "at the model's outputs"
            )
        if len({cut.batch_size for cut in cuts}) > 1 or not set.intersection(*(cut.passes for cut in cuts)):
            raise Misuse(ACCUMULATION)
        batch_size = cuts[0].batch_size
        if look is not None:
            arrived = [gradient for cut in everything for gradient in cut.gradients]
            look.judge(arrived, batch_size, mean=self._mean)
            if look.done and self._first > 0:
                self._first -= 1
        if batch_size == 0:
            return torch.zeros(0)
        scale = float(batch_size) if self._mean else 1.0
        parts = [cut.losses(scale) for cut in cuts]
        return torch.stack([part.to(parts[0]) for part in parts]).sum(0)

    def _due(self) -> Look | None:
        """A check for the next batch, or None."""
        return Look(self._model) if self._random.random() < RATE or self._first > 0 else None

    def _see(self, look: Look | None) -> None:
        if self._look is not None:
            self._look.close()
        self._look, self._by_loader = look, False

    def _ran(self, nodes: tuple[str, ...]) -> None:
        """Request one more check after a backward pass of a new kind: the nodes between loss and outputs, by name."""
        if nodes not in self._graphs and len(self._graphs) < KNOWN:
            self._graphs.add(nodes)
            self._first = max(self._first, 1)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_training(module, self._model):
            self._begin(args, kwargs)
            if self._look is not None:
                self._look.read(args, kwargs)
        return map_tensors(plain, (args, kwargs)) if is_followed((args, kwargs)) else None

    def _begin(self, args: Any, kwargs: Any) -> None:
        refuse_trained(args, kwargs)
        if self.pending:
            raise Misuse(ACCUMULATION)
        if not self._by_loader and not self._cuts:  # the caller's own batch
            self._see(self._due())
        self._leave()  # an interrupted forward pass
        self._cut = Cut(leading_dimension(args, kwargs), self._ran)
        if "labels" in kwargs:
            reduction = "mean" if self._mean else "sum"
            self._inside = LossInside(self._cut.batch_size, partial(self._taken_off, self._cut), reduction)
            self._inside.__enter__()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not in_training(module, self._model):
            return None
        cut = self._cut
        self._leave()
        if output is None or cut is None:
            return None
        inside = len(cut.outputs)
        found = map_tensors(lambda x: self._output(cut, plain(x), inside > 0), output)
        if cut.outputs:
            self._cuts.append(cut)
        return found

    def _leave(self) -> None:
        inside, self._inside, self._cut = self._inside, None, None
        if inside is not None:
            inside.__exit__(None, None, None)

    def _output(self, cut: Cut, x: Tensor, inside: bool) -> Tensor:
        empty = cut.batch_size == 0
        if not x.is_floating_point() or not (x.requires_grad or empty):
            return x
        if not x.dim() or x.shape[0] != cut.batch_size:
            if inside and depends_on(x, cut.anchors):
                return x if self._look is None else self._look.noted(x)
            return _handed(x, _barred(list(x.shape), cut.batch_size))[0]
        return self._taken_off(cut, x)

    def _taken_off(self, cut: Cut, x: Tensor) -> Tensor:
        handed = cut.take(x)
        return handed if self._look is None else self._look.begun(handed)


def in_training(module: nn.Module, model: nn.Module) -> bool:
    """Whether this forward pass is one of the model itself in training.

    Args:
        module: runs; a copy of the model shares its hooks.
        model: of the engine.
    """
    return module is model and module.training and torch.is_grad_enabled()


def refuse_trained(args: Any, kwargs: Any) -> None:
    """Raise a Misuse for inputs that require a gradient, as it would end at the model's outputs.

    Args:
        args, kwargs: the model's inputs.
    """
    if any(x.requires_grad for x in tensors_of((args, kwargs))):
        raise Misuse(
            "expected inputs that need no gradient, got some of another trained model, whose gradient would end here: "
            "detach() them, or for a gradient of inputs call model.eval(), and optimizer.zero_grad() after it"
        )


def barred(args: Any, kwargs: Any, output: Any) -> Any:
    """The output of a model, with scalars that refuse a backward pass: they are losses of the whole batch.

    Args:
        args, kwargs: the model's inputs.
        output: the model's output.
    """
    size = leading_dimension(args, kwargs)
    return map_tensors(lambda x: x if x.dim() or not x.requires_grad else _handed(x, _barred([], size))[0], output)


class _Handed(torch.autograd.Function):
    """A copy of a tensor in a graph of its own, which reports its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: list[Tensor], arrived: Callable[[Tensor], None]) -> Tensor:
        ctx.arrived = arrived
        return x[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.arrived(gradient.detach())
        return None, None, None


def _handed(x: Tensor, arrived: Callable[[Tensor], None]) -> tuple[Tensor, Tensor]:
    """An equal tensor, and the leaf of its graph."""
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    return _Handed.apply(anchor, [x], arrived), anchor


def _running(anchors: set[int]) -> tuple[str, ...]:
    """Names of the nodes of the backward pass that ends at these leaves; on a GPU it calls hooks in other threads.

    Args:
        anchors: identities of the leaves.
    """
    for started in sys._current_frames().values():
        frame: Any = started
        while frame is not None:
            loss = frame.f_locals.get("self")
            if frame.f_code.co_name == "backward" and isinstance(loss, Tensor) and loss.grad_fn is not None:
                graph = list(islice(nodes([loss.grad_fn]), MANY))
                if len(graph) == MANY or any(id(getattr(node, "variable", None)) in anchors for node in graph):
                    return tuple(node.name() for node in graph)
            frame = frame.f_back
    return ()


def _barred(shape: list[int], batch_size: int) -> Callable[[Tensor], None]:
    def arrived(gradient: Tensor) -> None:
        raise Misuse(
            f"expected a loss of outputs [{batch_size}, ...] with the samples first, got one of an output {shape}, in "
            "which samples are mixed already: compute the loss outside of the model, from its logits (that of labels= "
            "inside is taken in hooks mode if it is F.cross_entropy of as many labels of each sample, unweighted)"
        )

    return arrived
