"""Run a `CoverageTrial`: compare several backends on one model with autograd's per-sample gradients.

The model is in train mode, in float64, with dropout off. The reference has the gradients of ℓ_0 ... ℓ_{B-1} of one
forward pass over the whole batch. A model has no such gradients if it draws random numbers (two passes give different
losses) or mixes samples (a sample alone has another gradient than in the batch).

Each backend computes two batches: all samples, then the last and the first alone, which reveals state kept from the
first batch. The threshold lies between two norms, so some samples are clipped. The backend's own verification is off.

Functions take:
    share: multiplies each loss; the gradients are divided by it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipping import ClippedGradient, Flat, UnsupportedModel, compare
from clipping.checks.verification import CAST_TOLERANCE, Limit
from clipping.core.batches import forward, map_tensors
from clipping.core.reference import gradients, of_means, with_zeros
from clipping.program.graphs import BEFORE
from dpbench.conformance.coverage import COMPILED, KERNEL, LOOP, CoverageTrial
from dpbench.errors import in_words
from dpbench.measure.check import LOWERED, between, norms_of, one_by_one, worst
from dpbench.models.loading import load_workload
from dpbench.models.workload import ModelError, Workload
from dpbench.trials.backend_classes import UnavailableBackend, backend_class

#: Heights and widths of images, tried in turn.
IMAGE_SIZES: tuple[int | None, ...] = (64, 128, 224, 256, 240, 288, 384)
#: The dtypes, tried in turn, and the largest relative error due to rounding in each.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3}
MOST = 1e-3
"""A larger error is never due to rounding."""
STIRRED = 0.02
"""Standard deviation of the noise in each parameter."""
TO_A_GRAPH = BEFORE + 1
"""Steps of a shape before one that runs as a program: the first sets the batch size for routes."""
#: Characters of an error in a record.
LONGEST = 600
Row = dict[str, Any]


@dataclass(frozen=True)
class _Opened:
    """A model that can be trained on a batch, with the gradients, dtype and image size."""

    workload: Workload
    batch: tuple[Any, Any]
    samples: list[ClippedGradient]
    dtype: str
    image_size: int | None


class _Unusable(Exception):
    """The model builds, but has no reference to compare with; the reason, in one line."""


def run(trial: CoverageTrial) -> dict[str, Any]:
    """{"built": False, "reason"}, or {"built": True, ..., "rows"}, a row a backend.

    A row is {"backend", "status", "norm_error", "grad_error", "coverage", "reason"}, with a status from
    `dpbench.conformance.coverage.STATUSES`.
    """
    torch.set_num_threads(1)
    try:
        model = _opened(trial)
        experts = any("Experts" in type(module).__name__ for module in model.workload.model.modules())
        if trial.task in (KERNEL, LOOP) and not experts:
            raise _Unusable("made small, none of its layers has experts")
        limit = _limit(model)
        rows = [_judged(name, model, limit) for name in trial.backends]
    except (ModelError, _Unusable) as error:
        return {"built": False, "reason": str(error)}
    module = model.workload.model
    return {
        "built": True,
        "dtype": model.dtype,
        "image_size": model.image_size,
        "parameters": sum(p.numel() for p in module.parameters()),
        "tolerance": limit.norm,
        "rows": rows,
    }


def _opened(trial: CoverageTrial) -> _Opened:
    """The model at the smallest image size and in the widest dtype in which it trains.

    Raises:
        ModelError: it does not build, with the reason of the last size.
        Unusable: it cannot be trained.
    """
    own = [trial.image_size] if trial.image_size or trial.model.startswith("tiny:") else IMAGE_SIZES
    last: Exception = _Unusable("no size of images to try")
    for size in own:
        for dtype in TOLERANCES:
            try:
                return _trained(trial, size, dtype)
            except ModelError as error:
                last = error
                break  # it builds in float32 whatever the dtype
            except _Unusable as error:
                last = error
    raise last


def _trained(trial: CoverageTrial, size: int | None, dtype: str) -> _Opened:
    """Build the model, and compute the gradients of one batch by ordinary training.

    Raises:
        ModelError: it does not build.
        Unusable: ordinary training fails, or its gradients are not finite.
    """
    settings: dict[str, Any] = {"device": trial.device, "seed": trial.seed}
    workload = load_workload(trial.model, image_size=size or 32, data="synthetic", dtype=dtype, **settings)
    _stir(workload.model, trial.seed)
    try:
        batch = workload.batch(trial.batch_size)
        samples = _together(workload, batch)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _Unusable(f"ordinary training fails in {dtype}: {in_words(error)[:LONGEST]}") from error
    norms = norms_of(samples)
    if not bool(torch.isfinite(norms).all()) or not bool((norms > 0).any()):
        raise _Unusable(f"ordinary training in {dtype} has gradients whose norms are {norms.tolist()}")
    return _Opened(workload, batch, samples, dtype, size)


def _stir(model: nn.Module, seed: int) -> None:
    """Add noise to all parameters.

    Many biases begin at zero, as does the last scale of many residual branches. Zeros would hide wrong gradients and
    mixed samples in the layers before them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=STIRRED)


def _together(workload: Workload, batch: tuple[Any, Any], share: float = 1.0) -> list[ClippedGradient]:
    """Per-sample gradients through one forward pass of the whole batch."""
    inputs, targets = batch
    named = {name: p for name, p in workload.model.named_parameters() if p.requires_grad}
    losses = workload.loss_fn(forward(workload.model, inputs), targets)
    if losses.dim() != 1:
        raise _Unusable(f"losses of shape {list(losses.shape)}")
    return [_gradient(losses[i], named, share) for i in range(len(losses))]


def _gradient(loss: Tensor, named: dict[str, Any], share: float) -> ClippedGradient:
    found = with_zeros(gradients(loss * share, named, keep_graph=True), named)
    grads = {name: grad / share for name, grad in found.items()}
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in grads.values()]))
    return ClippedGradient(grads, norm[None], loss.detach()[None])


def _limit(model: _Opened) -> Limit:
    """The largest relative errors due to rounding.

    The gradient of a third of a loss shows rounding by casts of the model, in the losses or in the clipping factors.

    Raises:
        Unusable: the model draws random numbers or mixes samples, or rounding could explain any error.
    """
    workload, (inputs, targets) = model.workload, model.batch
    with torch.no_grad():
        first, again = (workload.loss_fn(forward(workload.model, inputs), targets) for _ in range(2))
    if not torch.equal(first, again):
        raise _Unusable("it draws random numbers: two passes over a batch differ")
    each = one_by_one(model.batch)
    alone = [_together(workload, one)[0] for one in each]
    rounding = compare(_together(workload, each[0], 1 / 3)[0], alone[0]).grad_error
    tolerance = TOLERANCES[model.dtype]
    limit = Limit(tolerance, tolerance)
    if rounding > tolerance / 10:
        tolerance = max(CAST_TOLERANCE, 10 * rounding)
        limit = Limit(tolerance, max(tolerance, LOWERED))
    if tolerance > MOST:
        raise _Unusable(f"a third of a loss has a gradient that is off by {rounding:.1e}")
    apart = max(compare(a, b).grad_error for a, b in zip(alone, model.samples, strict=True))
    if not apart <= tolerance:
        raise _Unusable(f"it mixes samples: gradients of samples alone differ by {apart:.1e}")
    return limit


def _judged(name: str, model: _Opened, limit: Limit) -> Row:
    """The row of one backend."""
    row: Row = {"backend": name, "status": "exact", "norm_error": None, "grad_error": None}
    row |= {"coverage": {}, "reason": None}
    options: dict[str, Any] = {"compile": True, "timing": False} if name.endswith(COMPILED) else {}
    workload, samples = model.workload, model.samples
    clip = Flat(max_grad_norm=between(norms_of(samples).tolist()))
    try:
        checked = backend_class(name.removesuffix(COMPILED))
        with checked(workload.model, workload.loss_fn, clip=clip, verify=False, **options) as backend:
            found = []
            for chosen in (list(range(len(samples))), [len(samples) - 1, 0]):
                batch = map_tensors(lambda x, chosen=chosen: x[chosen], model.batch)  # type: ignore[misc]
                for _ in range(TO_A_GRAPH if options else 0):
                    backend(*batch)
                right = of_means([samples[i] for i in chosen], clip, together=1)
                found.append(compare(backend(*batch), right))
            row["coverage"] = dict(backend.coverage)
    except UnavailableBackend as error:
        return row | {"status": "unavailable", "reason": in_words(error)[:LONGEST]}
    except UnsupportedModel as error:
        return row | {"status": "refused", "reason": str(error)}
    except Exception as error:
        return row | {"status": "crash", "reason": in_words(error)[:LONGEST]}
    row["norm_error"], row["grad_error"] = worst(f.norm_error for f in found), worst(f.grad_error for f in found)
    wrong = next((one for one in found if not one.within(limit)), None)
    if wrong is not None:
        errors = f"relative error {wrong.norm_error:.1e} in the norms, {wrong.grad_error:.1e} in the gradient"
        return row | {"status": "wrong", "reason": f"gradient of {wrong.parameter!r}; {errors}"}
    return row
