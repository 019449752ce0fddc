"""The table of backends: class, one-line description, style in figures, origin. A new backend needs one row.

Importing this imports no torch.

Functions take:
    name: such as "ghost", "bk_mixed:paper" or "tf_microbatch:4".
"""

from __future__ import annotations

import difflib
import importlib
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from clipping.backends.base import Backend


class BackendInfo(NamedTuple):
    """Description of a backend that needs no import of it.

    Attributes:
        reference: module:class.
        doc: one line.
        title, color, marker: in figures; an empty title is the name, and an empty color black.
        peer: True for another library behind our interface.
        modules: third-party modules that it imports, worth importing before a trial is forked.
    """

    reference: str
    doc: str
    title: str = ""
    color: str = ""
    marker: str = ""
    peer: bool = False
    modules: tuple[str, ...] = ()


#: Name -> backend, in the order of every figure: ordinary training, ours from naive to fast, then the peers.
BACKENDS: dict[str, BackendInfo] = {
    "nonprivate": BackendInfo(
        "clipping.backends.microbatch:NonPrivate",
        "ordinary training: the gradient of the summed loss, nothing clipped",
        "Non-private",
        "#7F7F7F",
        "o",
    ),
    "microbatch": BackendInfo(
        "clipping.backends.microbatch:Microbatch",
        "one sample at a time: the definition, and the oracle of every check",
        "Microbatch",
        "#8C6D31",
        "s",
    ),
    "vmap": BackendInfo(
        "clipping.backends.vmap:Vmap",
        "all per-sample gradients at once by torch.func.vmap(grad)",
        "vmap",
        "#AA4499",
        "D",
    ),
    "fastgradclip": BackendInfo(
        "clipping.backends.tape:FastGradClip",
        "two backward passes, every gradient instantiated layer by layer",
        "FastGradClip",
        "#DDAA33",
        "^",
    ),
    "ghost": BackendInfo(
        "clipping.backends.tape:Ghost",
        "two backward passes, ghost norm in every layer that has one",
        "Ghost",
        "#66BBEE",
        "v",
    ),
    "mixed_ghost": BackendInfo(
        "clipping.backends.tape:MixedGhost",
        "two backward passes, ghost norm where 2T² ≤ pd (arXiv:2205.10683)",
        "Mixed ghost",
        "#2266AA",
        "P",
    ),
    "bk_ghost": BackendInfo(
        "clipping.backends.tape:BkGhost",
        "book-keeping, one backward pass: ghost norm in every layer that has one",
        "BK ghost",
        "#44BB99",
        "X",
    ),
    "bk_mixed": BackendInfo(
        "clipping.backends.tape:BkMixed",
        "book-keeping, one backward pass: the cheaper norm in each layer",
        "BK mixed",
        "#117733",
        "*",
    ),
    "opacus_hooks": BackendInfo(
        "clipping.peers.opacus:OpacusHooks",
        "Opacus: per-sample gradients kept by module hooks",
        "Opacus hooks",
        "#CC3311",
        "<",
        peer=True,
        modules=("opacus",),
    ),
    "opacus_functorch": BackendInfo(
        "clipping.peers.opacus:OpacusFunctorch",
        "Opacus: the same, every layer by vmap(grad)",
        "Opacus functorch",
        "#EE7733",
        ">",
        peer=True,
        modules=("opacus",),
    ),
    "opacus_ew": BackendInfo(
        "clipping.peers.opacus:OpacusEw",
        "Opacus: per-sample gradients by PyTorch's expanded weights",
        "Opacus ew",
        "#EE99AA",
        "p",
        peer=True,
        modules=("opacus",),
    ),
    "opacus_ghost": BackendInfo(
        "clipping.peers.opacus:OpacusGhost",
        "Opacus: two backward passes, ghost norm in linear layers and embeddings",
        "Opacus ghost",
        "#882255",
        "h",
        peer=True,
        modules=("opacus",),
    ),
    "private_cnn": BackendInfo(
        "clipping.peers.private_cnn:PrivateCNN",
        "private_CNN: mixed ghost clipping by the authors of arXiv:2205.10683",
        "private_CNN",
        "#332288",
        "d",
        peer=True,
    ),
    "fastdp": BackendInfo(
        "clipping.peers.fastdp:FastDP",
        "fastDP: book-keeping by the authors of arXiv:2210.00038 (MixOpt)",
        "fastDP",
        "#999933",
        "8",
        peer=True,
    ),
    "opake": BackendInfo(
        "clipping.peers.opake:Opake",
        "Opake: all per-sample gradients at once by vmap, in a functional library",
        "Opake",
        "#AA4466",
        "+",
        peer=True,
    ),
}
#: "name:variant" -> backend. `load_backend` accepts it, but no list shows it.
VARIANTS: dict[str, BackendInfo] = {
    "bk_mixed:paper": BackendInfo(
        "clipping.backends.tape:BkMixedPaper", "bk_mixed with the rule of the paper: ghost norm where 2T² ≤ pd"
    ),
    "bk_mixed:time": BackendInfo(
        "clipping.backends.tape:BkMixedTime", "bk_mixed with the fastest routes, whatever the memory"
    ),
    "bk_mixed:memory": BackendInfo(
        "clipping.backends.tape:BkMixedMemory", "bk_mixed with the routes that keep least, whatever the time"
    ),
    **{
        f"bk_mixed:without_{part}": BackendInfo(f"clipping.explain.ablation:Without{name}", f"bk_mixed without {doc}")
        for part, name, doc in (
            ("kernels", "Kernels", "kernels in C"),
            ("chunks", "Chunks", "convolutions in pieces of the batch"),
            ("overwriting", "Overwriting", "activation functions that overwrite their gradients"),
            ("batching", "Batching", "small gradients that are summed together"),
        )
    },
}
#: "name" -> function of M (samples) that returns the class of "name:M". A different mechanism, so no list shows it.
FAMILIES: dict[str, BackendInfo] = {
    "tf_microbatch": BackendInfo(
        "clipping.backends.microbatch:tf_microbatch",
        "TF Privacy's microbatches: the mean of M samples is clipped. Not per-sample clipping: sensitivity 2C",
        "TF µbatch",
        "#5D4037",
        "H",
    ),
}


def known_backends() -> list[str]:
    """Every name that `load_backend` accepts, for messages; a family is shown as ``name:M``."""
    return [*BACKENDS, *VARIANTS, *(f"{family}:M" for family in FAMILIES)]


def is_backend(name: str) -> bool:
    """Return whether `load_backend` accepts this name."""
    family, _, size = name.partition(":")
    return name in BACKENDS or name in VARIANTS or (family in FAMILIES and bool(re.fullmatch("[1-9][0-9]*", size)))


def load_backend(name: str) -> type[Backend]:
    """Return the class of a backend: a name in `BACKENDS`, ``"name:variant"`` in `VARIANTS`, or ``"name:M"`` of
    `FAMILIES`.

    Raises:
        ValueError: the name is unknown; the message lists the known names and the nearest.
    """
    if not is_backend(name):
        known = known_backends()
        close = difflib.get_close_matches(name, known, n=1)
        names = f"one of {', '.join(known)}"
        if close:
            raise ValueError(f"expected a backend, got {name!r}; did you mean {close[0]!r}? ({names})")
        raise ValueError(f"expected a backend, {names}, got {name!r}")
    family, _, size = name.partition(":")
    found = {**BACKENDS, **VARIANTS}.get(name) or FAMILIES[family]
    module, attribute = found[0].split(":")
    loaded = getattr(importlib.import_module(module), attribute)
    return loaded(int(size)) if family in FAMILIES else loaded
