"""The answer of a step beside the oracle's: norms and clipped sums of a few samples of the batch.

The errors are those of `clipping.checks.verification.compare`: for a parameter ‖Δ‖ / max(‖reference‖, 10⁻³ ‖all
references‖), the largest over parameters; a gradient that vanishes but for rounding (a bias before a normalisation) is
thereby judged beside the whole gradient, not beside its own rounding. For norms max_i |Δ_i| / max(‖g_i‖, 10⁻³ max ‖g‖).

A trial's step is looked at twice. In float64, to which its model is cast and back, is it exact as a method? In float32
a pre-activation within rounding of zero may pass a ReLU in a batch of one and not in a batch of two, and an exact
backend differs by 10⁻². And in the trial's own precision, where other kernels run, is it as exact as that arithmetic
lets it be? The limits are those of `clipping.checks.verification`, by the formats that the losses were computed in.
Ordinary training is compared with the oracle that clips nothing. Where a dtype is asked for (`dpbench check --dtype`),
limits go by it. TF32 is off meanwhile on CUDA, but for what is looked at in a trial's own precision.
"""

from __future__ import annotations

from typing import Any

import torch

from clipping import Agreement, Backend, ClipFunction, ClippedGradient, compare, load_backend
from clipping.checks.verification import Limit, agreement_in_own_arithmetic, agreement_with_oracle, limit_of
from clipping.core.batches import leading_dimension
from dpbench.measure.precision import arithmetic, tf32
from dpbench.models.workload import Workload
from dpbench.trials.outcome import Mismatch

SAMPLES = 2


def oracle(workload: Workload, inputs: Any, targets: Any, clip: ClipFunction) -> ClippedGradient:
    """The answer of one sample after the other.

    Args:
        workload: model, loss and data.
        inputs, targets: of one batch.
        clip: norms [B] -> factors [B].
    """
    with tf32(False), load_backend("microbatch")(workload.model, workload.loss_fn, clip=clip) as microbatch:
        return microbatch(inputs, targets)


def against_oracle(backend: Backend, inputs: Any, targets: Any) -> tuple[Agreement, Limit, int]:
    """How far the backend is from the oracle on the first samples of a batch, what rounding explains, and how many.

    Args:
        backend: to be verified.
        inputs, targets: of one batch.
    """
    samples = min(SAMPLES * backend.together, leading_dimension(inputs, targets))
    with tf32(False):
        return *agreement_with_oracle(backend, inputs, targets, SAMPLES), samples


def verified(backend: Backend, inputs: Any, targets: Any, precision: str) -> tuple[dict[str, Any], str | None]:
    """The record of both looks at a step (see above), and what is wrong with it in words; None if nothing is.

    Args:
        backend, inputs, targets: the step.
        precision: the trial's profile; of float64 there is one look.
    """
    found, limit, samples = against_oracle(backend, inputs, targets)
    record, wrong = verification_record(found, limit, samples), None
    if not found.within(limit):
        wrong = difference(backend.name, found, limit)
    elif precision != "float64":
        device = next(iter(backend.model.parameters())).device
        with arithmetic(precision, device):
            found, limit = agreement_in_own_arithmetic(backend, inputs, targets, SAMPLES)
        record["in_own_precision"] = verification_record(found, limit, samples)
        if not found.within(limit):
            wrong = difference(backend.name, found, limit, where=f" in {precision}")
    return record, wrong


def agreement(backend: Backend, inputs: Any, targets: Any, reference: ClippedGradient) -> Agreement:
    """How far the backend's answer is from the reference.

    Args:
        backend: to be verified.
        inputs, targets: of one batch.
        reference: the oracle's answer on it.
    """
    with tf32(False):
        return compare(backend(inputs, targets), reference)


def verification_record(found: Agreement, limit: Limit, samples: int) -> dict[str, Any]:
    """The record of a verification; raises nothing.

    Args:
        found: how far the backend is off.
        limit: what rounding explains.
        samples: how many were compared.
    """
    return {
        "samples": samples,
        "max_norm_error": found.norm_error,
        "max_grad_error": found.grad_error,
        "tolerance": limit.grad,
        "norm_tolerance": limit.norm,
    }


def mismatch(backend: str, found: Agreement, limit: Limit, result: dict[str, Any], where: str = "") -> Mismatch:
    """The exception that says by how much, and at which parameter, the answer is wrong.

    Args:
        backend: its name.
        found: how far it is off.
        limit: what rounding explains.
        result: of the trial.
        where: on which batch, in words.
    """
    return Mismatch(result, difference(backend, found, limit, where))


def difference(backend: str, found: Agreement, limit: Limit, where: str = "") -> str:
    """By how much, and at which parameter, the answer is wrong.

    Args:
        backend: its name.
        found: how far it is off.
        limit: what rounding explains.
        where: on which batch, in words.
    """
    return (
        f"{backend} differs from the microbatch oracle{where}: relative error {found.norm_error:.1e} in the norms and "
        f"{found.grad_error:.1e} in the gradient of {found.parameter!r}, expected at most {limit}"
    )


def tolerance_of(dtype: str) -> Limit:
    """The largest relative errors that rounding in `dtype` explains.

    Args:
        dtype: its name in torch.
    """
    return limit_of([getattr(torch, dtype)])
