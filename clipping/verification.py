"""Is a backend exact on this model? Two of its samples against the microbatch oracle (`oracle.definition`), in the mode
that trains: each sample draws the same random numbers alone and beside the other one (`clipping.draws`).

Errors are relative and norm-wise. For a parameter, ‖Δ‖ / max(‖reference‖, floor) with the floor a thousandth of the
whole gradient's norm: a parameter whose gradient vanishes but for rounding (a bias before a normalisation) would
otherwise fail for noise. For norms, |Δ_i| / max(norms).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from clipping.draws import Draws, same_for_each

if TYPE_CHECKING:
    from clipping.interface import Backend, ClippedGradient

FLOOR = 1e-3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-2, torch.bfloat16: 2e-1, torch.float16: 1e-1}
"""By the dtype that was computed in. In float32 a pre-activation within rounding of zero may pass a ReLU for one sample
and not for two: one unit's worth of gradient, 1e-2 and more in small layers, from exact backends."""
CAST_TOLERANCE = 1e-6
"""For a model computed in float64 that may hold casts to float32 of its own (the RMSNorm of Llama)."""


class Agreement(NamedTuple):
    """How far a result is from the reference: relative errors, and where the gradient's is largest."""

    norm_error: float
    grad_error: float
    parameter: str

    def within(self, tolerance: float) -> bool:
        """Both errors are numbers and at most `tolerance`: NaN is never within."""
        return self.norm_error <= tolerance and self.grad_error <= tolerance


class WrongGradient(Exception):
    """A backend's first batch differs from the microbatch oracle: it must not be used on this model."""

    def __init__(self, backend: str, agreement: Agreement, tolerance: float) -> None:
        self.agreement = agreement
        super().__init__(
            f"{backend} is not exact on this model: relative error {agreement.norm_error:.1e} in the norms and "
            f"{agreement.grad_error:.1e} in the gradient of {agreement.parameter!r}, expected at most {tolerance:.0e}; "
            "use the microbatch or vmap backend, and please report the model"
        )


def compare(result: ClippedGradient, reference: ClippedGradient) -> Agreement:
    """Errors of `result` relative to `reference`; norms that either does not know are left out (error 0).

    Norms of another number than the reference's are of something else: both errors are infinite.
    """
    norm_error = 0.0
    if result.norms is not None and reference.norms is not None:
        if result.norms.shape != reference.norms.shape:
            return Agreement(float("inf"), float("inf"), "")
        norm_error = _ratio(_norm(result.norms - reference.norms, torch.inf), _norm(reference.norms, torch.inf), 0.0)
    if not reference.grads:
        return Agreement(norm_error, 0.0, "")
    floor = FLOOR * float(torch.linalg.vector_norm(torch.stack([_norm(g) for g in reference.grads.values()])))
    if result.grads.keys() != reference.grads.keys():
        different = sorted(result.grads.keys() ^ reference.grads.keys())
        return Agreement(norm_error, float("inf"), different[0])
    errors = {n: _ratio(_norm(result.grads[n] - g), _norm(g), floor) for n, g in reference.grads.items()}
    worst = max(errors, key=lambda n: float("inf") if errors[n] != errors[n] else errors[n])
    return Agreement(norm_error, errors[worst], worst)


def verify(backend: Backend, inputs: Any, targets: Any, samples: int = 2) -> Agreement:
    """Compare `backend` with the oracle on the first `samples` samples of a batch.

    Raises:
        WrongGradient: an error above the tolerance, or one that is not a number.
    """
    agreement, tolerance = agreement_with_oracle(backend, inputs, targets, samples)
    if not agreement.within(tolerance):
        raise WrongGradient(backend.name, agreement, tolerance)
    return agreement


def agreement_with_oracle(backend: Backend, inputs: Any, targets: Any, samples: int = 2) -> tuple[Agreement, float]:
    """The errors on the first `samples` samples, and what rounding explains of them.

    A backend that clips the means of several samples is held to its own definition, on so many times as many samples.
    Computed in float64, to which the model is cast meanwhile, so that an error of any size is one of the method; in the
    model's own dtype where it cannot be cast. What numpy or Python draws cannot be had by sample: if that makes them
    differ, eval mode decides.
    """
    from clipping.interface import map_tensors

    few = map_tensors(lambda x: x[: samples * backend.together], (inputs, targets))
    before = Draws()
    found, tolerance, drew = _agreement(backend, few)
    if drew and not found.within(tolerance):
        with before.again(), _in_eval(backend.model):
            found, tolerance, _ = _agreement(backend, few)
    return found, tolerance


def _agreement(backend: Backend, few: Any) -> tuple[Agreement, float, bool]:
    from clipping.interface import map_tensors

    wide = map_tensors(lambda x: x.double() if x.is_floating_point() else x, few)
    try:
        with in_float64(backend.model):
            result, reference, drew = _both(backend, *wide)
    except (RuntimeError, TypeError, NotImplementedError):  # a cast of the model's own, or a device without float64
        result, reference, drew = _both(backend, *few)
    if reference.losses.dtype != torch.float64:
        result, reference, drew = _both(backend, *few)
    dtypes = {g.dtype for g in reference.grads.values()} | {reference.losses.dtype}
    if dtypes == {torch.float64}:
        return compare(result, reference), CAST_TOLERANCE, drew
    return compare(result, reference), max(TOLERANCE.get(dtype, 2e-1) for dtype in dtypes), drew


def _both(backend: Backend, inputs: Any, targets: Any) -> tuple[ClippedGradient, ClippedGradient, bool]:
    """The two, and whether anything was drawn outside of torch."""
    from clipping.functions import Flat
    from clipping.interface import leading_dimension
    from clipping.oracle import definition

    clip = backend.clip if backend.private else Flat(max_grad_norm=float("inf"))
    with same_for_each(leading_dimension(inputs, targets)) as seeded:
        result = backend(inputs, targets)  # first: what it refuses, it gives its reason for
        drew = seeded.used_outside_of_torch()
    reference = definition(
        backend.model,
        backend.loss_fn,
        inputs,
        targets,
        clip=clip,
        together=backend.together,
        around=partial(same_for_each, 1),
    )
    return result, reference, drew


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Its parameters and buffers are of float64 meanwhile."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    before = [t.data for t in tensors]
    try:
        for t in tensors:
            t.data = t.data.double()
        yield
    finally:
        for t, data in zip(tensors, before, strict=True):
            t.data = data


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _norm(x: Tensor, order: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x.double(), order)


def _ratio(difference: Tensor, reference: Tensor, floor: float) -> float:
    scale = max(float(reference), floor)
    if scale == 0:
        return 0.0 if float(difference) == 0 else float("inf")
    return float(difference) / scale
