"""The tape: every use of a trainable parameter in a forward pass, found at the level of operations.

Modules are the wrong unit: one weight may be used twice, by a function, or outside the module that owns it. A
TorchFunctionMode sees each operation that has a trainable parameter among its arguments, whoever calls it. For each the
tape runs the operation by its handler (`clipping.rules`), keeps the rules of its parameters, and puts a tensor hook on
the output. The hook is handed the gradient of the output as it was before any in-place change, which is where module
hooks and custom functions fail on an in-place ReLU.

A backward pass for activation gradients alone must have something to differentiate by. Where an operation's own input
needs no gradient (the first layer, an embedding), its output is tied to a zero scalar, the anchor: the gradient with
respect to the anchors runs through every use and computes no weight gradient. (autograd asks each node only for the
inputs that lie on the way.)

Limits, each refused with its reason: a parameter read by an operation without a rule, an output without the batch as
its first dimension, a parameter read behind the tape's back (a custom autograd function, a compiled module).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipping.interface import Parameters, Problem
from clipping.rules import HANDLERS, Refused, Rule

Arrival = Callable[["Use", Tensor], None]


@dataclass(eq=False)
class Use:
    """One operation on trainable parameters: its name, and for each parameter (by name) the rule of its gradient."""

    operation: str
    rules: dict[str, Rule]


class Tape(TorchFunctionMode):
    """Records the uses of `parameters` while it is active.

    Args:
        parameters: the trainable parameters by name.
        batch_size: B, which every recorded output must have as its first dimension.

    Attributes:
        uses: in the order of the forward pass.
        counts: parameter name -> number of uses.
        problems: what has no exact rule; the forward pass goes on, so that all of it is listed.
    """

    def __init__(self, parameters: Parameters, batch_size: int) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[Problem] = []
        self._batch_size = batch_size
        self._names = {id(p): name for name, p in parameters.items()}
        self._anchors: dict[torch.device, Tensor] = {}
        self._hooks: list[Any] = []
        self._arrival: Arrival | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [self._names[i] for i in _ids(args, kwargs) if i in self._names]
        if not touched:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled():  # nothing that is computed here gets a gradient
            return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is None:
            output = func(*args, **kwargs)
            if _requires_grad(output):
                self._refuse(func, touched, "no exact rule for this operation", "freeze it, or use microbatch or vmap")
            return output
        try:
            output, rules = handler(*args, **kwargs)
        except Refused as refused:
            self._refuse(func, touched, refused.reason, refused.remedy)
            return func(*args, **kwargs)
        mine = {self._names[id(rule.parameter)]: rule for rule in rules if id(rule.parameter) in self._names}
        return self._record(func, touched, mine, output, args, kwargs)

    def squared_norm_pass(self, losses: Tensor, arrival: Arrival) -> None:
        """Backward of Σ_i ℓ_i for activation gradients only: `arrival(use, g)` for each use that the loss depends on.

        The graph is kept for a second pass; the hooks are gone when this returns.
        """
        self._arrival = arrival
        try:
            if self._anchors and losses.requires_grad:
                torch.autograd.grad(losses.sum(), list(self._anchors.values()), retain_graph=True, allow_unused=True)
        finally:
            self.close()

    def close(self) -> None:
        """Take the hooks off and let go of the activations."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._arrival = None

    def _record(
        self, func: Any, touched: list[str], rules: dict[str, Rule], output: Tensor, args: Any, kwargs: Any
    ) -> Any:
        if sorted(touched) != sorted(rules):
            others = sorted(set(touched) - set(rules)) or touched
            self._refuse(func, others, "is the input of the operation, not its weight", "use microbatch or vmap")
            return output
        if output.shape[:1] != (self._batch_size,) or output.dim() < 2:
            reason = f"its output {list(output.shape)} does not have the batch, {self._batch_size}, as first dimension"
            self._refuse(func, touched, reason, "give it one row a sample (batch first), or use microbatch or vmap")
            return output
        use = Use(_name(func), rules)
        self.uses.append(use)
        self.counts.update(rules.keys())
        source = args[0] if args else kwargs["input"]
        if not source.requires_grad:
            output = _Anchor.apply(output, self._anchor(output.device))
        self._hooks.append(output.register_hook(lambda g: self._arrived(use, g)))
        return output

    def _arrived(self, use: Use, g: Tensor) -> None:
        if self._arrival is not None:
            self._arrival(use, g)

    def _anchor(self, device: torch.device) -> Tensor:
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def _refuse(self, func: Any, names: list[str], reason: str, remedy: str) -> None:
        for name in names:
            self.problems.append(Problem(name, f"{_name(func)}: {reason}", remedy))


class _Anchor(torch.autograd.Function):
    """Identity on its first argument, in place, so that it costs nothing; the zero scalar gets a zero gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros((), device=grads[0].device)


def unrecorded(losses: Tensor, parameters: Parameters, counts: Counter[str]) -> list[Problem]:
    """Parameters that the loss's graph reads more often than the tape saw.

    Each recorded use is one edge into the parameter's gradient accumulator; one edge more is a use behind the tape's
    back, whose share would be missing from the norm.
    """
    names = {id(p): name for name, p in parameters.items()}
    edges: Counter[str] = Counter()
    stack, seen = [losses.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for child, _ in node.next_functions:
            name = names.get(id(getattr(child, "variable", None)))
            if name is not None:
                edges[name] += 1
            stack.append(child)
    return [
        Problem(
            name,
            f"is read {count} times, of which the tape saw {counts[name]}: a custom autograd function or compiled code",
            "take the parameter out of it, freeze it, or use microbatch or vmap",
        )
        for name, count in edges.items()
        if count > counts[name]
    ]


def _ids(args: Any, kwargs: Any) -> Iterator[int]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (tuple, list)):
            yield from (id(item) for item in value)
        else:
            yield id(value)


def _requires_grad(output: Any) -> bool:
    if isinstance(output, (tuple, list)):
        return any(_requires_grad(item) for item in output)
    return isinstance(output, Tensor) and output.requires_grad


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
