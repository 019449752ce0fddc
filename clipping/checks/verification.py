"""Verify a backend on a model: compare two samples with the definition (`core.reference`), in training mode.

Each sample draws the same random numbers alone and in the batch (`clipping.numerics.rng_replay`).

Errors are relative and norm-wise. For a parameter, ‖Δ‖ / max(‖reference‖, floor), where the floor is a thousandth of
the whole gradient's norm: else a gradient that is zero but for rounding (a bias before a normalisation) would fail. For
norms, |Δ_i| / max(‖g_i‖, floor), so that a larger norm does not hide the error of a sample.

A record whose terms cancel may consist of rounding, and is clipped by the bound n̂_i on its norm. Then the definition
clips by the same bound, the square of its norm may differ by the error in the bound, and the floor is at least
c_i (n̂_i - ‖g_i‖).

Functions take:
    backend: the one to verify.
    samples: how many of them to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from clipping.core.autograd import hooks_of, named_versions
from clipping.core.batches import forward, leading_dimension, map_tensors
from clipping.core.clip_functions import ClipFunction, Flat
from clipping.core.dtypes import formats
from clipping.core.reference import definition
from clipping.core.types import ClippedGradient, Problem, UnsupportedModel
from clipping.numerics import kernels
from clipping.numerics.rng_replay import Draws, same_for_each

if TYPE_CHECKING:
    from clipping.backends.base import Backend

FLOOR = 1e-3
CAST_TOLERANCE = 1e-6
"""For a model in float64 that may cast to float32 itself (the RMSNorm of Llama)."""
EXACT = 1e-9
"""For a computation in float64 throughout."""
ROUNDINGS, FLIPS = 8, 2e-2
"""Relative error of a norm that rounding explains: `ROUNDINGS` unit roundoffs of the coarsest dtype, at least `FLIPS`.

A norm is the root of a sum of many squares, whose roundings mostly cancel. A sum of gradients is rounded when formed
and again when stored. `FLIPS`: a pre-activation within rounding of zero may pass a ReLU in a batch of one and not in
one of two. This changes a small layer's gradient by one unit's share. In every dtype an error of 5 % in one sample's
norm is detected."""
SPREAD = 4
"""Many layers of ReLUs add up such differences beyond any multiple of u (ResNet18 in bfloat16). The definition's
distance from its own answer in float64 then measures the arithmetic; this multiple of it is allowed."""
GRADIENTS = {torch.float32: FLIPS, torch.float16: 1.5e-1, torch.bfloat16: 4e-1}
"""For models that cannot be computed in float64: the error seen on ResNet18, and half more."""
BY_HAND = (
    "its .grad is written within the backward pass, as by a reversible layer, and autograd returns no gradient",
    "let autograd compute it (torch.utils.checkpoint, use_reentrant=False), or freeze it",
)
"""Reason and remedy."""


class Limit(NamedTuple):
    """The relative errors of norms and gradients that rounding explains."""

    norm: float
    grad: float

    def __str__(self) -> str:
        return f"{self.norm:.0e}" if self.norm == self.grad else f"{self.norm:.1e} and {self.grad:.1e}"


class Agreement(NamedTuple):
    """Relative errors of a result, and the parameter with the largest gradient error."""

    norm_error: float
    grad_error: float
    parameter: str

    def within(self, limit: Limit | float) -> bool:
        """Whether both errors are at most `limit`; NaN is not.

        Args:
            limit: one for both, or one for each.
        """
        norm, grad = limit if isinstance(limit, Limit) else (limit, limit)
        return self.norm_error <= norm and self.grad_error <= grad


def limit_of(dtypes: Iterable[torch.dtype]) -> Limit:
    """The errors that rounding explains in a computation in these dtypes, if it cannot run in wider ones.

    Args:
        dtypes: of all tensors that took part; at least one.
    """
    limits = [_limit_of(dtype) for dtype in dtypes]
    return Limit(max(limit.norm for limit in limits), max(limit.grad for limit in limits))


def _limit_of(dtype: torch.dtype) -> Limit:
    if dtype == torch.float64:
        return Limit(EXACT, EXACT)
    norm = max(FLIPS, ROUNDINGS * torch.finfo(dtype).eps / 2)
    return Limit(norm, GRADIENTS.get(dtype, max(GRADIENTS.values())))


class WrongGradient(Exception):
    """A backend's first batch differs from the microbatch oracle: it must not be used on this model.

    Args:
        hooks: the number of hooks on parameters.
    """

    def __init__(self, backend: str, agreement: Agreement, limit: Limit, hooks: int = 0) -> None:
        self.agreement = agreement
        remedy = "use the microbatch or vmap backend, and please report the model"
        if hooks:
            remedy = (
                f"hooks on parameters ({hooks} of register_hook) may change gradients: remove them, or use microbatch"
            )
        super().__init__(
            f"{backend} is not exact on this model: relative error {agreement.norm_error:.1e} in the norms and "
            f"{agreement.grad_error:.1e} in the gradient of {agreement.parameter!r}, expected at most {limit}; {remedy}"
        )


def compare(result: ClippedGradient, reference: ClippedGradient, clip: ClipFunction | None = None) -> Agreement:
    """Errors of `result` relative to `reference`. A missing norm counts as error 0.

    If the numbers of norms differ, both errors are infinite.

    Args:
        reference: the oracle's result, on the same batch.
        clip: of both; where clipped gradients cancel in the sum, its errors are then relative to the largest of them.
    """
    norm_error = 0.0
    if result.norms is not None and reference.norms is not None:
        if result.norms.shape != reference.norms.shape:
            return Agreement(float("inf"), float("inf"), "")
        norm_error = _worst(result.norms.double(), reference.norms.double(), reference.bounds)
    if not reference.grads:
        return Agreement(norm_error, 0.0, "")
    whole = float(torch.linalg.vector_norm(torch.stack([_norm(g) for g in reference.grads.values()])))
    floor = max(FLOOR * max(whole, _largest(reference.norms, clip)), _doubted(reference, clip))
    if result.grads.keys() != reference.grads.keys():
        different = sorted(result.grads.keys() ^ reference.grads.keys())
        return Agreement(norm_error, float("inf"), different[0])
    errors = {n: _ratio(_norm(result.grads[n] - g), _norm(g), floor) for n, g in reference.grads.items()}
    worst = max(errors, key=lambda n: float("inf") if errors[n] != errors[n] else errors[n])
    return Agreement(norm_error, errors[worst], worst)


def verify(backend: Backend, inputs: Any, targets: Any) -> None:
    """Compare `backend` with the oracle on the first two samples of a batch.

    Raises:
        WrongGradient: an error above the limit, or NaN.
        UnsupportedModel: the backward pass writes to a parameter's `.grad`.
    """
    agreement, limit = agreement_with_oracle(backend, inputs, targets)
    if not agreement.within(limit):
        raise WrongGradient(backend.name, agreement, limit, hooks_of(backend.model.parameters()))


def says_something(result: ClippedGradient) -> bool:
    """Whether a sample that is compared has a gradient: where all losses are 0, any backend agrees."""
    return result.norms is None or bool(result.norms[:2].any())


def agreement_with_oracle(backend: Backend, inputs: Any, targets: Any, samples: int = 2) -> tuple[Agreement, Limit]:
    """The errors on the first `samples` samples, and the limit that rounding explains.

    Computed in float64 if the model can be cast, so that larger errors come from the method; else in the model's own
    arithmetic. A backend that clips the means of m samples is compared with its own definition, on m times as many
    samples. Random numbers from numpy or Python cannot be drawn per sample: if they cause a difference, eval mode
    decides.
    """
    return _on_few(_agreement, backend, inputs, targets, samples)


def agreement_in_own_arithmetic(
    backend: Backend, inputs: Any, targets: Any, samples: int = 2
) -> tuple[Agreement, Limit]:
    """As `agreement_with_oracle`, in the dtypes of training, whose kernels differ from those of float64.

    See `ROUNDINGS` and `SPREAD` for the limit.
    """
    return _on_few(_agreement_as_it_is, backend, inputs, targets, samples)


def _on_few(of: _Check, backend: Backend, inputs: Any, targets: Any, samples: int) -> tuple[Agreement, Limit]:
    few = map_tensors(lambda x: x[: samples * backend.together], (inputs, targets))
    before = Draws()
    with kernels.overwriting.of_any_size():
        found, limit, drew = of(backend, few)
    if drew and not found.within(limit):
        with before.again(), in_eval(backend.model):
            found, limit, _ = of(backend, few)
    return found, limit


def _agreement(backend: Backend, few: Any) -> tuple[Agreement, Limit, bool]:
    both = _in_float64(backend, few)
    if both is None:
        both = _both(backend, *few)
    results = {x.dtype for x in (*both.reference.grads.values(), both.reference.losses)}
    is_wide = results == {torch.float64} and both.formats <= {torch.float64, torch.float32}
    limit = Limit(CAST_TOLERANCE, CAST_TOLERANCE) if is_wide else limit_of(both.formats)
    return both.agreement(), limit, both.drew


def _agreement_as_it_is(backend: Backend, few: Any) -> tuple[Agreement, Limit, bool]:
    both = _both(backend, *few)
    found, loose = both.agreement(), limit_of(both.formats)
    limit = Limit(loose.norm, min(loose.norm, loose.grad))
    if found.within(limit):
        return found, limit, both.drew
    wide = _in_float64(backend, few)
    if wide is None:
        return found, loose, both.drew
    own = compare(both.reference, wide.reference, both.clip)
    limit = Limit(max(limit.norm, SPREAD * own.norm_error), max(limit.grad, SPREAD * own.grad_error))
    return found, limit, both.drew


def _in_float64(backend: Backend, few: Any) -> _Both | None:
    """Both results in float64; None if the model cannot be cast, or its losses keep another dtype."""
    wide = map_tensors(lambda x: x.double() if x.is_floating_point() else x, few)
    try:
        with _cast_to_float64(backend.model):
            both = _both(backend, *wide)
    except (RuntimeError, TypeError, NotImplementedError):  # the model casts, or the device has no float64
        return None
    return both if both.reference.losses.dtype == torch.float64 else None


class _Both(NamedTuple):
    """Both results, their clipping, the dtypes of the computation, and whether numbers were drawn outside of torch."""

    result: ClippedGradient
    reference: ClippedGradient
    clip: ClipFunction
    formats: set[torch.dtype]
    drew: bool

    def agreement(self) -> Agreement:
        """The errors of the result."""
        return compare(self.result, self.reference, self.clip)


_Check = Callable[[Any, Any], tuple[Agreement, Limit, bool]]


def _both(backend: Backend, inputs: Any, targets: Any) -> _Both:
    clip = backend.clip if backend.private else Flat(max_grad_norm=float("inf"))

    def copied() -> Any:
        """The batch, for one run: the model or the loss may write to it."""
        return map_tensors(Tensor.clone, (inputs, targets))

    with backend.moving.checking():
        with _the_same(backend, leading_dimension(inputs, targets)) as seeded:
            result = backend(*copied())  # first, because its refusals give a reason
            drew = seeded.used_outside_of_torch()
        before = _written_gradients(backend.model)
        reference = definition(
            backend.model,
            backend.loss_fn,
            *copied(),
            clip=clip,
            together=backend.together,
            bounds=result.bounds,
            around=partial(_the_same, backend, 1),
        )
        if odd := _written_gradients(backend.model).items() - before.items():
            raise UnsupportedModel(backend.name, [Problem(min(odd)[0], *BY_HAND)])
        first, target = map_tensors(lambda x: x[:1], copied())
        with _the_same(backend, 1), torch.enable_grad():
            losses = backend.loss_fn(forward(backend.model, first), target)
    return _Both(result, reference, clip, formats(losses, *reference.grads.values()), drew)


def _written_gradients(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity and version of each `.grad` by the parameter's name."""
    return named_versions({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@contextmanager
def _the_same(backend: Backend, batch_size: int) -> Iterator[Draws]:
    """Context in which each sample draws the same numbers; what the step writes to is restored afterwards."""
    every = backend.model.parameters()  # a teacher is frozen, and the first forward pass may already write to it
    with backend.moving.repeated(Draws(), also=every), same_for_each(batch_size) as seeded:
        yield seeded


@contextmanager
def reading_float64(model: nn.Module) -> Iterator[None]:
    """Inside, modules read float64 copies; the parameters are not touched.

    A cast in place would cut parameters off from an earlier forward pass, and they would get no gradient.
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
    if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:  # RNNs read a list of their own
        module._flat_weights[module._flat_weights_names.index(name)] = x


@contextmanager
def _cast_to_float64(model: nn.Module) -> Iterator[None]:
    """Cast parameters and buffers to float64 in place. Must not be used while a graph of them is still needed.

    Parameters have no `.grad` inside, because its dtype could not match.
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
        torch.clear_autocast_cache()  # no gradient passes from casts of an earlier pass to the parameters


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Put all modules in eval mode, and restore their modes afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _largest(norms: Tensor | None, clip: ClipFunction | None) -> float:
    """The norm of the largest clipped gradient; 0 if it is unknown."""
    if norms is None or clip is None or not len(norms):
        return 0.0
    sizes = norms.clamp(max=clip.sensitivity) if clip.per_layer else clip.factors(norms) * norms
    return float(sizes.nan_to_num(0.0, 0.0, 0.0).max())


def _doubted(reference: ClippedGradient, clip: ClipFunction | None) -> float:
    """The largest c_i (n̂_i - ‖g_i‖): the part of a clipped gradient that rounding may make up; 0 if it is unknown."""
    if reference.bounds is None or reference.norms is None or clip is None or not len(reference.norms):
        return 0.0
    doubted = clip.factors(reference.bounds) * (reference.bounds - reference.norms).clamp(min=0)
    return float(doubted.nan_to_num(0.0, 0.0, 0.0).max())


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.double())


def _worst(found: Tensor, right: Tensor, bounds: Tensor | None) -> float:
    """The largest relative error of norms [B]; small norms count as the floor.

    A bound n̂ says that the square of a norm n has an error of up to n̂² - n², upwards or downwards. So a norm that is
    much too large is not explained by its bound, which is as large.
    """
    if not len(right):
        return 0.0
    scale = right.abs().clamp(min=FLOOR * float(right.abs().max()))
    differences = (found - right).abs()
    if bounds is not None:
        bounds = bounds.double()
        least = (2 * found.square() - bounds.square()).clamp(min=0).sqrt()
        differences = torch.where((least <= right) & (right <= bounds), 0.0, differences)
    return float(torch.where((differences == 0) & (scale == 0), 0.0, differences / scale).max())


def _ratio(difference: Tensor, reference: Tensor, floor: float) -> float:
    scale = max(float(reference), floor)
    if scale == 0:
        return 0.0 if float(difference) == 0 else float("inf")
    return float(difference) / scale
