"""Types of clipping backends: loss function, clipped gradient, unsupported model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

LossFunction = Callable[[Any, Any], Tensor]
Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class ClippedGradient:
    """The result of one call.

    Attributes:
        grads: parameter name -> Σ_i c_i g_i, of the parameter's shape; without noise or division by B. Zeros if the
            loss does not depend on the parameter. A tied parameter appears once, under its first name.
        norms: [B] ‖g_i‖ before clipping, float32 or wider; None from `nonprivate`.
        losses: [B] ℓ_i, detached.
        bounds: [B] n̂_i ≥ ‖g_i‖, which the factors c_i were computed from (`clipping.numerics.rounding_bounds`); None if
            they were computed from other numbers.
    """

    grads: dict[str, Tensor]
    norms: Tensor | None
    losses: Tensor
    bounds: Tensor | None = None


class Problem(NamedTuple):
    """Why a backend refuses a model: the module, the reason, and a remedy."""

    module: str
    reason: str
    remedy: str


class UnsupportedModel(Exception):
    """Raised when a backend cannot clip this model exactly.

    Attributes:
        problems: one entry for each module at fault.
    """

    def __init__(self, backend: str, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        lines = "; ".join(f"{p.module}: {p.reason} (remedy: {p.remedy})" for p in self.problems)
        super().__init__(f"{backend} does not support this model: {lines}")
