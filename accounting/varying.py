"""ε of steps that differ: a noise multiplier or sample rate that changed during training, or several releases.

The smallest of these upper bounds is used (the first, if it exists and each step draws a fresh batch):

    loss   the distributions of the privacy losses of all steps, added up (`accounting.schemes`), under every scheme;
           for accountants that compose numerically (`Accountant.composes`)
    rdp    Poisson steps, adding or removing a record: Rényi divergences of one order add up over adaptive steps of any
        noise (Mironov 2017, Proposition 1); the best order of the sum (`accounting.rdp`)
    least  all steps with the least noise and the largest rate, by the requested accountant: more noise or a smaller
        rate never spends more

Where a record is in one batch of each pass (`accounting.sampling.BY_EPOCH`), passes go on from part to part, and a
record may always be in the batch with the least noise. So a pass counts as a pass of its least noise.

If there are more than `MOST_KINDS` kinds of steps, as in a schedule, similar kinds count as one kind, with the least
noise and the largest rate among them.

Functions take:
    accountant: an accountant.
    parts: (mechanism, number of its steps) for each kind.
"""

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from accounting.base import Accountant, Guarantee
from accounting.mechanism import ArgumentError, NoAnswer, SubsampledGaussian, whole, within
from accounting.rdp import LARGEST, SMALLEST, to_epsilon
from accounting.reductions import at_home, batches_of_epoch, epochs_begun
from accounting.sampling import BY_EPOCH, HOME
from accounting.search import descend
from accounting.series import log_moments

Part = tuple[SubsampledGaussian, float]
#: The most kinds of steps that are composed separately.
MOST_KINDS = 32


def guarantee_of_parts(accountant: Accountant, parts: Sequence[Part], *, delta: float) -> Guarantee:
    """ε at δ of all the parts. For one kind of steps, the accountant's own answer.

    Raises:
        ArgumentError: no parts.
        NoAnswer: the parts have different adjacency; the steps differ and the accountant is no upper bound; or the
            samplings differ and the accountant does not compose numerically.
    """
    counts = _counts(parts)
    if not parts:
        raise ArgumentError("parts", "to be at least one", parts)
    if len(counts) == 1:
        ((mechanism, steps),) = counts.items()
        return accountant.guarantee(mechanism, steps=steps, delta=delta)
    if accountant.kind != "upper_bound":
        raise NoAnswer(f"no {accountant.kind} of steps with different noise: take an accountant of upper bounds")
    start = time.perf_counter()
    answers: list[tuple[float, dict[str, Any]]] = []
    reasons = []
    for bound in (_by_losses, _by_divergences, _by_the_least):
        try:
            answers.append(bound(accountant, counts, within("delta", delta)))
        except NoAnswer as error:
            reasons.append(str(error))
        if answers and bound is _by_losses and not any(each.sampling in BY_EPOCH for each in counts):
            break  # the smallest, unless each phase begins a new epoch
    if not answers:
        raise NoAnswer(reasons[-1])
    epsilon, detail = min(answers, key=lambda answer: answer[0])
    samplings = ", ".join(dict.fromkeys(mechanism.sampling for mechanism in counts))
    detail = {**detail, "sampling": samplings, "adjacency": next(iter(counts)).adjacency}
    return Guarantee(epsilon, "upper_bound", {**detail, "seconds": time.perf_counter() - start})


def spending(parts: Sequence[Part]) -> dict[SubsampledGaussian, float]:
    """Kinds of steps with a cost -> their number; zero-out in Poisson samples becomes add-remove.

    More than `MOST_KINDS` kinds are merged: similar ones count as the worst of them.

    Raises:
        NoAnswer: the parts have different adjacency.
    """
    return _spending(_counts(parts))


def _spending(counts: dict[SubsampledGaussian, float]) -> dict[SubsampledGaussian, float]:
    counts = {
        mechanism: steps
        for mechanism, steps in counts.items()
        if steps > 0 and mechanism.sample_rate > 0 and mechanism.noise_multiplier < math.inf
    }
    if len({(mechanism.adjacency, mechanism.group_size) for mechanism in counts}) > 1:
        raise NoAnswer("no bound of steps with different adjacency or group size: name one that all have")
    found: dict[SubsampledGaussian, float] = {}
    for mechanism, steps in _merged(counts).items():
        home = at_home(mechanism)
        found[home] = found.get(home, 0.0) + whole("steps", steps)  # ∞ for an int beyond floats
    return found


def _counts(parts: Sequence[Part]) -> dict[SubsampledGaussian, float]:
    if len(spent := [part for part in parts if part[1]]) < 2:
        return dict(spent or parts[:1])
    counts: dict[SubsampledGaussian, float] = {}
    current, taken = spent[0][0], 0  # the least noise in the last pass, and how many steps of it are over
    for mechanism, steps in spent:
        if mechanism.sampling in BY_EPOCH and mechanism.sample_rate > 0 and steps < 2**53:
            length = int(batches_of_epoch(mechanism.sample_rate))
            if replace(current, noise_multiplier=mechanism.noise_multiplier) != mechanism:
                taken = 0  # other batches: a new pass
            left = -taken % length
            taken = int(taken + steps) % length
            if left and mechanism.noise_multiplier < current.noise_multiplier:
                counts[current] -= length
                counts[mechanism] = counts.get(mechanism, 0) + length
            if left and steps <= left:
                current = min(current, mechanism, key=lambda each: each.noise_multiplier)
                continue
            steps = length * int(epochs_begun(mechanism.sample_rate, steps - left))
        current = mechanism
        counts[mechanism] = counts.get(mechanism, 0) + steps
    return {mechanism: steps for mechanism, steps in counts.items() if steps}


def _merged(counts: dict[SubsampledGaussian, float]) -> dict[SubsampledGaussian, float]:
    """At most `MOST_KINDS` kinds: all in a cell of a grid of ln σ and ln q have its least noise and largest rate."""
    cells: dict[Any, list[SubsampledGaussian]] = {each: [each] for each in counts}
    width = 1e-3
    while len(cells) > MOST_KINDS and width < 1e3:  # the finest grid that is coarse enough
        cells = {}
        for each in counts:
            place = [math.floor(math.log(x) / width) if x else x for x in (each.noise_multiplier, each.sample_rate)]
            cells.setdefault((replace(each, noise_multiplier=1.0, sample_rate=1.0), *place), []).append(each)
        width *= 1.25
    return {_least(alike): sum(counts[each] for each in alike) for alike in cells.values()}


def _by_losses(
    accountant: Accountant, counts: dict[SubsampledGaussian, float], delta: float
) -> tuple[float, dict[str, Any]]:
    if not accountant.composes:
        raise NoAnswer("this accountant does not compose unlike steps numerically")
    kinds = _spending(counts)
    if not kinds or delta >= 1:
        return 0.0, {"reason": "nothing is spent"}
    if delta == 0 or any(each.noise_multiplier == 0 or steps == math.inf for each, steps in kinds.items()):
        return math.inf, {"reason": "no noise in some steps, more of them than a float can count, or δ = 0"}
    epsilon, detail = _composed(tuple(kinds.items()), delta)
    return epsilon, {**detail, "bound": "privacy losses of all steps, added up", "kinds": len(kinds)}


@functools.lru_cache(maxsize=64)
def _composed(kinds: tuple[Part, ...], delta: float) -> tuple[float, dict[str, Any]]:
    """Cached, because it takes a second."""
    from accounting.schemes import epsilon_of_mechanisms  # imports scipy, which is slow

    return epsilon_of_mechanisms(kinds, delta)


def _by_the_least(
    accountant: Accountant, counts: dict[SubsampledGaussian, float], delta: float
) -> tuple[float, dict[str, Any]]:
    found = accountant.guarantee(_least(list(counts)), steps=sum(counts.values()), delta=delta)
    return found.epsilon, {**found.detail, "bound": "as if all steps had the least noise"}


def _least(mechanisms: Sequence[SubsampledGaussian]) -> SubsampledGaussian:
    """A mechanism that spends at least as much as each."""
    alike = {replace(each, noise_multiplier=1.0, sample_rate=1.0) for each in mechanisms}
    if len(alike) > 1:
        raise NoAnswer("no bound of steps whose batches were drawn in different ways, or from data sets of other sizes")
    sigma = min(each.noise_multiplier for each in mechanisms)
    return replace(mechanisms[0], noise_multiplier=sigma, sample_rate=max(each.sample_rate for each in mechanisms))


def _by_divergences(
    accountant: Accountant, counts: dict[SubsampledGaussian, float], delta: float
) -> tuple[float, dict[str, Any]]:
    """By Rényi divergences of one order, at the best order."""
    if not accountant.plain:
        raise NoAnswer("this accountant's ε is not that of the steps alone")
    if (
        any(at_home(each).scheme != HOME or each.noise_multiplier == 0 or each.group_size > 1 for each in counts)
        or not 0 < delta < 1
    ):
        raise NoAnswer("Rényi divergences are added up of Poisson steps with noise")
    spent = [
        (each.noise_multiplier, each.sample_rate, whole("steps", steps))
        for each, steps in counts.items()
        if each.sample_rate > 0 and each.noise_multiplier < math.inf
    ]

    def at(lam: float) -> float:
        lambdas = np.array([lam])
        with np.errstate(over="ignore"):
            total = sum(steps * log_moments(lambdas, sigma, q) for sigma, q, steps in spent)
            return float(to_epsilon(lambdas, np.asarray(total), math.log(delta), "improved")[0])

    lam, epsilon = descend(at, 8.0, SMALLEST, LARGEST)
    return epsilon, {"order": lam + 1.0, "bound": "Rényi divergences of one order, added up"}
