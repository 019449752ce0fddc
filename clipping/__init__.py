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

# name -> (module:class, one line about it)
BACKENDS: dict[str, tuple[str, str]] = {
    "nonprivate": ("clipping.oracle:NonPrivate", "ordinary training: the gradient of the summed loss, nothing clipped"),
    "microbatch": ("clipping.oracle:Microbatch", "one sample at a time: the definition, and the oracle of every check"),
    "vmap": ("clipping.vmap:Vmap", "all per-sample gradients at once by torch.func.vmap(grad)"),
    "fastgradclip": (
        "clipping.tape_backends:FastGradClip",
        "two backward passes, every gradient instantiated layer by layer",
    ),
    "ghost": ("clipping.tape_backends:Ghost", "two backward passes, ghost norm in every layer that has one"),
    "mixed_ghost": (
        "clipping.tape_backends:MixedGhost",
        "two backward passes, ghost norm where 2T² ≤ pd (arXiv:2205.10683)",
    ),
    "bk_ghost": (
        "clipping.tape_backends:BkGhost",
        "book-keeping, one backward pass: ghost norm in every layer that has one",
    ),
    "bk_mixed": ("clipping.tape_backends:BkMixed", "book-keeping, one backward pass: the cheaper norm in each layer"),
    "opacus_hooks": ("clipping.peers.opacus:OpacusHooks", "Opacus: per-sample gradients kept by module hooks"),
    "opacus_functorch": ("clipping.peers.opacus:OpacusFunctorch", "Opacus: the same, every layer by vmap(grad)"),
    "opacus_ew": ("clipping.peers.opacus:OpacusEw", "Opacus: per-sample gradients by PyTorch's expanded weights"),
    "opacus_ghost": (
        "clipping.peers.opacus:OpacusGhost",
        "Opacus: two backward passes, ghost norm in linear layers and embeddings",
    ),
    "private_cnn": (
        "clipping.peers.private_cnn:PrivateCNN",
        "private_CNN: mixed ghost clipping by the authors of arXiv:2205.10683",
    ),
    "fastdp": ("clipping.peers.fastdp:FastDP", "fastDP: book-keeping by the authors of arXiv:2210.00038 (MixOpt)"),
}

# name:variant -> the same; loaded wherever a backend is, and in no list
VARIANTS: dict[str, tuple[str, str]] = {
    "bk_mixed:paper": (
        "clipping.tape_backends:BkMixedPaper",
        "bk_mixed with the rule of the paper: ghost norm where 2T² ≤ pd",
    ),
    "bk_mixed:time": ("clipping.tape_backends:BkMixedTime", "bk_mixed with the fastest routes, whatever the memory"),
    "bk_mixed:memory": (
        "clipping.tape_backends:BkMixedMemory",
        "bk_mixed with the routes that keep least, whatever the time",
    ),
}

# name:M, with M samples -> the same, of a function of M. Another mechanism than the others, and in no list
FAMILIES: dict[str, tuple[str, str]] = {
    "tf_microbatch": (
        "clipping.oracle:tf_microbatch",
        "TF Privacy's microbatches: the mean of M samples is clipped. Not per-sample clipping: sensitivity 2C",
    ),
}

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


def known_backends() -> list[str]:
    """Every name that `load_backend` takes, for messages: a family as ``name:M``."""
    return [*BACKENDS, *VARIANTS, *(f"{family}:M" for family in FAMILIES)]


def is_backend(name: str) -> bool:
    """Whether `load_backend` takes this name."""
    family, _, size = name.partition(":")
    return name in BACKENDS or name in VARIANTS or (family in FAMILIES and _is_size(size))


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and not text.startswith("0")


def load_backend(name: str) -> type[Backend]:
    """The class of the backend called `name`: of `BACKENDS`, ``"name:variant"`` of `VARIANTS`, ``"name:M"`` of
    `FAMILIES`.

    Raises:
        ValueError: for an unknown name, with every known one and the nearest.
    """
    if not is_backend(name):
        known = known_backends()
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"expected a backend, one of {', '.join(known)}, got {name!r}{hint}")
    family, _, size = name.partition(":")
    found = {**BACKENDS, **VARIANTS}.get(name) or FAMILIES[family]
    module, attribute = found[0].split(":")
    loaded = getattr(importlib.import_module(module), attribute)
    return loaded(int(size)) if family in FAMILIES else loaded
