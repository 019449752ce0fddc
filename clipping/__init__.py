"""Clipping backends for DP-SGD behind one interface: one call gives the sum over samples of the clipped gradients.

    from clipping import Flat, load_backend

    with load_backend("mixed_ghost")(model, loss_fn, clip=Flat(max_grad_norm=1.0)) as backend:
        out = backend(inputs, targets)      # out.grads, out.norms [B], out.losses [B]

Importing this package imports no torch: the names and one line about each backend can be listed at once.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipping.functions import Automatic, ClipFunction, Flat, GlobalBound, PerLayer
    from clipping.interface import Backend, ClippedGradient, Problem, UnsupportedModel
    from clipping.verification import Agreement, WrongGradient, compare

__all__ = [
    "BACKENDS",
    "VARIANTS",
    "Agreement",
    "Automatic",
    "Backend",
    "ClipFunction",
    "ClippedGradient",
    "Flat",
    "GlobalBound",
    "PerLayer",
    "Problem",
    "UnsupportedModel",
    "WrongGradient",
    "compare",
    "load_backend",
]

# name -> (module:class, one line about it)
BACKENDS: dict[str, tuple[str, str]] = {
    "nonprivate": ("clipping.oracle:NonPrivate", "ordinary training: the gradient of the summed loss, nothing clipped"),
    "microbatch": ("clipping.oracle:Microbatch", "one sample at a time: the definition, and the oracle of every check"),
    "vmap": ("clipping.vmap:Vmap", "all per-sample gradients at once by torch.func.vmap(grad)"),
    "fastgradclip": ("clipping.ghost:FastGradClip", "two backward passes, every gradient instantiated layer by layer"),
    "ghost": ("clipping.ghost:Ghost", "two backward passes, ghost norm in every layer that has one"),
    "mixed_ghost": ("clipping.ghost:MixedGhost", "two backward passes, ghost norm where 2T² ≤ pd (arXiv:2205.10683)"),
    "bk_ghost": ("clipping.ghost:BkGhost", "book-keeping, one backward pass: ghost norm in every layer that has one"),
    "bk_mixed": ("clipping.ghost:BkMixed", "book-keeping, one backward pass: the cheaper norm in each layer"),
    "opacus_hooks": ("clipping.opacus:OpacusHooks", "Opacus: per-sample gradients kept by module hooks"),
    "opacus_functorch": ("clipping.opacus:OpacusFunctorch", "Opacus: the same, every layer by vmap(grad)"),
    "opacus_ew": ("clipping.opacus:OpacusEw", "Opacus: per-sample gradients by PyTorch's expanded weights"),
    "opacus_ghost": (
        "clipping.opacus:OpacusGhost",
        "Opacus: two backward passes, ghost norm in linear layers and embeddings",
    ),
    "private_cnn": (
        "clipping.private_cnn:PrivateCNN",
        "private_CNN: mixed ghost clipping by the authors of arXiv:2205.10683",
    ),
    "fastdp": ("clipping.fastdp:FastDP", "fastDP: book-keeping by the authors of arXiv:2210.00038 (MixOpt)"),
}

# name:variant -> the same; loaded wherever a backend is, and in no list
VARIANTS: dict[str, tuple[str, str]] = {
    "bk_mixed:paper": ("clipping.ghost:BkMixedPaper", "bk_mixed with the rule of the paper: ghost norm where 2T² ≤ pd"),
    "bk_mixed:time": ("clipping.ghost:BkMixedTime", "bk_mixed with the fastest routes, whatever the memory"),
    "bk_mixed:memory": ("clipping.ghost:BkMixedMemory", "bk_mixed with the routes that keep least, whatever the time"),
}

_LAZY = {
    "Agreement": "clipping.verification",
    "Automatic": "clipping.functions",
    "Backend": "clipping.interface",
    "ClipFunction": "clipping.functions",
    "ClippedGradient": "clipping.interface",
    "Flat": "clipping.functions",
    "GlobalBound": "clipping.functions",
    "PerLayer": "clipping.functions",
    "Problem": "clipping.interface",
    "UnsupportedModel": "clipping.interface",
    "WrongGradient": "clipping.verification",
    "compare": "clipping.verification",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'clipping' has no attribute {name!r}")


def load_backend(name: str) -> type[Backend]:
    """The class of the backend called `name`: of `BACKENDS`, or ``"name:variant"`` of `VARIANTS`.

    Raises:
        ValueError: for an unknown name, with every known one and the nearest.
    """
    known = {**BACKENDS, **VARIANTS}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"expected a backend, one of {', '.join(known)}, got {name!r}{hint}")
    module, cls = known[name][0].split(":")
    return getattr(importlib.import_module(module), cls)
