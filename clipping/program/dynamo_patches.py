"""Patch TorchDynamo to capture three constructs that it refuses, to guard more, and to leave the model as it is.

`x.requires_grad = True` and `x.requires_grad_()` for an activation x: models write it so that gradient checkpointing,
or a branch without parameters, has something to differentiate. AOTAutograd cannot return such a leaf or a result of it.
A captured graph runs under autograd here, so it may do the same as the caller's code. The caller's own tensors stay
refused: a graph must not change them.

`ctc_loss`: the shape of its second result, which only its backward pass reads, depends on the longest target.

`functools.cached_property`: in Python 3.11 it takes a lock.

Parameters and buffers: Dynamo sets an attribute on each, for compilers that we do not use.

Globals of the standard library: Dynamo does not guard them, as programs rarely set them. `os.getenv` reads one.

Names: Dynamo guards the values that code has read, but not always that a name was absent (`try: self.cache`), nor the
order of an `OrderedDict`. So we note each object whose names the code may have looked up.

Gradients: after `model.to(dtype)`, a `.grad` that is a slice of a larger tensor has another dtype than that tensor.
Fake tensors refuse it.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextmanager
def activations_may_require_gradients() -> Iterator[None]:
    """Context in which TorchDynamo captures activations that are set to require a gradient."""
    from torch._dynamo.variables import TensorVariable, builtin  # takes a second

    of_setattr = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # since torch 2.14, or before
    call_function, call_method = of_setattr.call_function, TensorVariable.call_method

    def function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self, "fn", setattr) is setattr and len(args) == 3:
            x, name, value = (getattr(x, "realize", lambda x=x: x)() for x in args)
            if isinstance(x, TensorVariable) and _constant(name) == "requires_grad" and _made_leaf(x, tx, value):
                return value
        return call_function(self, tx, args, kwargs)

    def method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "requires_grad_" and _made_leaf(self, tx, *args, *kwargs.values()):
            return self
        return call_method(self, tx, name, args, kwargs)

    with (
        mock.patch.object(of_setattr, "call_function", function),
        mock.patch.object(TensorVariable, "call_method", method),
    ):
        yield


@contextmanager
def tensors_stay_unmarked() -> Iterator[None]:
    """Context in which TorchDynamo sets no attribute on the parameters and buffers of a model."""
    from torch._dynamo.variables.builder import VariableBuilder  # takes a second

    with mock.patch.object(VariableBuilder, "mark_static_input", lambda *_, **__: None):
        yield


@contextmanager
def globals_are_guarded() -> Iterator[None]:
    """Context in which TorchDynamo guards the globals of Python's standard library as those of other modules."""
    from torch._dynamo import symbolic_convert  # takes a second

    with mock.patch.object(symbolic_convert, "is_stdlib", lambda _: False):
        yield


@contextmanager
def noting(opened: dict[int, Any]) -> Iterator[None]:
    """Context in which TorchDynamo notes the objects that captured code opens, and reads no gradient that was cast.

    Args:
        opened: filled, by identity; without the arguments of the captured function and what they hold.
    """
    from torch._dynamo.source import is_from_local_source  # takes a second
    from torch._dynamo.variables.builder import VariableBuilder

    build = VariableBuilder.__call__

    def noted(self: Any, value: Any) -> Any:
        if not is_from_local_source(self.source, only_allow_input=True):
            opened[id(value)] = value
        with _without_cast_gradient(value):
            return build(self, value)

    with mock.patch.object(VariableBuilder, "__call__", noted):
        yield


def cached_properties_take_no_lock() -> AbstractContextManager[Any]:
    """Context in which `functools.cached_property` is as in Python 3.12."""
    return mock.patch.object(functools.cached_property, "__get__", _cached)


def _cached(self: Any, instance: Any, owner: Any = None) -> Any:
    if instance is None:
        return self
    cache = instance.__dict__
    if self.attrname not in cache:
        cache[self.attrname] = self.func(instance)
    return cache[self.attrname]


CTC = "aten._ctc_loss"
"""The operator of `ctc_loss`, as TorchDynamo's errors name it."""


@contextmanager
def ctc_loss_has_shapes() -> Iterator[None]:
    """Context in which TorchDynamo takes the longest possible target for the shapes of `ctc_loss`."""

    def shapes(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        steps, batch = log_probs.shape[0], log_probs.shape[1:-1]
        longest = 2 * targets.shape[-1] + 1
        return log_probs.new_empty(batch), log_probs.new_empty(*(batch or [1]), steps, longest)

    library = torch.library.Library("aten", "FRAGMENT")
    try:
        for name in ("aten::_ctc_loss", "aten::_ctc_loss.Tensor"):
            torch.library.register_fake(name, shapes, lib=library, allow_override=True)  # torch 2.11 asks for it
        yield
    finally:
        library._destroy()


def _made_leaf(x: Any, tx: Any, value: Any = None) -> bool:
    """Record that an activation requires a gradient; False if it is the caller's tensor or loses its gradient."""
    if x.source is not None or (value is not None and _constant(value) is not True):
        return False
    proxy = x.as_proxy()
    example = proxy.node.meta["example_value"]
    if not example.requires_grad:
        tx.output.create_proxy("call_method", "requires_grad_", (proxy,), {})
        example.requires_grad_(True)
        x.requires_grad = True
    return True


@contextmanager
def _without_cast_gradient(value: Any) -> Iterator[None]:
    """Context in which a parameter has no gradient that is a view of a tensor of another dtype."""
    grad = value.grad if isinstance(value, nn.Parameter) else None
    if grad is None or grad._base is None or grad._base.dtype == grad.dtype:
        yield
        return
    value.grad = None
    try:
        yield
    finally:
        value.grad = grad


def _constant(x: Any) -> Any:
    return x.as_python_constant() if x.is_python_constant() else None
