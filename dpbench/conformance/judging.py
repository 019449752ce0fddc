"""A backend's answer beside the oracle's: what a check measures, and what it raises when the answer is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clipping import Agreement, Backend, ClipFunction, ClippedGradient, UnsupportedModel, compare
from clipping.core.batches import map_tensors
from clipping.core.dtypes import norm_dtype
from clipping.core.reference import definition
from dpbench.conformance.cases import Setup

TOLERANCE = 1e-9
"""Relative, in float64."""

RESULTS = ("exact", "refuses", "wrong")


@dataclass(frozen=True)
class Verdict:
    """What a backend makes of a case.

    Attributes:
        case: its name.
        result: "exact"; "refuses", by `UnsupportedModel`; or "wrong", also if it raised anything else.
        norm_error, grad_error: relative, the largest that was measured; None if nothing was.
        coverage: shares of the parameters by route, empty if nothing ran.
        reason: why not exact, in one line.
        raised: an unexpected exception, no wrong number.
    """

    case: str
    result: str
    norm_error: float | None = None
    grad_error: float | None = None
    coverage: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    raised: bool = False


NONE = Agreement(0.0, 0.0, "")
"""Nothing was compared."""


@dataclass(frozen=True)
class Measured:
    """How far an answer was off, within tolerance."""

    agreement: Agreement = NONE
    coverage: dict[str, float] = field(default_factory=dict)


class Wrong(Exception):
    """An answer that is not the right one, in one line; with the errors if there are any."""

    def __init__(self, said: str, agreement: Agreement | None = None) -> None:
        super().__init__(said)
        self.agreement = agreement


Check = Callable[[type[Backend], str], Measured]
"""(backend, device) -> what was measured; raises `Wrong` or `UnsupportedModel`."""


def judge(name: str, check: Check, backend: type[Backend], device: str = "cpu", seed: int = 0) -> Verdict:
    """Run one check from a fixed seed; the global random state is left as it was.

    Args:
        name: of the case.
        check: what is asked of the backend.
        backend: a subclass of `clipping.Backend`.
        device: "cpu" or "cuda".
        seed: of weights and batch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            measured = check(backend, device)
        except UnsupportedModel as refused:
            return Verdict(name, "refuses", reason=str(refused))
        except Wrong as wrong:
            found = wrong.agreement
            if found is None:
                return Verdict(name, "wrong", reason=str(wrong))
            return Verdict(name, "wrong", found.norm_error, found.grad_error, reason=str(wrong))
        except Exception as error:  # whatever a backend raises is its own fault, and the other cases go on
            said = " ".join(f"{type(error).__name__}: {error}".split())
            return Verdict(name, "wrong", reason=f"raises {said}", raised=True)
    return Verdict(name, "exact", measured.agreement.norm_error, measured.agreement.grad_error, measured.coverage)


def placed(setup: Setup, device: str, dtype: torch.dtype | None = None) -> Setup:
    """The same model, batch and loss elsewhere; floating tensors in `dtype` if one is given. The model itself moves.

    Args:
        setup: of one case.
        device: "cpu" or "cuda".
        dtype: of floating tensors; None for their own.
    """

    def move(x: Tensor) -> Tensor:
        return x.to(device, dtype if dtype is not None and x.is_floating_point() else x.dtype)

    model, inputs, targets, loss_fn = setup
    inputs, targets = map_tensors(move, (inputs, targets))
    return model.to(device, dtype), inputs, targets, loss_fn


def opened(backend: type[Backend], model: nn.Module, loss_fn: Any, clip: ClipFunction, verify: bool = False) -> Backend:
    """The backend, without its own verification if that is not asked for.

    Args:
        backend: a subclass of `clipping.Backend`.
        model: of the case.
        loss_fn: (outputs, targets) -> [B].
        clip: norms [B] -> factors [B].
        verify: with the backend's own verification.
    """
    return backend(model, loss_fn, clip=clip, verify=verify)


def oracle(setup: Setup, clip: ClipFunction, together: int = 1) -> ClippedGradient:
    """One sample after the other; of a backend that clips means, its own definition.

    Args:
        setup: of one case.
        clip: norms [B] -> factors [B].
        together: samples whose mean gradient is clipped as one.
    """
    model, inputs, targets, loss_fn = setup
    return definition(model, loss_fn, inputs, targets, clip=clip, together=together)


def answered(backend: type[Backend], setup: Setup, clip: ClipFunction) -> tuple[ClippedGradient, dict[str, float]]:
    """One batch, and the coverage."""
    model, inputs, targets, loss_fn = setup
    with opened(backend, model, loss_fn, clip) as b:
        return b(inputs, targets), dict(b.coverage)


def hold(out: ClippedGradient, reference: ClippedGradient, tolerance: float, where: str = "") -> Agreement:
    """The errors of `out`.

    Args:
        out: the backend's answer.
        reference: the oracle's.
        tolerance: the largest relative error.
        where: on which batch, in words.

    Raises:
        Wrong: it has another form than the interface says, or an error is above the tolerance, or no number.
    """
    losses, norms = reference.losses, out.norms
    if norms is None or reference.norms is None or norms.shape != reference.norms.shape:
        raise Wrong(f"norms{where}: expected shape {list(losses.shape)}, got {_shape(norms)}")
    if norms.dtype.itemsize < norm_dtype(out.losses.dtype).itemsize:
        raise Wrong(f"norms{where}: expected float32 or wider, got {norms.dtype}")
    shapes = {name: list(g.shape) for name, g in out.grads.items()}
    expected = {name: list(g.shape) for name, g in reference.grads.items()}
    if shapes != expected:
        name = min(n for n in shapes.keys() | expected.keys() if shapes.get(n) != expected.get(n))
        raise Wrong(f"gradients{where}: {name} expected {expected.get(name)}, got {shapes.get(name)}")
    found = compare(out, reference)
    if not found.within(tolerance):
        raise Wrong(
            f"relative error{where} {found.norm_error:.1e} in the norms and {found.grad_error:.1e} in the gradient of "
            f"{found.parameter!r}, expected at most {tolerance:.0e}",
            found,
        )
    if out.losses.shape != losses.shape or not torch.allclose(
        out.losses.double(), losses.double(), rtol=tolerance, atol=tolerance
    ):
        raise Wrong(f"losses{where} are not the model's", found)
    return found


def worse(first: Agreement, second: Agreement) -> Agreement:
    """The larger of each error.

    Args:
        first, second: of two batches.
    """
    return Agreement(
        max(first.norm_error, second.norm_error),
        max(first.grad_error, second.grad_error),
        first.parameter if first.grad_error >= second.grad_error else second.parameter,
    )


def _shape(x: Tensor | None) -> list[int] | None:
    return None if x is None else list(x.shape)
