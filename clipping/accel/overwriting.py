"""Activation functions that overwrite their incoming gradient in the backward pass.

The gradient of an elementwise function y = f(x) is g f'(x). Writing it over g allocates no memory. On a CPU it is also
faster, most of all above 32 MiB: the C library requests such memory from the operating system each time, page by page.

No other node may use that gradient. A convolution, a product or a normalisation allocates a fresh input gradient
(`ANEW`); an addition passes its own gradient to both inputs, for example to a skip connection. `clipping.tape.graph`
finds which nodes pass gradients to which. A node is `alone` only if every node that passes it a gradient allocates
that gradient, and only in a backward pass from the losses, as another pass may include other nodes.

Functions take:
    kind: the type of a node.
"""

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from clipping.accel.chunked_conv import Pieces
from clipping.numerics.per_thread import PerThread
from clipping.provenance.derived_parameters import methods

LEAST = 4 * 2**20
"""Least bytes of an activation to overwrite; for smaller ones a Python node takes more time than it saves."""
_least = PerThread(LEAST)
aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation function.

    Attributes:
        forward: x, options -> y.
        backward: (g, saved tensor, *arguments, options) -> gradient, with an overload that writes to `grad_input`.
        keeps_output: the saved tensor is y; else x.
        arguments: further arguments of `backward`.
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
    """An activation function. Its node overwrites the incoming gradient if it owns it exclusively (`alone`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, options: dict[str, Any], in_place: bool) -> Tensor:
        if in_place:
            ctx.mark_dirty(x)
        y = torch.relu_(x) if in_place else activation.forward(x, **options)
        ctx.save_for_backward(y if activation.keeps_output else x)
        ctx.activation, ctx.options, ctx.output = activation, options, lambda: None
        ctx.alone = False
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (kept,), activation = grads, ctx.saved_tensors, ctx.activation
        given = (g, kept, *activation.arguments)
        if ctx.alone and not torch.is_grad_enabled() and _alike(g, kept):
            found = activation.backward.grad_input(*given, **ctx.options, grad_input=g)
        else:
            found = activation.backward.default(*given, **ctx.options)
        return found, None, None, None


def _alike(g: Tensor, x: Tensor) -> bool:
    """True if g is dense and has the layout of x."""
    dense = g.is_contiguous() or (g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last))
    return dense and g.shape == x.shape and g.stride() == x.stride() and g.dtype == x.dtype


_NODE: Any = Overwriting._backward_cls
_PIECES: Any = Pieces._backward_cls


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that reads no parameter; a large activation function becomes `Overwriting`."""
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
        and x.numel() * x.itemsize >= _least.value
        and x.is_floating_point()
        and torch.is_grad_enabled()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and get_proxy_mode() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def of_any_size() -> AbstractContextManager[Any]:
    """Context that treats small activations as large ones, so that verification runs the same code as training."""
    return _least.set(0)


PRODUCTS = {"Convolution", "MkldnnConvolution", "Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear", "Mul"}
NORMS = {"NativeGroupNorm", "NativeLayerNorm", "NativeBatchNorm"}
ANEW = {f"{name}Backward0" for name in PRODUCTS | NORMS | {"MaxPool2DWithIndices", "AvgPool2D"}}
"""Names of torch's nodes that allocate fresh input gradients. A custom function's node has no number in its name."""
MOVES = {"View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Unsqueeze", "Squeeze", "Permute"}
VIEWS = {f"{name}Backward{number}" for name in MOVES for number in range(3)}
"""Names of torch's nodes that pass on a view of their incoming gradient."""


@functools.cache
def makes_anew(kind: Any) -> bool:
    """True if nodes of this type allocate fresh input gradients."""
    return kind in (_NODE, _PIECES) or kind.__name__ in ANEW


@functools.cache
def is_followed(kind: Any) -> bool:
    """True if `alone` must know which nodes pass a gradient to nodes of this type."""
    return kind is _NODE or kind.__name__ in VIEWS


def alone(leads: dict[Any, list[Any]]) -> list[Any]:
    """Return the nodes that exclusively own their incoming gradient.

    Args:
        leads: for each node that `is_followed`, the nodes that pass it a gradient.
    """

    def owns(node: Any) -> bool:
        kinds: list[tuple[Any, Any]] = [(type(each), each) for each in leads[node]]
        return all(makes_anew(kind) or (is_followed(kind) and each in leads and owns(each)) for kind, each in kinds)

    found = []
    for node in leads:
        if type(node) is _NODE:
            output = node.output()
            hooked = output is not None and bool(output._backward_hooks)  # hooks may keep their gradient
            found += [] if hooked or not owns(node) else [node]
    return found
