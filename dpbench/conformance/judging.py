"""Compares a backend's result with the oracle's: measurements of a check, and the error for a wrong result."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipping import Agreement, Backend, ClipFunction, ClippedGradient, UnsupportedModel, compare
from clipping.core.batches import map_tensors
from clipping.core.dtypes import norm_dtype
from clipping.core.reference import definition
from dpbench.conformance.cases import Setup
from dpbench.errors import in_words
from dpbench.models.adapt import moved

TOLERANCE = 1e-9
"""Relative, in float64."""


@dataclass(frozen=True)
class Verdict:
    """The result of a backend on a case.

    Attributes:
        case: its name.
        result: "exact"; "refuses", by `UnsupportedModel`; or "wrong", also for any other error.
        norm_error, grad_error: relative, the largest measured; None if nothing was.
        coverage: shares of the parameters by route, empty if nothing ran.
        reason: why not exact, in one line.
        raised: whether it was an unexpected exception rather than a wrong number.
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
    """The errors of a result within tolerance."""

    agreement: Agreement = NONE
    coverage: dict[str, float] = field(default_factory=dict)


class Wrong(Exception):
    """A wrong result, in one line; with the errors, if any."""

    def __init__(self, said: str, agreement: Agreement | None = None) -> None:
        super().__init__(said)
        self.norm_error = agreement.norm_error if agreement else None
        self.grad_error = agreement.grad_error if agreement else None


Check = Callable[[type[Backend], str], Measured]
"""(backend, device) -> what was measured; raises `Wrong` or `UnsupportedModel`."""


def judge(name: str, check: Check, backend: type[Backend], device: str = "cpu", seed: int = 0) -> Verdict:
    """Run one check from a fixed seed; restores the global random state.

    Args:
        name: of the case.
        check: to run on the backend.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            measured = check(backend, device)
        except UnsupportedModel as refused:
            return Verdict(name, "refuses", reason=str(refused))
        except Wrong as wrong:
            return Verdict(name, "wrong", wrong.norm_error, wrong.grad_error, reason=str(wrong))
        except Exception as error:  # any error of a backend is its result; the other cases continue
            return Verdict(name, "wrong", reason=f"raises {in_words(error)}", raised=True)
    return Verdict(name, "exact", measured.agreement.norm_error, measured.agreement.grad_error, measured.coverage)


def placed(setup: Setup, device: str, dtype: torch.dtype | None = None) -> Setup:
    """Move the model, batch and loss to a device; the model itself moves.

    Args:
        dtype: of floating tensors; None for their own.
    """
    model, inputs, targets, loss_fn = setup
    inputs, targets = map_tensors(lambda x: moved(x, device, dtype or x.dtype), (inputs, targets))
    return model.to(device, dtype), inputs, targets, loss_fn


def oracle(setup: Setup, clip: ClipFunction, together: int = 1) -> ClippedGradient:
    """The result of one sample at a time; for a backend that clips means, by its own definition.

    Args:
        together: how many samples are averaged before clipping.
    """
    model, inputs, targets, loss_fn = setup
    return definition(model, loss_fn, inputs, targets, clip=clip, together=together)


def answered(backend: type[Backend], setup: Setup, clip: ClipFunction) -> tuple[ClippedGradient, dict[str, float]]:
    """The backend's result on one batch, and the coverage."""
    model, inputs, targets, loss_fn = setup
    with backend(model, loss_fn, clip=clip, verify=False) as b:
        return b(inputs, targets), dict(b.coverage)


def hold(out: ClippedGradient, reference: ClippedGradient, tolerance: float, where: str = "") -> Agreement:
    """The errors of `out`.

    Args:
        out: the backend's result.
        reference: the oracle's.
        tolerance: the largest relative error.
        where: on which batch, in words.

    Raises:
        Wrong: its form violates the interface, or an error is above the tolerance or not a number.
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
