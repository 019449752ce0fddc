"""The moments accountant of Abadi et al. 2016: a tail bound on the privacy loss by its moments of order λ = 1 to 32.

With μ₀ = N(0, σ²), μ₁ = N(1, σ²), μ = (1 − q)μ₀ + qμ₁, the log moments of one step are

    α(λ) = ln max(E_{z~μ}[(μ/μ₀)^λ], E_{z~μ₀}[(μ₀/μ)^λ]).

The first is the larger, and equals ln A_{λ+1} of `accounting.series`. They add up over adaptive steps (Theorem 2.1),
and Markov's inequality gives ε = min_λ (Tα(λ) − ln δ)/λ (Theorem 2.2), for every λ > 0. With all λ allowed this is
Rényi differential privacy under the classic conversion (`rdp:classic`).
"""

from collections.abc import Iterable
from typing import Any

from accounting.base import Accountant
from accounting.mechanism import SubsampledGaussian, above
from accounting.rdp import Rdp


class Moments(Accountant):
    """ε by the best of some orders.

    Args:
        orders: the λ > 0 to try; by default 1 to 32, as published.

    Raises:
        ArgumentError: no orders, or one that is not a finite number > 0.
    """

    def __init__(self, orders: Iterable[float] = range(1, 33)) -> None:
        self.orders = above("orders", 0.0, orders)
        self._rdp = Rdp("classic", (order + 1 for order in self.orders))

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        epsilon, found = self._rdp.best(mechanism, steps, delta)
        order = found - 1.0
        largest = order >= self.orders[-1]
        return epsilon, {"order": int(order) if order % 1 == 0 else order, "largest_order_is_best": largest}
