"""ε of steps that were not all alike: of a noise multiplier, or a sample rate, that changed on the way.

Poisson steps, adding or removing a record: two upper bounds, of which the smaller is taken.

    rdp    Rényi divergences of one order add up over adaptive steps (Mironov 2017, Proposition 1), whatever the noise
           of each; the best order of the sum (`accounting.rdp`)
    least  the steps of the least noise and the largest rate, all of them, by the accountant that was asked for: more
           noise or a smaller rate never spends more

Elsewhere the second alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from accounting.base import Accountant, Guarantee
from accounting.mechanism import ArgumentError, NoAnswer, SubsampledGaussian
from accounting.rdp import LARGEST, SMALLEST, to_epsilon
from accounting.reductions import at_home
from accounting.sampling import HOME
from accounting.search import descend
from accounting.series import log_moments

Part = tuple[SubsampledGaussian, int]


def guarantee_of_parts(accountant: Accountant, parts: Sequence[Part], *, delta: float) -> Guarantee:
    """ε at δ of all the parts, each (the mechanism of its steps, how many).

    Of one kind of steps it is the accountant's own answer.

    Args:
        accountant: which one.
        parts: each a mechanism, and the number of its steps.
        delta: in [0, 1].

    Raises:
        ArgumentError: no parts.
        NoAnswer: parts of different sampling or adjacency; steps that differ, and an accountant that is no upper bound.
    """
    counts: dict[SubsampledGaussian, int] = {}
    for mechanism, steps in parts:
        if steps or len(parts) == 1:
            counts[mechanism] = counts.get(mechanism, 0) + steps
    if not parts:
        raise ArgumentError("parts", "to be at least one", parts)
    if not counts:
        counts = {parts[0][0]: 0}
    if len(counts) == 1:
        ((mechanism, steps),) = counts.items()
        return accountant.guarantee(mechanism, steps=steps, delta=delta)
    if accountant.kind != "upper_bound":
        raise NoAnswer(f"no {accountant.kind} of steps with different noise: take an accountant of upper bounds")
    least = _least(list(counts))
    start = time.perf_counter()
    found = accountant.guarantee(least, steps=sum(counts.values()), delta=delta)
    detail = {**found.detail, "bound": "as if all steps had the least noise"}
    epsilon = found.epsilon
    if at_home(least).scheme == HOME and least.noise_multiplier > 0 and 0 < delta < 1:
        summed, order = _summed(counts, math.log(delta))
        if summed < epsilon:
            epsilon, detail = summed, {"sampling": least.sampling, "adjacency": least.adjacency, "order": order}
            detail["bound"] = "Rényi divergences of one order, added up"
    return Guarantee(epsilon, "upper_bound", {**detail, "seconds": time.perf_counter() - start})


def _least(mechanisms: Sequence[SubsampledGaussian]) -> SubsampledGaussian:
    """The one that spends at least as much as each."""
    alike = {replace(each, noise_multiplier=1.0, sample_rate=1.0) for each in mechanisms}
    if len(alike) > 1:
        raise NoAnswer("no bound of steps whose batches were drawn in different ways, or from data sets of other sizes")
    sigma = min(each.noise_multiplier for each in mechanisms)
    return replace(mechanisms[0], noise_multiplier=sigma, sample_rate=max(each.sample_rate for each in mechanisms))


def _summed(counts: dict[SubsampledGaussian, int], log_delta: float) -> tuple[float, float]:
    """(ε, its order) by Rényi divergences."""
    spending = [
        (each.noise_multiplier, each.sample_rate, steps)
        for each, steps in counts.items()
        if each.sample_rate > 0 and each.noise_multiplier < math.inf
    ]

    def at(lam: float) -> float:
        lambdas = np.array([lam])
        with np.errstate(over="ignore"):
            total = sum(steps * log_moments(lambdas, sigma, q) for sigma, q, steps in spending)
            return float(to_epsilon(lambdas, np.asarray(total), log_delta, "improved")[0])

    lam, epsilon = descend(at, 8.0, SMALLEST, LARGEST)
    return epsilon, lam + 1.0
