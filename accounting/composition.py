"""Phases of unlike steps: their ε (`accounting.varying`), and what that means (`accounting.membership`)."""

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
    """Steps of several kinds, one after the other, and who is asked about them.

    Args:
        accountant: who is asked.
        parts: each a mechanism, and the number of its steps.

    Raises:
        ArgumentError: no parts, or one that is none.
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
        """ε of all steps.

        Args:
            delta: in [0, 1].
        """
        return self.guarantee(delta=delta).epsilon

    def guarantee(self, *, delta: float) -> Guarantee:
        """ε with its kind, and which bound it is.

        Args:
            delta: in [0, 1].

        Raises:
            NoAnswer: steps that differ, and an accountant that is no upper bound; or parts of different adjacency.
        """
        from accounting.varying import guarantee_of_parts  # with numpy, which the simplest accountants do without

        return guarantee_of_parts(self.accountant, self.parts, delta=delta)

    def risk(self, *, delta: float) -> dict[str, Any]:
        """What ε means for membership inference: `accounting.risk` of all steps.

        Args:
            delta: in [0, 1].
        """
        from accounting.membership import risk_of_parts  # with scipy, which takes long to import

        return risk_of_parts(self.accountant, self.parts, delta=delta)


def compose(accountant: Accountant | str, parts: Sequence[Part]) -> Composition:
    """Phases of unlike steps: ``compose("pld", [(step, 1000), (other, 500)]).epsilon(delta=1e-5)``.

    Args:
        accountant: one, or its name.
        parts: each a `SubsampledGaussian`, and the number of its steps.

    Raises:
        ArgumentError: no parts, or one that is none.
    """
    found = load_accountant(accountant) if isinstance(accountant, str) else accountant
    return Composition(found, tuple(parts))


def risk(accountant: Accountant | str, mechanism: SubsampledGaussian, *, steps: float, delta: float) -> dict[str, Any]:
    """Upper bounds on membership inference: `advantage`, and `tpr_at_fpr` of "0.01" and "0.001".

    `at_least` has what an attack certainly reaches, where that is known.
    They are the mechanism's, by its privacy losses, whatever accountant is named (`accounting.membership`); of one that
    is no upper bound there is none.

    Args:
        accountant: one of upper bounds, or its name.
        mechanism: of each step.
        steps: how many.
        delta: in [0, 1].

    Raises:
        ArgumentError: an argument out of its range.
        NoAnswer: the accountant has none here, or none that is an upper bound.
    """
    return compose(accountant, [(mechanism, steps)]).risk(delta=delta)
