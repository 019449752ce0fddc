"""Clipping backends for DP-SGD behind one interface: one call gives the sum over samples of the clipped gradients.

    from clipping import Flat, load_backend

    with load_backend("bk_mixed")(model, loss_fn, clip=Flat(max_grad_norm=1.0)) as backend:
        out = backend(inputs, targets)      # out.grads, out.norms [B], out.losses [B]

`dpbench.guide.backends` lists the backends, and `dpbench.guide.algorithms` explains them. From `fastgradclip` to
`bk_mixed` they use a *tape*, which records operations, not modules (`clipping.tape.record`). A backend refuses a model
that it cannot clip exactly, with the reason and the remedy. These checks detect wrong gradients:

- the tape must have recorded every read of a parameter in the graph of the losses, and each gradient must arrive once
  (`clipping.tape.graph`, in every call);
- two samples of the first batch are compared with the definition, in float64 if the model can be cast
  (`clipping.checks.verification`);
- samples must not mix: checked for new graphs and shapes, and in random steps (`clipping.checks.sample_independence`);
- one record moves the sum by at most C(1 + η), rounding included (`clipping.numerics.rounding_bounds`).

`bk_mixed` times the ways to compute each norm on the device (`clipping.planning.planner`). `compile=True` runs a step
as one program (`clipping.program.graphs`). Kernels for CPUs are compiled once by `cc` (`clipping.accel.cpu`).

Importing this package imports no torch: the names and one line about each backend can be listed at once.

Functions take:
    model, loss_fn: a module; (outputs, targets) -> ℓ [B].
    inputs, targets: the batch: a tensor, a tuple (positional) or a dict (keyword arguments); every tensor [B, ...].
    parameters, losses: name -> trainable parameter; ℓ [B], with their graph.
    clip, factors: norms [B] -> factors [B]; c [B].
    batch_size: B.
    x, dtype, device: any tensor; of the operands or gradients; of the result.
    func, args, kwargs, output: an operation, its arguments and its output.
    data: its operands that depend on the batch, at least one.
    tape, use, source: the record of a forward pass; an operation on parameters; the tensor made of parameters that it
        reads.
    rule, g: of a use (`clipping.rules`); the gradient of the use's output, [B, ...].
    grads: name -> gradient, of the parameter's shape.
    result: of a call of a backend.
    error: raised by an operation or a pass.
    keep_graph, retain_graph: keep the graph for another backward pass.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clipping.registry import (
    BACKENDS,
    FAMILIES,
    VARIANTS,
    BackendInfo,
    is_backend,
    known_backends,
    load_backend,
)

if TYPE_CHECKING:
    from clipping.backends.base import Backend
    from clipping.checks.verification import Agreement, WrongGradient, compare
    from clipping.core.clip_functions import Automatic, ClipFunction, Flat, GlobalBound, PerLayer
    from clipping.core.types import ClippedGradient, Problem, UnsupportedModel

__all__ = [
    "BACKENDS",
    "FAMILIES",
    "VARIANTS",
    "Agreement",
    "Automatic",
    "Backend",
    "BackendInfo",
    "ClipFunction",
    "ClippedGradient",
    "Flat",
    "GlobalBound",
    "PerLayer",
    "Problem",
    "UnsupportedModel",
    "WrongGradient",
    "compare",
    "is_backend",
    "known_backends",
    "load_backend",
]

_LAZY = {
    "Agreement": "clipping.checks.verification",
    "Automatic": "clipping.core.clip_functions",
    "Backend": "clipping.backends.base",
    "ClipFunction": "clipping.core.clip_functions",
    "ClippedGradient": "clipping.core.types",
    "Flat": "clipping.core.clip_functions",
    "GlobalBound": "clipping.core.clip_functions",
    "PerLayer": "clipping.core.clip_functions",
    "Problem": "clipping.core.types",
    "UnsupportedModel": "clipping.core.types",
    "WrongGradient": "clipping.checks.verification",
    "compare": "clipping.checks.verification",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'clipping' has no attribute {name!r}")
