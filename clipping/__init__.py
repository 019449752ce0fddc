"""Clipping backends for DP-SGD behind one interface: one call gives the sum over samples of the clipped gradients.

    from clipping import Flat, load_backend

    with load_backend("mixed_ghost")(model, loss_fn, clip=Flat(max_grad_norm=1.0)) as backend:
        out = backend(inputs, targets)      # out.grads, out.norms [B], out.losses [B]

Importing this package imports no torch: the names and one line about each backend can be listed at once.
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
    from clipping.functions import Automatic, ClipFunction, Flat, GlobalBound, PerLayer
    from clipping.interface import Backend
    from clipping.types import ClippedGradient, Problem, UnsupportedModel
    from clipping.verification import Agreement, WrongGradient, compare

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
    "Agreement": "clipping.verification",
    "Automatic": "clipping.functions",
    "Backend": "clipping.interface",
    "ClipFunction": "clipping.functions",
    "ClippedGradient": "clipping.types",
    "Flat": "clipping.functions",
    "GlobalBound": "clipping.functions",
    "PerLayer": "clipping.functions",
    "Problem": "clipping.types",
    "UnsupportedModel": "clipping.types",
    "WrongGradient": "clipping.verification",
    "compare": "clipping.verification",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'clipping' has no attribute {name!r}")
