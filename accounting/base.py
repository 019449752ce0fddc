"""What every accountant takes and gives: a mechanism, a guarantee, and the answers at the edges.

One step of DP-SGD releases the sum of the clipped gradients (each of norm at most C) of a Poisson sample of rate q,
plus N(0, σ²C²I). T adaptive steps are (ε, δ)-differentially private, under adding or removing one record, if for every
event S

    P[M(D) ∈ S] ≤ e^ε P[M(D') ∈ S] + δ.

An accountant is a function (σ, q, T, δ) → ε. These edges are answered here, once, in this order, before any formula:

    q = 0, or T = 0, or σ = ∞    ε = 0      nothing that depends on a record is released
    δ ≥ 1                        ε = 0      everything is (0, 1)-private
    σ = 0, or δ = 0              ε = ∞      no noise; the Gaussian mechanism is never (ε, 0)-private

Inside them 0 < q ≤ 1, 0 < σ < ∞, T ≥ 1, 0 < δ < 1, and a formula may give any ε in [0, ∞].
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal

#: What an ε is worth. Only an upper bound is a privacy guarantee.
Kind = Literal["upper_bound", "lower_bound", "estimate", "heuristic"]


class ArgumentError(ValueError):
    """An argument outside its domain, in one line that names it: `argument`, what was `expected`, what `came`."""

    def __init__(self, argument: str, expected: str, came: object) -> None:
        super().__init__(f"expected {argument} {expected}, got {came!r}")
        self.argument, self.expected, self.came = argument, expected, came


class NoAnswer(ArithmeticError):
    """An accountant has no number to give here; the message is one line, and says why. Others may have one."""


@dataclass(frozen=True)
class SubsampledGaussian:
    """One step: the Gaussian mechanism on a Poisson sample, under adding or removing one record.

    Args:
        noise_multiplier: σ ≥ 0, the standard deviation of the noise on the *sum* of clipped gradients, in units of the
            clipping norm C.
        sample_rate: q in [0, 1], the probability with which each record enters the sample, independently.

    Raises:
        ArgumentError: a ValueError of one line that names the argument.
    """

    noise_multiplier: float
    sample_rate: float
    sampling: ClassVar[str] = "poisson"
    adjacency: ClassVar[str] = "add_remove"

    def __post_init__(self) -> None:
        sigma = _real("noise_multiplier", "to be a number >= 0", self.noise_multiplier)
        q = _real("sample_rate", "in [0, 1]", self.sample_rate)
        if sigma < 0:
            raise ArgumentError("noise_multiplier", "to be a number >= 0", self.noise_multiplier)
        if not 0 <= q <= 1:
            raise ArgumentError("sample_rate", "in [0, 1]", self.sample_rate)
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "sample_rate", q)


@dataclass(frozen=True)
class Guarantee:
    """An ε in [0, ∞], what it is worth, and how it came about.

    `detail` holds plain values only (a float may be infinite): `sampling`, `adjacency`, `seconds` (of computing), and
    what the accountant adds, such as the order or the split of δ that it used, or `reason` where the answer is an edge.
    """

    epsilon: float
    kind: Kind
    detail: Mapping[str, Any] = field(default_factory=dict)


class Accountant(ABC):
    """Maps a mechanism, a number of steps and δ to ε. Instances hold options only and can be used again.

    A subclass gives `kind`, what its ε is worth, and `_inside`, the formula inside the edges of the module's table.
    """

    kind: Kind = "upper_bound"

    def epsilon(self, mechanism: SubsampledGaussian, *, steps: float, delta: float) -> float:
        """ε after `steps` steps at `delta`: `guarantee` without its detail. In [0, ∞], never NaN."""
        return self.guarantee(mechanism, steps=steps, delta=delta).epsilon

    def guarantee(self, mechanism: SubsampledGaussian, *, steps: float, delta: float) -> Guarantee:
        """ε with its kind and detail.

        Args:
            mechanism: one step.
            steps: T, a whole number ≥ 0, as an int or a float.
            delta: δ in [0, 1].

        Raises:
            ArgumentError: naming `steps` or `delta`.
            NoAnswer: if there is no number to give.
        """
        count, probability = _whole("steps", steps), _real("delta", "in [0, 1]", delta)
        if not 0 <= probability <= 1:
            raise ArgumentError("delta", "in [0, 1]", delta)
        start = time.perf_counter()
        epsilon, detail = _edge(mechanism, count, probability) or self._inside(mechanism, count, probability)
        if not epsilon >= 0:
            raise NoAnswer(f"no ε in [0, inf] but {epsilon} at {mechanism}, steps={steps}, delta={delta}")
        detail = {
            "sampling": mechanism.sampling,
            "adjacency": mechanism.adjacency,
            **detail,
            "seconds": time.perf_counter() - start,
        }
        return Guarantee(epsilon, self.kind, detail)

    @abstractmethod
    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        """(ε, detail) for 0 < q ≤ 1, 0 < σ < ∞, 1 ≤ T < ∞, 0 < δ < 1."""


def _edge(mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]] | None:
    """The module's table, or None inside of it. A T beyond the largest float counts as ∞, and so does ε."""
    for applies, epsilon, reason in (
        (mechanism.sample_rate == 0, 0.0, "sample_rate is 0: no record is ever used"),
        (steps == 0, 0.0, "no steps"),
        (mechanism.noise_multiplier == math.inf, 0.0, "infinite noise"),
        (delta >= 1, 0.0, "every mechanism is (0, 1)-private"),
        (mechanism.noise_multiplier == 0, math.inf, "no noise"),
        (delta == 0, math.inf, "the Gaussian mechanism is private for no ε at delta 0"),
        (steps == math.inf, math.inf, "more steps than a float can count"),
    ):
        if applies:
            return epsilon, {"reason": reason}
    return None


def _real(argument: str, expected: str, value: object) -> float:
    """`value` as a float; an int beyond the largest one is as good as infinite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(argument, expected, value)
    try:
        number = float(value)
    except OverflowError:
        number = -math.inf if value < 0 else math.inf
    if math.isnan(number):
        raise ArgumentError(argument, expected, value)
    return number


def _whole(argument: str, value: object) -> float:
    expected = "to be a whole number >= 0"
    count = _real(argument, expected, value)
    if count < 0 or value == math.inf or (count < math.inf and count % 1):
        raise ArgumentError(argument, expected, value)
    return count
