"""The answer of a step beside the oracle's: norms and clipped sums of a few samples of the batch.

The errors are those of `clipping.verification.compare`: for a parameter ‖Δ‖ / max(‖reference‖, 10⁻³ ‖all references‖),
the largest over parameters; a gradient that vanishes but for rounding (a bias before a normalisation) is thereby judged
beside the whole gradient, not beside its own rounding. For norms max_i |Δ_i| / max_i ‖g_i‖.

A trial's model is cast to float64 for the comparison and back: in float32 a pre-activation within rounding of zero may
pass a ReLU in a batch of one and not in a batch of two, and an exact backend differs by 10⁻². Ordinary training is
compared with the oracle that clips nothing. Where a dtype is asked for (`dpbench check --dtype`), tolerances go by it;
on CUDA TF32 is off on both sides meanwhile. What is timed afterwards runs as the machine was set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from clipping import Agreement, Backend, ClipFunction, ClippedGradient, compare, load_backend
from clipping.interface import leading_dimension
from clipping.verification import TOLERANCE, agreement_with_oracle
from dpbench.models import Workload
from dpbench.outcome import Mismatch

SAMPLES = 2


def oracle(workload: Workload, inputs: Any, targets: Any, clip: ClipFunction) -> ClippedGradient:
    """The answer of one sample after the other."""
    with full_float32(), load_backend("microbatch")(workload.model, workload.loss_fn, clip=clip) as microbatch:
        return microbatch(inputs, targets)


def against_oracle(backend: Backend, inputs: Any, targets: Any) -> tuple[Agreement, float, int]:
    """How far the backend is from the oracle on the first samples of a batch, what rounding explains, and how many."""
    samples = min(SAMPLES * backend.together, leading_dimension(inputs, targets))
    with full_float32():
        return *agreement_with_oracle(backend, inputs, targets, SAMPLES), samples


def agreement(backend: Backend, inputs: Any, targets: Any, reference: ClippedGradient) -> Agreement:
    """How far the backend's answer is from the reference."""
    with full_float32():
        return compare(backend(inputs, targets), reference)


def verification_record(found: Agreement, tolerance: float, samples: int) -> dict[str, Any]:
    """The record of a verification; raises nothing."""
    return {
        "samples": samples,
        "max_norm_error": found.norm_error,
        "max_grad_error": found.grad_error,
        "tolerance": tolerance,
    }


def mismatch(backend: str, found: Agreement, tolerance: float, result: dict[str, Any], where: str = "") -> Mismatch:
    """The exception that says by how much, and at which parameter, the answer is wrong."""
    return Mismatch(
        result,
        f"{backend} differs from the microbatch oracle{where}: relative error {found.norm_error:.1e} in the norms and "
        f"{found.grad_error:.1e} in the gradient of {found.parameter!r}, expected at most {tolerance:.0e}",
    )


def tolerance_of(dtype: str) -> float:
    """The largest relative error that rounding in `dtype` explains."""
    return TOLERANCE[getattr(torch, dtype)]


@contextmanager
def full_float32() -> Iterator[None]:
    """Convolutions and matrix products in full float32 on CUDA, without TF32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
