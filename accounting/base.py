"""The interface of accountants, and the answers at edge cases.

One step of DP-SGD releases the sum of the clipped gradients (each of norm at most C) of a Poisson sample of rate q,
plus N(0, σ²C²I). T adaptive steps are (ε, δ)-differentially private, under adding or removing one record, if for every
event S

    P[M(D) ∈ S] ≤ e^ε P[M(D') ∈ S] + δ.

Other ways of sampling and other adjacencies are named in `SAMPLINGS` and `ADJACENCIES`; `accounting.sampling.PROVED`
lists the pairs with bounds, and the default adjacency of each sampling. An accountant names the pairs that its formula
covers. The reductions of `accounting.reductions` extend an upper bound to other pairs; elsewhere `NoAnswer` is raised.

An accountant is a function (σ, q, T, δ) → ε. These edges are answered here, in this order, before any formula:

    q = 0, or T = 0, or σ = ∞    ε = 0      nothing that depends on a record is released
    δ ≥ 1                        ε = 0      everything is (0, 1)-private
    σ = 0, or δ = 0              ε = ∞      no noise; the Gaussian mechanism is never (ε, 0)-private

Formulas get 0 < q ≤ 1, 0 < σ < ∞, T ≥ 1, 0 < δ < 1, and may return any ε in [0, ∞].
"""

import decimal
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Literal, get_args

from accounting.mechanism import NoAnswer, SubsampledGaussian, whole, within
from accounting.reductions import at_home, bound_elsewhere
from accounting.sampling import ADJACENCIES, HOME, SAMPLINGS, Scheme, unproved

#: The kind of an ε. Only an upper bound is a privacy guarantee.
Kind = Literal["upper_bound", "lower_bound", "estimate", "heuristic"]
#: Warning of a large δ, of its name and value and of 1/n, where n is the number of records.
LARGE_DELTA = "{}={:g} is not below 1/{}={:g}: publishing a record at random would be as private; take it well below"
_ROUNDINGS = {"upper_bound": decimal.ROUND_CEILING, "lower_bound": decimal.ROUND_FLOOR}


def rounded(value: float, kind: str | None, digits: int = 4) -> str:
    """Few digits of a number; an upper bound is rounded up and a lower bound down, so that they remain bounds.

    Args:
        value: such as ε.
        kind: of the number; any other is rounded to the nearest.
        digits: significant ones.
    """
    if not math.isfinite(value):
        return f"{value:g}"
    rounding = _ROUNDINGS.get(kind or "", decimal.ROUND_HALF_EVEN)
    shortest = repr(float(value)).removesuffix(".0")  # 0.1 stays 0.1, although the float is a little above
    return f"{decimal.Context(prec=digits, rounding=rounding).create_decimal(shortest):g}"


@dataclass(frozen=True)
class Guarantee:
    """An ε in [0, ∞], its kind, and how it was computed.

    `detail` holds plain values (a float may be infinite): `sampling`, `adjacency`, `seconds` of computation, and what
    the accountant adds, such as the order or the split of δ, or `reason` at an edge.
    """

    epsilon: float
    kind: Kind
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.epsilon, Real):
            raise TypeError(f"expected ε to be a number, got {self.epsilon!r}")
        if self.kind not in get_args(Kind):
            raise TypeError(f"expected a kind of ε, one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        try:
            json.dumps(dict(self.detail))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"expected a detail of values that JSON has, got {self.detail!r}") from error
        object.__setattr__(self, "epsilon", float(self.epsilon))  # numpy has numbers that JSON has not


class Accountant(ABC):
    """Maps a mechanism, a number of steps and δ to ε. Instances hold only options and can be reused.

    A subclass defines `kind`, the kind of its ε; `supports`, the schemes (sampling, adjacency) of its formula; whether
    it `composes` unlike steps numerically (`accounting.varying`); whether it is `plain`, so that its ε covers the steps
    and nothing else; and `_inside`, the formula.

    Methods take:
        mechanism: one step: its noise, sampling and adjacency.
        steps: T, a whole number ≥ 0, as an int or a float.
        delta: δ in [0, 1].
    """

    kind: Kind = "upper_bound"
    supports: ClassVar[frozenset[Scheme]] = frozenset({HOME})
    composes: ClassVar[bool] = False
    plain: ClassVar[bool] = True

    def epsilon(self, mechanism: SubsampledGaussian, *, steps: float, delta: float) -> float:
        """ε after `steps` steps at `delta`, in [0, ∞], never NaN: `guarantee` without its detail.

        Raises:
            ArgumentError: an argument is out of its range.
            NoAnswer: the accountant has no bound for this mechanism.
        """
        return self.guarantee(mechanism, steps=steps, delta=delta).epsilon

    def guarantee(self, mechanism: SubsampledGaussian, *, steps: float, delta: float) -> Guarantee:
        """ε with its kind and detail.

        Raises:
            ArgumentError: names `steps` or `delta`.
            NoAnswer: no bound is known for the mechanism's sampling and adjacency, or it cannot be computed.
        """
        count, probability = whole("steps", steps), within("delta", delta)
        start = time.perf_counter()
        epsilon, detail = _edge(mechanism, count, probability) or self._answer(mechanism, count, probability)
        kind = detail.get("kind", self.kind)
        detail = {
            "sampling": mechanism.sampling,
            "adjacency": mechanism.adjacency,
            **{name: value for name, value in detail.items() if name != "kind"},
            "seconds": time.perf_counter() - start,
        }
        found = Guarantee(epsilon, kind, detail)
        if not found.epsilon >= 0:
            raise NoAnswer(f"no ε in [0, inf] but {epsilon} at {mechanism}, steps={steps}, delta={delta}")
        return found

    def _answer(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        """`_inside` for supported schemes, else a reduction to them."""
        if expected := unproved(*mechanism.scheme):
            raise NoAnswer(f"no valid bound: expected adjacency {expected}, got {mechanism.adjacency!r}")
        mechanism = at_home(mechanism)
        if mechanism.group_size > 1:
            return self._of_group(mechanism, steps, delta)
        if mechanism.scheme in self.supports:
            return self._inside(mechanism, steps, delta)
        known = self.supports if self.kind == "upper_bound" else ()
        if answer := bound_elsewhere(self._inside, known, mechanism, steps, delta):
            return answer
        sampling, adjacency = SAMPLINGS[mechanism.sampling], ADJACENCIES[mechanism.adjacency]
        raise NoAnswer(f"no valid bound by this accountant under {sampling}, {adjacency}")

    def _of_group(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        """ε for several records at once: k records move a sum by k at most."""
        if mechanism.sample_rate == 1 and mechanism.scheme == HOME:
            sigma = mechanism.noise_multiplier / mechanism.group_size
            if sigma == 0:
                return math.inf, {"reason": "no noise"}
            return self._answer(replace(mechanism, noise_multiplier=sigma, group_size=1), steps, delta)
        if not self.composes:
            raise NoAnswer("no bound for a group of records by this accountant; prv and pld have one")
        from accounting.schemes import epsilon  # imports scipy, which is slow

        return epsilon(mechanism, steps, delta)

    @abstractmethod
    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        """(ε, detail) for 0 < q ≤ 1, 0 < σ < ∞, 1 ≤ T < ∞, 0 < δ < 1, under a supported scheme.

        A detail `kind` overrides the accountant's kind for this answer.
        """


def _edge(mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]] | None:
    """The module's table; None inside the edges. A T beyond the largest float counts as ∞, and so does ε."""
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
