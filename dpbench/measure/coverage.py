"""Run a `CoverageTrial`: compare several backends on one model with autograd's per-sample gradients.

The model is in train mode, in float64, with dropout off. Two references agree on a model that treats each sample by
itself and draws no random numbers: *alone*, the gradient of each sample in a batch of its own, which is the definition;
and *together*, the gradients of ℓ_0 ... ℓ_{B-1} of one forward pass over the whole batch. If they differ, either the
model draws random numbers (two passes from different seeds differ): then the seed is set before every pass, and a
backend must give *together*. Or the model mixes samples: then no per-sample gradient exists, refusing is right, and
every result is wrong.

Each backend computes two batches: all samples, then the last and the first alone, which reveals state kept from the
first batch. The threshold lies between two norms, so some samples are clipped. The backend's own verification is off,
except on a model that mixes samples: only verification can detect that.

Functions take:
    share: multiplies each loss; the gradients are divided by it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipping import ClippedGradient, Flat, UnsupportedModel, WrongGradient, compare
from clipping.checks.verification import CAST_TOLERANCE, LOWERED, Limit
from clipping.core.batches import forward, map_tensors
from clipping.core.reference import gradients, of_means, with_zeros
from clipping.program.graphs import BEFORE
from dpbench.conformance.coverage import COMPILED, KERNEL, LOOP, CoverageTrial
from dpbench.errors import in_words
from dpbench.measure.check import between, norms_of, one_by_one, worst
from dpbench.models.loading import load_workload
from dpbench.models.workload import ModelError, Workload
from dpbench.trials.backend_classes import UnavailableBackend, backend_class

#: Heights and widths of images, tried in turn.
IMAGE_SIZES: tuple[int | None, ...] = (64, 128, 224, 256, 240, 288, 384)
#: The dtypes, tried in turn, and the largest relative error due to rounding in each.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3}
MOST = 1e-3
"""A larger error is never due to rounding."""
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
        drawn = _is_random(model)
        with _seeded(model.workload, drawn):
            truth = _Truth(model, drawn)
            rows = [_judged(name, truth) for name in trial.backends]
    except (ModelError, _Unusable) as error:
        return {"built": False, "reason": str(error)}
    module = model.workload.model
    return {
        "built": True,
        "dtype": model.dtype,
        "image_size": model.image_size,
        "parameters": sum(p.numel() for p in module.parameters()),
        "random": drawn,
        "mixes": truth.mixes,
        "tolerance": truth.limit.norm,
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


def _alone(workload: Workload, batch: tuple[Any, Any]) -> list[ClippedGradient]:
    """The gradient of each sample in a batch of its own."""
    return [_together(workload, one)[0] for one in one_by_one(batch)]


def _difference(found: list[ClippedGradient], reference: list[ClippedGradient]) -> float:
    """The largest relative error of samples' gradients."""
    return max(compare(a, b).grad_error for a, b in zip(found, reference, strict=True))


def _is_random(model: _Opened) -> bool:
    """True if two passes from different seeds give different losses."""
    inputs, targets = model.batch
    workload, losses = model.workload, []
    for number in (1, 2):
        _seed(number)
        with torch.no_grad():
            losses.append(workload.loss_fn(forward(workload.model, inputs), targets))
    return not torch.equal(*losses)


def _seed(number: int) -> None:
    """Seed every generator that a model may draw from on a CPU."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@contextmanager
def _seeded(workload: Workload, drawn: bool) -> Iterator[None]:
    """If the model is random, set the same seed before every forward pass that is not captured."""
    if not drawn:
        yield
        return
    handle = workload.model.register_forward_pre_hook(lambda *_: None if torch.compiler.is_compiling() else _seed(0))
    try:
        yield
    finally:
        handle.remove()


class _Truth:
    """The right results of the two batches.

    Attributes:
        mixes: whether a sample's gradient depends on the others, without random numbers.
        limit: the largest relative errors due to rounding. The gradient of a third of a loss shows rounding by casts of
            the model, in the losses or in the clipping factors.

    Raises:
        Unusable: two passes from the same seed give different gradients, or rounding could explain any error.
    """

    def __init__(self, model: _Opened, drawn: bool) -> None:
        self.workload, self.batch, self.random = model.workload, model.batch, drawn
        self.samples = _together(self.workload, self.batch) if drawn else model.samples
        again = (_together if drawn else _alone)(self.workload, self.batch)
        apart = _difference(again, self.samples)
        if drawn and apart > MOST:
            raise _Unusable(f"it draws random numbers that no seed fixes: gradients differ by {apart:.1e}")
        one = one_by_one(self.batch)[0]
        whole = _together(self.workload, one) if drawn else again[:1]
        rounding = _difference(_together(self.workload, one, 1 / 3), whole)
        tolerance = TOLERANCES[model.dtype]
        self.limit = Limit(tolerance, tolerance)
        if rounding > tolerance / 10:
            tolerance = max(CAST_TOLERANCE, 10 * rounding)
            self.limit = Limit(tolerance, max(tolerance, LOWERED))
        if tolerance > MOST:
            raise _Unusable(f"a third of a loss has a gradient that is off by {rounding:.1e}")
        self.mixes = not drawn and not apart <= tolerance
        self.clip = Flat(max_grad_norm=between(norms_of(self.samples).tolist()))

    def batches(self) -> Iterator[tuple[tuple[Any, Any], ClippedGradient]]:
        """((inputs, targets), the right result)."""
        count = len(self.samples)
        for chosen in (list(range(count)), [count - 1, 0]):
            inputs, targets = map_tensors(lambda x, chosen=chosen: x[chosen], self.batch)  # type: ignore[misc]
            batch = inputs, targets
            samples = [self.samples[i] for i in chosen]
            if self.random and len(chosen) < count:
                samples = _together(self.workload, batch)
            yield batch, of_means(samples, self.clip, together=1)


def _judged(name: str, truth: _Truth) -> Row:
    """The row of one backend."""
    row: Row = {"backend": name, "status": "exact", "norm_error": None, "grad_error": None}
    row |= {"coverage": {}, "reason": None}
    options: dict[str, Any] = {"compile": True, "timing": False} if name.endswith(COMPILED) else {}
    try:
        checked = backend_class(name.removesuffix(COMPILED))
        loss_fn, clip = truth.workload.loss_fn, truth.clip
        with checked(truth.workload.model, loss_fn, clip=clip, verify=truth.mixes, **options) as backend:
            found = []
            for batch, right in truth.batches():
                for _ in range(TO_A_GRAPH if options else 0):
                    backend(*batch)
                if truth.random:  # a program's forward pass calls no hook
                    _seed(0)
                found.append(compare(backend(*batch), right))
            row["coverage"] = dict(backend.coverage)
    except UnavailableBackend as error:
        return row | {"status": "unavailable", "reason": in_words(error)[:LONGEST]}
    except (UnsupportedModel, WrongGradient) as error:
        return row | {"status": "refused", "reason": str(error)}
    except Exception as error:
        return row | {"status": "crash", "reason": in_words(error)[:LONGEST]}
    row["norm_error"], row["grad_error"] = worst(f.norm_error for f in found), worst(f.grad_error for f in found)
    wrong = [one for one in found if not one.within(truth.limit)]
    if wrong or truth.mixes:
        one = wrong[0] if wrong else found[0]
        why = "the model mixes samples, and it answered" if truth.mixes else f"gradient of {one.parameter!r}"
        errors = f"relative error {one.norm_error:.1e} in the norms, {one.grad_error:.1e} in the gradient"
        return row | {"status": "wrong", "reason": f"{why}; {errors}"}
    return row
