"""Compares a step's norms and clipped sums with the oracle's, on a few samples of the batch.

The errors are those of `clipping.checks.verification.compare`. A trial's step is checked twice. First in float64, to
which its model is cast and back: is the method exact? (In float32 a pre-activation near zero may pass a ReLU in a batch
of one and not in a batch of two, and an exact backend then differs by 10⁻².) Then in the trial's own precision, which
runs other kernels: is it as exact as that arithmetic allows? Limits depend on the dtypes in which the losses are
computed, or on an explicit dtype (`dpbench check --dtype`). Ordinary training is compared with an oracle that does not
clip. On CUDA, TF32 is off except in the check in the trial's own precision.

Functions take:
    backend: to be verified, or its name.
    found: its errors.
    limit: the largest errors due to rounding.
    where: on which batch, in words.
"""

from typing import Any

from clipping import Agreement, Backend, ClipFunction, ClippedGradient, load_backend
from clipping.checks.verification import Limit, agreement_in_own_arithmetic, agreement_with_oracle
from clipping.core.batches import leading_dimension
from dpbench.measure.precision import arithmetic, tf32
from dpbench.models.workload import Workload
from dpbench.trials.outcome import Mismatch

SAMPLES = 2


def oracle(workload: Workload, inputs: Any, targets: Any, clip: ClipFunction) -> ClippedGradient:
    """The result of processing one sample at a time."""
    with tf32(False), load_backend("microbatch")(workload.model, workload.loss_fn, clip=clip) as microbatch:
        return microbatch(inputs, targets)


def against_oracle(backend: Backend, inputs: Any, targets: Any) -> tuple[Agreement, Limit, int]:
    """The backend's difference from the oracle on the first samples of a batch, the limit, and how many samples."""
    samples = min(SAMPLES * backend.together, leading_dimension(inputs, targets))
    with tf32(False):
        return *agreement_with_oracle(backend, inputs, targets, SAMPLES), samples


def verified(backend: Backend, inputs: Any, targets: Any, precision: str, result: dict[str, Any]) -> None:
    """Write the record of both checks of a step (float64 needs one) to `result`, with the coverage.

    Args:
        result: gains "verification" and "coverage".

    Raises:
        Mismatch: one of them failed; with `result`.
    """
    found, limit, samples = against_oracle(backend, inputs, targets)
    record, where = verification_record(found, limit, samples), ""
    if found.within(limit) and precision != "float64":
        device = next(iter(backend.model.parameters())).device
        with arithmetic(precision, device):
            found, limit = agreement_in_own_arithmetic(backend, inputs, targets, SAMPLES)
        record["in_own_precision"], where = verification_record(found, limit, samples), f" in {precision}"
    result |= {"verification": record, "coverage": dict(backend.coverage)}
    require(backend.name, found, limit, result, where)


def verification_record(found: Agreement, limit: Limit, samples: int) -> dict[str, Any]:
    """The record of a verification; raises nothing."""
    return {
        "samples": samples,
        "max_norm_error": found.norm_error,
        "max_grad_error": found.grad_error,
        "tolerance": limit.grad,
        "norm_tolerance": limit.norm,
    }


def require(backend: str, found: Agreement, limit: Limit, result: dict[str, Any], where: str = "") -> None:
    """Require that the errors are within the limit.

    Raises:
        Mismatch: by how much, and at which parameter, the result is wrong.
    """
    if not found.within(limit):
        said = (
            f"{backend} differs from the microbatch oracle{where}: relative error {found.norm_error:.1e} in the norms"
        )
        said += f" and {found.grad_error:.1e} in the gradient of {found.parameter!r}, expected at most {limit}"
        raise Mismatch(result, said)
