"""Is a backend exact on this model? Two of its samples against the microbatch oracle.

Errors are relative and norm-wise. For a parameter, ‖Δ‖ / max(‖reference‖, floor) with the floor a thousandth of the
whole gradient's norm: a parameter whose gradient vanishes but for rounding (a bias before a normalisation) would
otherwise fail for noise. For norms, |Δ_i| / max(norms).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from clipping.interface import Backend, ClippedGradient

FLOOR = 1e-3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


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
    """Errors of `result` relative to `reference`; norms that either does not know are left out (error 0)."""
    norm_error = 0.0
    if result.norms is not None and reference.norms is not None:
        norm_error = _ratio(_norm(result.norms - reference.norms, torch.inf), _norm(reference.norms, torch.inf), 0.0)
    floor = FLOOR * float(torch.linalg.vector_norm(torch.stack([_norm(g) for g in reference.grads.values()])))
    if result.grads.keys() != reference.grads.keys():
        different = sorted(result.grads.keys() ^ reference.grads.keys())
        return Agreement(norm_error, float("inf"), different[0])
    errors = {n: _ratio(_norm(result.grads[n] - g), _norm(g), floor) for n, g in reference.grads.items()}
    worst = max(errors, key=lambda n: float("inf") if errors[n] != errors[n] else errors[n])
    return Agreement(norm_error, errors[worst], worst)


def verify(backend: Backend, inputs: Any, targets: Any, samples: int = 2) -> Agreement:
    """Compare `backend` with the oracle on the first `samples` samples of a batch, dropout off.

    Raises:
        WrongGradient: an error above the tolerance of the model's dtype, or one that is not a number.
    """
    from clipping.interface import map_tensors
    from clipping.oracle import Microbatch

    few = map_tensors(lambda x: x[:samples], (inputs, targets))
    oracle = Microbatch(backend.model, backend.loss_fn, clip=backend.clip)
    modes = [(module, module.training) for module in backend.model.modules()]
    try:
        for module, _ in modes:  # random layers draw differently for one sample and for two
            if backend.verify_in_eval or next(module.parameters(), None) is None:
                module.training = False
        result, reference = backend(*few), oracle(*few)
    finally:
        for module, training in modes:
            module.training = training
    if not reference.grads:
        return Agreement(0.0, 0.0, "")
    agreement = compare(result, reference)
    tolerance = max(TOLERANCE.get(g.dtype, 1e-1) for g in reference.grads.values())
    if not agreement.within(tolerance):
        raise WrongGradient(backend.name, agreement, tolerance)
    return agreement


def _norm(x: Tensor, order: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x.double(), order)


def _ratio(difference: Tensor, reference: Tensor, floor: float) -> float:
    scale = max(float(reference), floor)
    if scale == 0:
        return 0.0 if float(difference) == 0 else float("inf")
    return float(difference) / scale
