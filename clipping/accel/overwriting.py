"""Backward passes of activation functions that are written over the gradient they are handed.

The gradient of y = f(x), entry by entry, is g f'(x): each number of g is read once. Written in its place it takes no
memory, and on a CPU less time: a third of it where g is 16 MiB, a tenth above 32 MiB, which the C library takes from
the kernel anew each time, page by page.

It must be nobody else's. A convolution, a product or a normalisation makes the gradient of its input anew (`ANEW`); an
addition hands on the one that it was given itself, and a skip connection has that, too. Which nodes hand a gradient to
which the graph of the losses says (`clipping.tape.graph`): only where all that lead to it are known to make it anew is
it `alone`, and only in a backward pass from the losses, in which no other node leads to it.

Where a block of a ResNet begins, two gradients meet: that of its first convolution, and that of its skip connection or
of another convolution. The second one is formed in pieces and added to the first, in its memory
(`clipping.accel.gradient_accumulation`): it takes no memory of its own, and nothing is gone over once more.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from clipping.accel.chunked_conv import Pieces
from clipping.accel.gradient_accumulation import Meeting, alike
from clipping.rules.rewritten import methods

LEAST = 4 * 2**20
"""Bytes of an activation: of smaller ones a node in Python takes more time than it saves."""
_least: ContextVar[int] = ContextVar("least", default=LEAST)
_passes = threading.local()
aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation function.

    Attributes:
        forward: x, options -> y.
        backward: (g, what was kept, *arguments, options) -> the gradient, with an overload into `grad_input`.
        keeps_output: y is what was kept; else x.
        arguments: of the backward pass.
    """

    forward: Callable[..., Tensor]
    backward: Any
    keeps_output: bool
    arguments: tuple[Any, ...] = ()


RELU = Activation(torch.relu, aten.threshold_backward, True, (0,))
TANH = Activation(torch.tanh, aten.tanh_backward, True)
SIGMOID = Activation(torch.sigmoid, aten.sigmoid_backward, True)
GELU = Activation(F.gelu, aten.gelu_backward, False)
SILU = Activation(F.silu, aten.silu_backward, False)
ACTIVATIONS: dict[Any, Activation] = {
    **dict.fromkeys({F.relu, *methods("relu", "relu_")}, RELU),
    **dict.fromkeys(methods("tanh"), TANH),
    **dict.fromkeys(methods("sigmoid"), SIGMOID),
    F.gelu: GELU,
    F.silu: SILU,
}
IN_PLACE = methods("relu_")


class Overwriting(torch.autograd.Function):
    """An activation function.

    Its node is told whether the gradient that it is handed is nobody else's (`alone`), and where the one that it makes
    waits for another, or None (`meeting`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, options: dict[str, Any], in_place: bool) -> Tensor:
        if in_place:
            ctx.mark_dirty(x)
        y = torch.relu_(x) if in_place else activation.forward(x, **options)
        ctx.save_for_backward(y if activation.keeps_output else x)
        ctx.activation, ctx.options, ctx.output = activation, options, lambda: None
        ctx.alone, ctx.meeting = False, None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (kept,), activation = grads, ctx.saved_tensors, ctx.activation
        given = (g, kept, *activation.arguments)
        ours = getattr(_passes, "running", False) and not torch.is_grad_enabled()
        if ctx.alone and ours and alike(g, kept):
            found = activation.backward.grad_input(*given, **ctx.options, grad_input=g)
        else:
            found = activation.backward.default(*given, **ctx.options)
        if ctx.meeting is not None and ours:
            ctx.meeting.leave(found)
        return found, None, None, None


_NODE: Any = Overwriting._backward_cls
_PIECES: Any = Pieces._backward_cls


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation of data alone; a large activation function as one that overwrites.

    Args:
        func, args, kwargs: the operation, and what it is called with.
    """
    activation = ACTIVATIONS.get(func)
    if activation is None:
        return func(*args, **kwargs)
    options = dict(kwargs)
    x, *others = args or (options.pop("input"),)
    in_place = func in IN_PLACE or bool(options.pop("inplace", others[0] if others else False))
    if not _applies(x) or "out" in options or (in_place and (activation is not RELU or x._is_view() or x.is_leaf)):
        return func(*args, **kwargs)
    y = Overwriting.apply(x, activation, options, in_place)
    y.grad_fn.output = weakref.ref(y)
    return y


def _applies(x: Any) -> bool:
    return (
        type(x) in (Tensor, FakeTensor)
        and x.is_cpu
        and x.requires_grad
        and x.numel() * x.itemsize >= _least.get()
        and x.is_floating_point()
        and torch.is_grad_enabled()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and get_proxy_mode() is None
        and torch.autograd.forward_ad._current_level < 0
    )


@contextmanager
def from_losses() -> Iterator[None]:
    """In here backward passes start at the losses whose graph was looked at, in this thread."""
    _passes.running = True
    try:
        yield
    finally:
        _passes.running = False


@contextmanager
def of_any_size() -> Iterator[None]:
    """In here small activations are treated as large ones, so that what is verified is what runs."""
    before = _least.set(0)
    try:
        yield
    finally:
        _least.reset(before)


PRODUCTS = {"Convolution", "MkldnnConvolution", "Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear", "Mul"}
NORMS = {"NativeGroupNorm", "NativeLayerNorm", "NativeBatchNorm"}
ANEW = {f"{name}Backward0" for name in PRODUCTS | NORMS | {"MaxPool2DWithIndices", "AvgPool2D"}}
"""torch's nodes that make the gradient of each input anew, in memory that nobody else has.

A number ends their names alone: the node of a custom function has none, whatever that is called.
"""
MOVES = {"View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Unsqueeze", "Squeeze", "Permute"}
VIEWS = {f"{name}Backward{number}" for name in MOVES for number in range(3)}
"""Its nodes that hand on a view of the gradient that they are handed."""


@functools.cache
def makes_anew(kind: Any) -> bool:
    """Whether nodes of this type make the gradients that they hand on anew.

    Args:
        kind: the type of a node.
    """
    return kind in (_NODE, _PIECES) or kind.__name__ in ANEW


@functools.cache
def is_followed(kind: Any) -> bool:
    """Whether it matters of nodes of this type what hands them their gradient.

    Args:
        kind: the type of a node.
    """
    return _hands_on(kind) or _is_sum(kind)


@functools.cache
def _hands_on(kind: Any) -> bool:
    """To one node alone."""
    return kind is _NODE or kind.__name__ in VIEWS


def _is_sum(kind: Any) -> bool:
    return kind.__name__ == "AddBackward0"


def overwrites(node: Any) -> bool:
    """Whether a node works in the memory of the gradient that it is handed.

    Args:
        node: of the graph.
    """
    return type(node) is _NODE and node.alone


def adds(node: Any) -> bool:
    """Whether a node adds its gradient to one that waits for it, or that one to it.

    Args:
        node: of the graph.
    """
    return type(node) is _PIECES and node.meeting is not None


def note_alone(leads: dict[Any, list[Any]]) -> None:
    """Note of each node whose gradient is nobody else's that it is so, and of gradients that are added where they meet.

    Args:
        leads: of each node that is followed, the nodes that hand it its gradient.
    """

    def alone(node: Any) -> bool:
        kinds: list[tuple[Any, Any]] = [(type(each), each) for each in leads[node]]
        return all(makes_anew(kind) or (_hands_on(kind) and each in leads and alone(each)) for kind, each in kinds)

    for node in leads:
        if type(node) is _NODE:
            output = node.output()
            hooked = output is not None and bool(output._backward_hooks)  # which may keep what they are handed
            summed = _note_meeting(leads[node], leads)
            node.alone = not hooked and (summed or alone(node))


def _note_meeting(makers: list[Any], leads: dict[Any, list[Any]]) -> bool:
    """Of the two nodes that hand another its gradient. Whether their sum is nobody else's, whatever they hand on.

    Two convolutions, where a stage of a ResNet begins: the first leaves its gradient to the second. Or a convolution
    and the sum at the end of its block, which hands on to the skip connection what the activation after it made.
    """
    convolutions: list[Any] = [each for each in makers if type(each) is _PIECES]
    if len(makers) != 2 or not convolutions:
        return False
    others = [each for each in makers if each not in convolutions]
    first: list[Any] = [_hands_to(each, leads) for each in others]
    if None in first:
        return False
    meeting = Meeting()
    for node in convolutions + first:
        node.meeting = meeting
    return True


def _hands_to(node: Any, leads: dict[Any, list[Any]]) -> Any:
    """The activation function whose gradient a sum hands on as it is; None if it is no such sum."""
    if not _is_sum(type(node)) or node._saved_alpha != 1 or len(leads.get(node, ())) != 1:
        return None
    (activation,) = leads[node]
    return activation if type(activation) is _NODE else None
