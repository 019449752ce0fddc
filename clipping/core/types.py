"""What goes into a clipping backend and comes out of it: the loss, the clipped gradient, the reasons of a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from clipping.core.clip_functions import ClipFunction

LossFunction = Callable[[Any, Any], Tensor]
Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class ClippedGradient:
    """The result of one call.

    Attributes:
        grads: parameter name -> Σ_i c_i g_i, of the parameter's shape; no noise, no division by B. A parameter that
            the loss does not depend on has zeros. A tied parameter appears once, under its first name.
        norms: [B] ‖g_i‖ before clipping, float32 or wider; None from `nonprivate`, which knows none.
        losses: [B] ℓ_i, detached.
    """

    grads: dict[str, Tensor]
    norms: Tensor | None
    losses: Tensor


class Problem(NamedTuple):
    """One reason why a model is refused: where, why, and what would help."""

    module: str
    reason: str
    remedy: str


class UnsupportedModel(Exception):
    """A backend cannot treat this model exactly, and says so before a wrong number leaves it.

    Attributes:
        problems: every module concerned, with reason and remedy.
    """

    def __init__(self, backend: str, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        lines = "; ".join(f"{p.module}: {p.reason} (remedy: {p.remedy})" for p in self.problems)
        super().__init__(f"{backend} does not support this model: {lines}")


class Clips(Protocol):
    """A backend (`clipping.backends.base.Backend`) as those see it who call it to compare."""

    @property
    def name(self) -> str:
        """As `load_backend` takes it."""

    @property
    def private(self) -> bool:
        """Whether it clips; ordinary training does not."""

    @property
    def together(self) -> int:
        """Samples whose mean gradient is clipped as one."""

    model: nn.Module
    loss_fn: LossFunction
    clip: ClipFunction

    def __call__(self, inputs: Any, targets: Any) -> ClippedGradient: ...
