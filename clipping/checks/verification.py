"""Is a backend exact on this model? Two of its samples against the definition (`core.reference`), in the mode that
trains: each sample draws the same random numbers alone and beside the other one (`clipping.numerics.rng_replay`).

Errors are relative and norm-wise. For a parameter, ‖Δ‖ / max(‖reference‖, floor) with the floor a thousandth of the
whole gradient's norm: a parameter whose gradient vanishes but for rounding (a bias before a normalisation) would
otherwise fail for noise. For norms, |Δ_i| / max(‖g_i‖, floor): a fault of one sample is not hidden by a larger norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clipping.core.batches import forward, leading_dimension, map_tensors
from clipping.core.clip_functions import Flat
from clipping.core.dtypes import formats
from clipping.core.reference import definition
from clipping.core.types import ClippedGradient, Clips
from clipping.numerics import kernels
from clipping.numerics.rng_replay import Draws, same_for_each

FLOOR = 1e-3
CAST_TOLERANCE = 1e-6
"""For a model computed in float64 that may hold casts to float32 of its own (the RMSNorm of Llama)."""
LOWERED = 1e-3
"""By how much roundings in such a cast may lower a factor, and with it a sum (`clipping.numerics.rounding_bounds`)."""
EXACT = 1e-9
"""Of what is computed in float64 throughout."""
ROUNDINGS, FLIPS = 8, 2e-2
"""What rounding explains of a norm, and of most gradients: so many unit roundoffs u of the coarsest format (3.1e-2 in
bfloat16, whose u is 2⁻⁸), but at least `FLIPS`.

A norm is the root of a sum of many squares, whose roundings mostly cancel: exact backends came to 1.8 u at the worst
(7e-3; eight models, bfloat16 by autocast and throughout). A sum of gradients is rounded where it is formed, and once
more where it is stored: 2 to 5 u (1.1e-2 to 1.9e-2). `FLIPS`: in any format a pre-activation within rounding of zero
may pass a ReLU in a batch of one and not of two: one unit's worth of gradient, 1e-2 and more in small layers. So a
fault of 5 % in one sample's norm is found in every format."""
SPREAD = 4
"""Where many layers of ReLUs add up such differences no multiple of u holds: the gradient of one layer of ResNet18 in
bfloat16 is off by 0.29 in the definition itself, and vmap's differs from that by 0.22. Then the definition's distance
from its own answer in float64 says what this arithmetic does to this model; exact backends came to 3.4 of it (float16,
whose sums are formed twice), and this many are allowed."""
GRADIENTS = {torch.float32: FLIPS, torch.float16: 1.5e-1, torch.bfloat16: 4e-1}
"""Where that cannot be asked, for the model cannot be computed in float64: what was seen of ResNet18, and half more."""


class Limit(NamedTuple):
    """What rounding explains: relative errors of norms and of gradients."""

    norm: float
    grad: float

    def __str__(self) -> str:
        return f"{self.norm:.0e}" if self.norm == self.grad else f"{self.norm:.1e} and {self.grad:.1e}"


class Agreement(NamedTuple):
    """How far a result is from the reference: relative errors, and where the gradient's is largest."""

    norm_error: float
    grad_error: float
    parameter: str

    def within(self, limit: Limit | float) -> bool:
        """Both errors are numbers and at most `limit`: NaN is never within.

        Args:
            limit: one for both, or one for each.
        """
        norm, grad = limit if isinstance(limit, Limit) else (limit, limit)
        return self.norm_error <= norm and self.grad_error <= grad


def limit_of(dtypes: Iterable[torch.dtype]) -> Limit:
    """What rounding explains of what was computed in these formats, and cannot be computed in wider ones.

    Args:
        dtypes: of what took part; at least one.
    """
    limits = [_limit_of(dtype) for dtype in dtypes]
    return Limit(max(limit.norm for limit in limits), max(limit.grad for limit in limits))


def _limit_of(dtype: torch.dtype) -> Limit:
    if dtype == torch.float64:
        return Limit(EXACT, EXACT)
    norm = max(FLIPS, ROUNDINGS * torch.finfo(dtype).eps / 2)
    return Limit(norm, GRADIENTS.get(dtype, max(GRADIENTS.values())))


class WrongGradient(Exception):
    """A backend's first batch differs from the microbatch oracle: it must not be used on this model."""

    def __init__(self, backend: str, agreement: Agreement, limit: Limit) -> None:
        self.agreement = agreement
        super().__init__(
            f"{backend} is not exact on this model: relative error {agreement.norm_error:.1e} in the norms and "
            f"{agreement.grad_error:.1e} in the gradient of {agreement.parameter!r}, expected at most {limit}; "
            "use the microbatch or vmap backend, and please report the model"
        )


def compare(result: ClippedGradient, reference: ClippedGradient) -> Agreement:
    """Errors of `result` relative to `reference`; norms that either does not know are left out (error 0).

    Norms of another number than the reference's are of something else: both errors are infinite.

    Args:
        result: a backend's.
        reference: the oracle's, on the same batch.
    """
    norm_error = 0.0
    if result.norms is not None and reference.norms is not None:
        if result.norms.shape != reference.norms.shape:
            return Agreement(float("inf"), float("inf"), "")
        norm_error = _worst(result.norms.double(), reference.norms.double())
    if not reference.grads:
        return Agreement(norm_error, 0.0, "")
    floor = FLOOR * float(torch.linalg.vector_norm(torch.stack([_norm(g) for g in reference.grads.values()])))
    if result.grads.keys() != reference.grads.keys():
        different = sorted(result.grads.keys() ^ reference.grads.keys())
        return Agreement(norm_error, float("inf"), different[0])
    errors = {n: _ratio(_norm(result.grads[n] - g), _norm(g), floor) for n, g in reference.grads.items()}
    worst = max(errors, key=lambda n: float("inf") if errors[n] != errors[n] else errors[n])
    return Agreement(norm_error, errors[worst], worst)


def verify(backend: Clips, inputs: Any, targets: Any, samples: int = 2) -> Agreement:
    """Compare `backend` with the oracle on the first `samples` samples of a batch.

    Args:
        backend: the one that is doubted.
        inputs, targets: of a batch; every tensor [B, ...].
        samples: how many of them to compare on.

    Raises:
        WrongGradient: an error above the limit, or one that is not a number.
    """
    agreement, limit = agreement_with_oracle(backend, inputs, targets, samples)
    if not agreement.within(limit):
        raise WrongGradient(backend.name, agreement, limit)
    return agreement


def agreement_with_oracle(backend: Clips, inputs: Any, targets: Any, samples: int = 2) -> tuple[Agreement, Limit]:
    """The errors on the first `samples` samples, and what rounding explains of them.

    A backend that clips the means of several samples is held to its own definition, on so many times as many samples.
    Computed in float64, to which the model is cast meanwhile, so that an error of any size is one of the method; in the
    model's own arithmetic where it cannot be cast. What numpy or Python draws cannot be had by sample: if that makes
    them differ, eval mode decides.

    Args:
        backend: the one that is doubted.
        inputs, targets: of a batch; every tensor [B, ...].
        samples: how many of them to compare on.
    """
    return _on_few(_agreement, backend, inputs, targets, samples)


def agreement_in_own_arithmetic(backend: Clips, inputs: Any, targets: Any, samples: int = 2) -> tuple[Agreement, Limit]:
    """The same in the formats in which the model is trained, where other kernels run than in float64.

    Both sides compute in them. The limit: see `ROUNDINGS` and `SPREAD`.

    Args:
        backend: the one that is doubted.
        inputs, targets: of a batch; every tensor [B, ...].
        samples: how many of them to compare on.
    """
    return _on_few(_agreement_as_it_is, backend, inputs, targets, samples)


def _on_few(of: _Check, backend: Clips, inputs: Any, targets: Any, samples: int) -> tuple[Agreement, Limit]:
    few = map_tensors(lambda x: x[: samples * backend.together], (inputs, targets))
    before = Draws()
    with kernels.overwriting.of_any_size():
        found, limit, drew = of(backend, few)
    if drew and not found.within(limit):
        with before.again(), in_eval(backend.model):
            found, limit, _ = of(backend, few)
    return found, limit


def _agreement(backend: Clips, few: Any) -> tuple[Agreement, Limit, bool]:
    both = _in_float64(backend, few)
    if both is None:
        both = _both(backend, *few)
    if {g.dtype for g in both.reference.grads.values()} | {both.reference.losses.dtype} == {torch.float64}:
        limit = Limit(CAST_TOLERANCE, LOWERED if torch.float32 in both.formats else CAST_TOLERANCE)
        if both.formats <= {torch.float64, torch.float32}:
            return compare(both.result, both.reference), limit, both.drew
    return compare(both.result, both.reference), limit_of(both.formats), both.drew


def _agreement_as_it_is(backend: Clips, few: Any) -> tuple[Agreement, Limit, bool]:
    both = _both(backend, *few)
    found, loose = compare(both.result, both.reference), limit_of(both.formats)
    limit = Limit(loose.norm, min(loose.norm, loose.grad))
    if found.within(limit):
        return found, limit, both.drew
    wide = _in_float64(backend, few)
    if wide is None:
        return found, loose, both.drew
    own = compare(both.reference, wide.reference)
    limit = Limit(max(limit.norm, SPREAD * own.norm_error), max(limit.grad, SPREAD * own.grad_error))
    return found, limit, both.drew


def _in_float64(backend: Clips, few: Any) -> _Both | None:
    """Both answers in float64; None if the model cannot be cast, or its losses are of another dtype all the same."""
    wide = map_tensors(lambda x: x.double() if x.is_floating_point() else x, few)
    try:
        with _cast_to_float64(backend.model):
            both = _both(backend, *wide)
    except (RuntimeError, TypeError, NotImplementedError):  # a cast of the model's own, or a device without float64
        return None
    return both if both.reference.losses.dtype == torch.float64 else None


class _Both(NamedTuple):
    """The two answers, in which formats the losses were computed, and whether anything was drawn outside of torch."""

    result: ClippedGradient
    reference: ClippedGradient
    formats: set[torch.dtype]
    drew: bool


_Check = Callable[[Any, Any], tuple[Agreement, Limit, bool]]


def _both(backend: Clips, inputs: Any, targets: Any) -> _Both:
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
    first, target = map_tensors(lambda x: x[:1], (inputs, targets))
    with same_for_each(1), torch.enable_grad():
        losses = backend.loss_fn(forward(backend.model, first), target)
    return _Both(result, reference, formats(losses, *reference.grads.values()), drew)


@contextmanager
def reading_float64(model: nn.Module) -> Iterator[None]:
    """Its modules read copies of float64 meanwhile. The parameters are not touched: a cast in place would cut them off
    from what an earlier forward pass computed, and its gradients would be none.

    Args:
        model: whose modules hold other parameters and buffers meanwhile.
    """
    copies = {id(x): _copied(x) for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()}
    held: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for kind in kinds:
                for name, x in kind.items():
                    if id(x) in copies:
                        _hold(module, kind, name, copies[id(x)])
                        held.append((module, kind, name, x))
        yield
    finally:
        for each in held:
            _hold(*each)


def _copied(x: Tensor) -> Tensor:
    wide = x.detach().double()
    return nn.Parameter(wide, x.requires_grad) if isinstance(x, nn.Parameter) else wide


def _hold(module: nn.Module, kind: dict[str, Any], name: str, x: Tensor) -> None:
    kind[name] = x
    if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:  # it reads a list of its own
        module._flat_weights[module._flat_weights_names.index(name)] = x


@contextmanager
def _cast_to_float64(model: nn.Module) -> Iterator[None]:
    """Its parameters and buffers are of float64 meanwhile, for whoever holds them; of no graph that is still wanted.

    A parameter has no `.grad` meanwhile: none of another dtype can be put back.
    """
    before = [(t, t.data, t.grad) for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    try:
        for t, data, _ in before:
            t.grad = None
            t.data = data.double()
        yield
    finally:
        for t, data, grad in before:
            t.grad = None
            t.data = data
            t.grad = grad


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """All of its modules are in eval mode meanwhile.

    Args:
        model: any module.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _norm(x: Tensor, order: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x.double(), order)


def _worst(found: Tensor, right: Tensor) -> float:
    """The largest relative error of norms [B], a small one's beside the floor."""
    if not len(right):
        return 0.0
    scale = right.abs().clamp(min=FLOOR * float(right.abs().max()))
    differences = (found - right).abs()
    return float(torch.where((differences == 0) & (scale == 0), 0.0, differences / scale).max())


def _ratio(difference: Tensor, reference: Tensor, floor: float) -> float:
    scale = max(float(reference), floor)
    if scale == 0:
        return 0.0 if float(difference) == 0 else float("inf")
    return float(difference) / scale
