"""Run a `CheckTrial`: compare a backend with the microbatch oracle on difficult batches.

==========  =====================================================================================================
`random`    B samples; C halfway between two of their norms, so that some are clipped and others are not
`tied`      two equal samples, and C equal to their norm: the edge of min(1, C/‖g‖)
`zero`      one sample with its loss multiplied by 0: ‖g‖ = 0, and no 0/0 may occur
`single`    B = 1, clipped to half its norm
==========  =====================================================================================================

The oracle gives g_i and ‖g_i‖ of each sample by itself. The expected result then follows from the definition,
Σ_i c(w_i‖g_i‖) w_i g_i with loss weights w_i ∈ {0, 1}. A backend that clips the means of several samples is compared
with that mechanism, ordinary training with Σ_i w_i g_i. Errors are those of `dpbench.measure.verify`.

A model may cast to a narrower dtype itself (Llama's RMSNorm computes in float32). Rounding in *that* dtype then limits
how closely the gradient of c·ℓ equals c times the gradient of ℓ, in the oracle too. So before reporting a mismatch,
compare the oracle's gradient of ℓ/3 with a third of its gradient of ℓ; if they differ, use the tolerance for casts.

Functions take:
    case: samples and weights.
    norms, errors: at least one.
    samples: the oracle's results on batches of one, with weight 1.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipping import Agreement, ClippedGradient, Flat, compare
from clipping.checks.verification import CAST_TOLERANCE, Limit, limit_of
from clipping.core.batches import leading_dimension, map_tensors
from clipping.core.reference import of_means
from dpbench.measure import verify
from dpbench.measure.bench import open_workload
from dpbench.measure.precision import tf32
from dpbench.models.workload import Workload
from dpbench.trials import CheckTrial
from dpbench.trials.backend_classes import backend_class

LOWERED = 1e-3
"""How much the bounds on norms may lower factors, and so a sum, where a model casts to float32."""


@dataclass(frozen=True)
class Case:
    """A batch: its samples (indices, with repetition), the weight of each loss, and the threshold C."""

    name: str
    samples: list[int]
    weights: list[float]
    max_grad_norm: float


def cases(norms: list[float]) -> list[Case]:
    """The batches of the module's table, from the norms of the samples 0 .. B-1, B ≥ 2."""
    everyone = list(range(len(norms)))
    return [
        Case("random", everyone, [1.0] * len(norms), between(norms)),
        Case("tied", [0, 0, *everyone[2:]], [1.0] * len(norms), norms[0]),
        Case("zero", everyone, [0.0] + [1.0] * (len(norms) - 1), between(norms[1:])),
        Case("single", [0], [1.0], norms[0] / 2),
    ]


def between(norms: list[float]) -> float:
    """A threshold between two of several norms, near the middle; half of a single norm."""
    if len(norms) == 1:
        return norms[0] / 2
    ordered = sorted(norms)
    middle = len(norms) // 2
    return (ordered[middle - 1] + ordered[middle]) / 2


def run(trial: CheckTrial) -> dict[str, Any]:
    """{"rows": [{"batch", "max_norm_error", "max_grad_error"}, ...], their maxima, "coverage", "tolerance"}.

    Raises:
        Mismatch: an error above the tolerance, with all rows.
        UnsupportedModel: the backend refuses the model, or is not available.
    """
    torch.set_num_threads(1)  # small batches: `dpbench check` runs several trials at once instead
    checked = backend_class(trial.backend)
    workload = weighted(open_workload(trial))
    batch = workload.batch(trial.batch_size)
    samples = [verify.oracle(workload, *one, clip=Flat(max_grad_norm=math.inf)) for one in one_by_one(batch)]
    found: dict[str, Agreement] = {}
    coverage: dict[str, float] = {}
    for case in cases(norms_of(samples).tolist()):
        clip = Flat(max_grad_norm=case.max_grad_norm)
        with checked(workload.model, workload.loss_fn, clip=clip, verify=False) as backend:
            clip = clip if backend.private else Flat(max_grad_norm=math.inf)
            reference = expected(case, samples, clip, backend.together)
            inputs, (weights, targets) = map_tensors(lambda x, at=case.samples: x[at], batch)  # type: ignore[misc]
            with tf32(False):
                found[case.name] = compare(backend(inputs, (weights.new_tensor(case.weights), targets)), reference)
            coverage = dict(backend.coverage) if case.name == "random" else coverage
    tolerance = limit_of([getattr(torch, trial.dtype)])
    exact = all(one.within(tolerance) for one in found.values())
    if not exact and _nonlinearity(workload, one_by_one(batch)[0], samples[0]) > tolerance.grad / 10:
        tolerance = Limit(max(tolerance.norm, CAST_TOLERANCE), max(tolerance.grad, LOWERED))
    result = {
        "rows": [
            {"batch": name, "max_norm_error": one.norm_error, "max_grad_error": one.grad_error}
            for name, one in found.items()
        ],
        "max_norm_error": worst(one.norm_error for one in found.values()),
        "max_grad_error": worst(one.grad_error for one in found.values()),
        "coverage": coverage,
        "tolerance": tolerance.grad,
    }
    for name, one in found.items():
        verify.require(trial.backend, one, tolerance, result, where=f" on the {name!r} batch")
    return result


def weighted(workload: Workload) -> Workload:
    """The same model and data, with a weight for each sample's loss: targets become (weights [B], targets)."""

    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        weights, inner = targets
        return weights * workload.loss_fn(outputs, inner)

    def batch(batch_size: int) -> tuple[Any, Any]:
        inputs, targets = workload.batch(batch_size)
        parameter = next(workload.model.parameters())
        return inputs, (torch.ones(batch_size, dtype=parameter.dtype, device=parameter.device), targets)

    return Workload(workload.model, loss_fn, batch)


def one_by_one(batch: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    """Split a batch into batches of one."""

    def only(i: int) -> tuple[Any, Any]:
        inputs, targets = map_tensors(lambda x: x[i : i + 1], batch)
        return inputs, targets

    return [only(i) for i in range(leading_dimension(batch))]


def _nonlinearity(workload: Workload, one: tuple[Any, Any], whole: ClippedGradient) -> float:
    """The relative difference between the oracle's gradient of ℓ/3 and a third of its gradient of ℓ."""
    inputs, (weights, targets) = one
    third = verify.oracle(workload, inputs, (weights / 3, targets), clip=Flat(max_grad_norm=math.inf))
    return compare(ClippedGradient({n: 3 * g for n, g in third.grads.items()}, None, third.losses), whole).grad_error


def norms_of(samples: list[ClippedGradient]) -> Tensor:
    """‖g_i‖ of batches of one, as one tensor [B]."""
    return torch.cat([sample.norms for sample in samples if sample.norms is not None])


def expected(case: Case, samples: list[ClippedGradient], clip: Flat, together: int) -> ClippedGradient:
    """The expected result by definition, from the gradients of single samples with weight 1.

    Args:
        together: how many samples are averaged before clipping.
    """
    chosen = zip(case.weights, (samples[i] for i in case.samples), strict=True)
    weighed = [ClippedGradient({n: w * g for n, g in one.grads.items()}, None, w * one.losses) for w, one in chosen]
    return of_means(weighed, clip, together)


def worst(errors: Iterable[float]) -> float:
    """The largest error, or NaN if any is NaN."""
    return max(errors, key=lambda error: (math.isnan(error), error))
