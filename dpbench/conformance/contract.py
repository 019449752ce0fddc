"""Cases for the interface: clipping functions, batches, precision, side effects.

Each is a `Check` on one small network of convolution, normalisation and linear layer.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipping import Agreement, Automatic, Backend, ClipFunction, Flat, GlobalBound, PerLayer, UnsupportedModel
from clipping.numerics.products import full_precision
from dpbench.conformance.cases import Setup, cross_entropy, images
from dpbench.conformance.judging import NONE, TOLERANCE, Check, Measured, Wrong, answered, hold, oracle, placed, worse
from dpbench.conformance.modules import Skipping

CLIPPING: dict[str, ClipFunction] = {
    "flat": Flat(0.5),
    "flat with a stabiliser": Flat(0.5, stabiliser=0.01),
    "automatic": Automatic(0.5),
    "automatic with a stabiliser": Automatic(0.5, stabiliser=0.01),
    "global bound": GlobalBound(0.5, bound=1.0),
    "per layer": PerLayer(0.5),
}

HALF = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest relative error of each norm of a model in this precision, compared with float64."""


def median(setup: Setup) -> float:
    """A threshold that clips some samples and not others."""
    norms = oracle(setup, Flat(1.0)).norms
    assert norms is not None
    return float(norms.median())


def network(device: str, batch: int = 5) -> Setup:
    """A small network on five samples, with squared error.

    Args:
        batch: number of samples.
    """
    layers = (nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    return placed(images(*layers, batch=batch), device)


def classifier(device: str) -> Setup:
    """The network on five samples, with cross entropy."""
    model, x, _, _ = network(device)
    return model, x, torch.tensor([0, 1, 2, 1, 0], device=device), cross_entropy


def clipping_function(clip: ClipFunction, backend: type[Backend], device: str) -> Measured:
    """The backend is exact with this clipping function."""
    return _exact(backend, network(device), clip)


def sensitivity(clip: ClipFunction, backend: type[Backend], device: str) -> Measured:
    """Removing any one sample moves the sum by at most `clip.sensitivity`, tested as a black box."""
    model, x, y, loss = network(device)
    x[0] *= 100
    with backend(model, loss, clip=clip, verify=False) as b:
        whole = b(x, y).grads
        for left_out in range(len(x)):
            keep = [i for i in range(len(x)) if i != left_out]
            rest = b(x[keep], y[keep]).grads
            moved = float(torch.stack([(whole[n] - rest[n]).norm() for n in whole]).norm())
            if not moved <= clip.sensitivity * (1 + TOLERANCE):
                raise Wrong(f"removing a sample moves the sum by {moved:.3g}, sensitivity {clip.sensitivity:g}")
        return Measured(coverage=dict(b.coverage))


def one_sample(backend: type[Backend], device: str) -> Measured:
    """A batch of one."""
    model, x, y, loss = classifier(device)
    return _exact(backend, (model, x[:1], y[:1], loss), Flat(median((model, x, y, loss))))


def tied_norms(backend: type[Backend], device: str) -> Measured:
    """Two samples twice each, and C equal to the norm of one: the edge of min(1, C/‖g‖)."""
    model, x, y, loss = classifier(device)
    setup = model, x[[0, 1, 1, 0]], y[[0, 1, 1, 0]], loss
    norms = oracle(setup, Flat(1.0)).norms
    assert norms is not None
    return _exact(backend, setup, Flat(float(norms[1])))


def zero_gradient(backend: type[Backend], device: str) -> Measured:
    """A sample with zero loss and gradient (cross entropy's ignore_index): no 0/0 may occur."""
    setup = classifier(device)
    clip = Flat(median(setup))
    setup[2][2] = -100
    out, coverage = answered(backend, setup, clip)
    agreement = hold(out, oracle(setup, clip), TOLERANCE)
    if out.norms is None or out.norms[2] != 0:
        raise Wrong("expected norm 0 for a zero gradient", agreement)
    return Measured(agreement, coverage)


def empty(backend: type[Backend], device: str) -> Measured:
    """An empty batch, as from Poisson sampling, gives zeros, and no NaN."""
    model, x, y, loss = classifier(device)
    out, _ = answered(backend, (model, x[:0], y[:0], loss), Flat(1.0))
    if out.norms is None or out.norms.shape != (0,) or out.losses.shape != (0,):
        raise Wrong("expected norms and losses of shape [0]")
    for name, p in model.named_parameters():
        if name not in out.grads or out.grads[name].shape != p.shape or not (out.grads[name] == 0).all():
            raise Wrong(f"expected zeros for {name}")
    return Measured()


def changing_sizes(backend: type[Backend], device: str) -> Measured:
    """Batches of every size, and of one size with other samples, on one open backend: no state remains."""
    model, x, y, loss = network(device, batch=6)
    clip = Flat(median((model, x, y, loss)))
    agreement, coverage = NONE, dict[str, float]()
    with backend(model, loss, clip=clip, verify=False) as b:
        for samples in (slice(0, 3), slice(3, 6), slice(0, 0), slice(0, 1), slice(0, 6), slice(4, 6), slice(0, 3)):
            out = b(x[samples], y[samples])
            if len(x[samples]):
                reference = oracle((model, x[samples], y[samples], loss), clip)
                where = f" (samples {samples.start} to {samples.stop - 1})"
                agreement = worse(agreement, hold(out, reference, TOLERANCE, where))
                coverage = dict(b.coverage)
    return Measured(agreement, coverage)


def changing_path(at_first: bool, backend: type[Backend], device: str) -> Measured:
    """A layer has a norm only in the step that uses it, whichever of two steps that is.

    Args:
        at_first: whether the first step leaves the layer out, else the second.
    """
    skipping = Skipping().double()
    x, y = torch.randn(5, 6).double(), torch.tensor([0, 1, 2, 0, 1])
    setup = model, x, y, loss = placed((skipping, x, y, cross_entropy), device)
    clip = Flat(median(setup))
    with backend(model, loss, clip=clip, verify=False) as b:
        agreement = NONE
        for skipping.all_of_it in (at_first, not at_first):
            where = f" of the step {'with' if skipping.all_of_it else 'without'} the layer"
            agreement = worse(agreement, hold(b(x, y), oracle(setup, clip), TOLERANCE, where))
        return Measured(agreement, dict(b.coverage))


def column_of_losses(backend: type[Backend], device: str) -> Measured:
    """A loss shaped [B, 1] would broadcast against factors [B] to [B, B]: raises ValueError or UnsupportedModel."""
    model, x, y, loss = classifier(device)
    try:
        with backend(model, lambda outputs, y: loss(outputs, y)[:, None], clip=Flat(1.0), verify=False) as b:
            b(x, y)
    except (ValueError, UnsupportedModel):
        return Measured()
    raise Wrong("a loss shaped [B, 1] is taken, not refused")


def precision(dtype: torch.dtype, backend: type[Backend], device: str) -> Measured:
    """Norms of a model in `dtype`, accumulated in float32 or wider.

    Args:
        dtype: of the model.
    """
    return _norms_in(dtype, backend, network(device), device)


def overflow(backend: type[Backend], device: str) -> Measured:
    """Gradients in float16 with squares, and a squared norm, beyond float16."""
    # 8 entries of 300: each fits in float16, its square does not
    model = nn.Linear(16, 8).double()
    x, y = torch.randn(5, 16).double(), torch.zeros(5, 8).double()
    setup: Setup = (model, x, y, lambda outputs, targets: (outputs - targets).sum(1) * 300)
    return _norms_in(torch.float16, backend, placed(setup, device), device)


def leaves_the_model(backend: type[Backend], device: str) -> Measured:
    """Parameters, modules and the batch are unchanged, while open and after closing; `.grad` stays the caller's."""
    model, x, _, _ = images(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))
    y = torch.tensor([0, 1, 2, 1, 0])
    model, x, y, loss = placed((model, x, y, cross_entropy), device)
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)  # type: ignore[index]
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = _state(model)
    with backend(model, loss, clip=Flat(0.5), verify=False) as b:
        first, second = b(x, y), b(x, y)
    after = _state(model)
    for name, state in before.items():
        if after.get(name) != state:
            raise Wrong(f"{name} is not as it was found: {_difference(state, after.get(name, {}))}")
    if any(not torch.equal(p, values[name]) for name, p in model.named_parameters()):
        raise Wrong("the parameters have other values")
    if not (model[0].weight.grad == 7).all():  # type: ignore[index]
        raise Wrong("0.weight.grad has other values")
    if left := sorted({*vars(x), *vars(y)}):
        raise Wrong(f"the batch that was handed in has {left} on it")
    agreement = hold(first, oracle((model, x, y, loss), Flat(0.5)), TOLERANCE)
    return Measured(worse(agreement, hold(second, first, TOLERANCE, " of the same batch again")))


def _state(model: nn.Module) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        states[name] = {
            "requires_grad": p.requires_grad,
            "attributes": sorted(vars(p)),
            "has .grad": p.grad is not None,
        }
    for name, m in model.named_modules():
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        states[f"module {name or 'itself'}"] = {
            "attributes": sorted(vars(m)),
            "training": m.training,
            "hooks": [len(kind) for kind in hooks],
            "full backward hooks": m._is_full_backward_hook,
            "inplace": getattr(m, "inplace", None),
            "type": type(m),
            "forward": m.forward.__func__,
        }
    return states


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}, now {after.get(key)}" for key, value in before.items() if after.get(key) != value)


def _exact(backend: type[Backend], setup: Setup, clip: ClipFunction) -> Measured:
    out, coverage = answered(backend, setup, clip)
    return Measured(hold(out, oracle(setup, clip), TOLERANCE), coverage)


def _norms_in(dtype: torch.dtype, backend: type[Backend], setup: Setup, device: str) -> Measured:
    """Compare norms of the model in `dtype` with those in float64."""
    exact, tolerance = oracle(setup, Flat(0.5)), HALF[dtype]
    with full_precision(convolutions=True):  # TF32 rounds with every method
        out, coverage = answered(backend, placed(setup, device, dtype), Flat(0.5))
    assert exact.norms is not None
    if out.norms is None or out.norms.shape != exact.norms.shape:
        raise Wrong(f"expected norms {list(exact.norms.shape)}")
    if out.norms.dtype.itemsize < 4:
        raise Wrong(f"norms are in {out.norms.dtype}, expected float32 or wider")
    errors: Tensor = (out.norms.double() - exact.norms).abs() / exact.norms
    if not bool((errors <= tolerance).all()):
        raise Wrong(f"relative error {float(errors.max()):.1e} in the norms, expected at most {tolerance:.0e}")
    if not all(bool(g.isfinite().all()) for g in out.grads.values()):
        raise Wrong("a gradient is not finite")
    return Measured(Agreement(float(errors.max()), 0.0, ""), coverage)


CHECKS: dict[str, Check] = {
    **{f"clipping: {name}": partial(clipping_function, clip) for name, clip in CLIPPING.items()},
    **{f"sensitivity: {name}": partial(sensitivity, clip) for name, clip in CLIPPING.items()},
    "batch: one sample": one_sample,
    "batch: tied norms": tied_norms,
    "batch: zero gradient": zero_gradient,
    "batch: empty": empty,
    "batch: changing sizes": changing_sizes,
    "a layer skipped in a later step": partial(changing_path, True),
    "a layer that a later step takes first": partial(changing_path, False),
    "a loss shaped [B, 1]": column_of_losses,
    **{f"norms in {str(dtype).removeprefix('torch.')}": partial(precision, dtype) for dtype in HALF},
    "norms beyond float16": overflow,
    "the model left as it was": leaves_the_model,
}
"""Name -> check; `dpbench.conformance.cases` has the models."""
