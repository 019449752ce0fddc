"""Clipping backends for DP-SGD behind one interface: one call gives the sum over samples of the clipped gradients.

    from clipping import Flat, load_backend

    with load_backend("mixed_ghost")(model, loss_fn, clip=Flat(max_grad_norm=1.0)) as backend:
        out = backend(inputs, targets)      # out.grads, out.norms [B], out.losses [B]

| backend | norms | weighted gradient |
|---|---|---|
| `nonprivate` | none | ordinary training: the baseline of every ratio |
| `microbatch` | one sample at a time: the definition, and the oracle of every check | |
| `vmap` | all per-sample gradients by `torch.func.vmap` | their weighted sum |
| `fastgradclip` | instantiated, one layer at a time | second backward pass |
| `ghost` | Gram matrices | second backward pass |
| `mixed_ghost` | Gram matrices where 2T² ≤ pd (arXiv:2205.10683) | second backward pass |
| `bk_ghost`, `bk_mixed` | Gram matrices; whatever is planned | book-kept, no second pass (arXiv:2210.00038) |
| `opacus_hooks`, `opacus_functorch`, `opacus_ew`, `opacus_ghost` | Opacus, by an adapter | |
| `private_cnn`, `fastdp`, `opake` | these libraries, where they can be imported | |
| `tf_microbatch:M` | of the mean of M samples, as TensorFlow Privacy: *another mechanism*, labelled so | their sum |

The middle seven are ours. All but `vmap` work on a *tape* of operations, not of modules, so unmodified vision
transformers, tied embeddings, bare parameters, attention, recurrent layers, LoRA and bias-only training are clipped
exactly. What a backend cannot do it refuses, by name, with the reason and the remedy. A wrong gradient does not pass in
silence: in every call each read of a parameter in the graph of the losses must be one that the tape recorded, and each
gradient must arrive once; the first batch is compared with the oracle on two of its samples, in float64 and in training
mode (and what is measured also in the arithmetic that runs: under bfloat16 autocast a norm may be off by eight
roundings, 3.1 %); and whether samples mix is looked at in the whole batch, at first, on new shapes and graphs, and in
one step of 200. Clipping functions (`Flat`, `Automatic`, `GlobalBound`, `PerLayer`) are independent of backends and
state their sensitivity.

**In floating point**, too, one record moves the sum by C(1 + η) at the most: `backend.sensitivity_bound(batch_size)`,
to which the engine scales its noise, below 1e-3 in float32 up to 4,096 samples of 1,024 positions. Norms and sums are
rounded by different operations, and where large terms cancel they have nothing in common: a record whose Gram norm
cancels moved the sum of every ghost clipping library by 10,000 C and more. So factors are made of the norm and of how
large its terms were (`clipping.numerics.rounding_bounds` has the mathematics); ordinary records keep theirs to a
thousandth. Sums leave in float32 at least, from portions that are added up in float64.

`bk_mixed` plans: for each use of each parameter there are several exact ways to its norm (Gram matrices from patches,
from pixels or by a kernel; gradients by the library's grouped kernel or from patches, kept for the sum or not, in
larger or smaller blocks). They are timed on the device in the second step and remembered for the next run, and the
fastest are taken that keep no more for the sum than each layer's output gradient. `bk_mixed:paper`,
`bk_mixed:time` and `bk_mixed:memory` plan by the paper's rule, by time alone and by memory alone.

On a CPU the kernels are compiled by `cc` (GCC 12 or newer, or Clang; `CC` names another) in a second, once, into
`~/.cache/dpbench` (`DPBENCH_CACHE` moves it; `off` keeps and compiles nothing); without a compiler torch's own
operations run, and a record says which ran. An incomplete library is compiled again; one that others could have changed
is refused.

`compile=True` runs a step as one program for each shape of batch (`clipping.program.graphs`): captured by
TorchDynamo, whose guards see what changes in Python, traced once, compared with the eager step, and run in the way that
is fastest on the machine: as it was traced, as a CUDA graph, or compiled by TorchInductor. `compile="auto"` runs
eagerly what is no program, and is the default on a CUDA device; `backend.ways` says how each shape runs.

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
