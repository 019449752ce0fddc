"""Compose phases of unlike steps: their ε (`accounting.varying`) and membership risk (`accounting.membership`).

Functions take:
    accountant: an accountant or its name.
    parts: (a `SubsampledGaussian`, its number of steps) for each phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accounting.base import Accountant, Guarantee
from accounting.mechanism import ArgumentError, SubsampledGaussian, whole
from accounting.registry import load_accountant

if TYPE_CHECKING:
    from accounting.varying import Part


@dataclass(frozen=True)
class Composition:
    """Steps of several kinds, one after the other, and the accountant for them.

    Args:
        accountant: computes ε.
        parts: each a mechanism, and the number of its steps.

    Methods take:
        delta: in [0, 1].

    Raises:
        ArgumentError: no parts, or an invalid one.
    """

    accountant: Accountant
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ArgumentError("parts", "to be at least one", self.parts)
        for part in self.parts:
            if not (isinstance(part, (tuple, list)) and len(part) == 2 and isinstance(part[0], SubsampledGaussian)):
                raise ArgumentError("parts", "to be pairs of a mechanism and its number of steps", part)
            whole("steps", part[1])

    def epsilon(self, *, delta: float) -> float:
        """ε of all steps."""
        return self.guarantee(delta=delta).epsilon

    def guarantee(self, *, delta: float) -> Guarantee:
        """ε with its kind and the bound that gave it.

        Raises:
            NoAnswer: the steps differ and the accountant is no upper bound, or the parts have different adjacency.
        """
        from accounting.varying import guarantee_of_parts  # imports numpy, which the simplest accountants do not need

        return guarantee_of_parts(self.accountant, self.parts, delta=delta)

    def risk(self, *, delta: float) -> dict[str, Any]:
        """`accounting.risk` of all steps."""
        from accounting.membership import risk_of_parts  # imports scipy, which is slow

        return risk_of_parts(self.accountant, self.parts, delta=delta)


def compose(accountant: Accountant | str, parts: Sequence[Part]) -> Composition:
    """Compose phases of unlike steps: ``compose("pld", [(step, 1000), (other, 500)]).epsilon(delta=1e-5)``.

    A pass over the data (sampling in `accounting.sampling.BY_EPOCH`) continues from one phase to the next.

    Raises:
        ArgumentError: no parts, or an invalid one.
    """
    found = load_accountant(accountant) if isinstance(accountant, str) else accountant
    return Composition(found, tuple(parts))


def risk(accountant: Accountant | str, mechanism: SubsampledGaussian, *, steps: float, delta: float) -> dict[str, Any]:
    """Upper bounds on membership inference: `advantage`, and `tpr_at_fpr` of "0.01" and "0.001".

    `at_least` holds what some attack certainly reaches, if known. The bounds follow from the mechanism's privacy
    losses, whichever accountant is named (`accounting.membership`), but it must give upper bounds.

    Raises:
        ArgumentError: an argument is out of its range.
        NoAnswer: the accountant has no bound here, or is no upper bound.
    """
    return compose(accountant, [(mechanism, steps)]).risk(delta=delta)
