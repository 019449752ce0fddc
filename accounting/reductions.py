"""Reductions: turn a bound for one sampling scheme and adjacency into a bound for another.

n records, b of them in a batch on average, q = b/n; noise N(0, σ²C²I) on the sum of clipped gradients. Write σ: q for T
steps of Poisson sampling at rate q under adding or removing one record, which every accountant supports. There, zeroing
a record's gradient (Kairouz et al. 2021, arXiv:2103.00039) equals removing it, because no other record is drawn
differently. These reductions extend an upper bound:

- *One pass*: An epoch is cut into at most ⌊1/q⌋ batches, and a record is in one of them, at a place independent of the
  data. What comes before and after it is the same function of the outputs on both datasets, so an epoch is one Gaussian
  mechanism. So σ: 1 for E = ⌈T/⌊1/q⌋⌉ steps, exactly, if the record's gradient is zeroed. Replacing it moves the sum by
  2C, so σ/2: 1. Removing it shifts every later batch and moves all their sums: no such bound holds.
- *Shuffled*: The same for each order of the records, and so for their mixture (δ is jointly convex): no amplification
  is proved (zero-out as in Chua et al. 2024a). `accounting.shuffled` has a lower bound.
- *Without replacement*: Remove record x. In the batches of b that hold x (a share q), exchange x for another record,
  drawn uniformly: this gives the batches of the dataset without x. So with probability q the sum moves by at most 2C,
  else not at all: σ/2: q. A record with zero gradient may replace x, so zeroing costs no more.
- *Truncated Poisson*: Cut to B records: larger batches are drawn uniformly from the sample. Either x fits beside the
  others (moving the sum by C), or it takes the place of one of them (2C), the second with a probability below q: σ/2:
  q. With τ = P[Bin(n, q) > B], T steps are also τT-close to uncut steps, so δ' = δ + τT(1 + e^ε) at the same ε (Chua et
  al. 2024b). The smaller bound is used. Zeroing: as above.
- *Balls and bins*: A mixture of passes, as shuffled batches are, but removing a record moves no other.
  `accounting.random_allocation` has the amplification.
- *All records*: At q = 1 every scheme but the truncated one is the Gaussian mechanism: σ: 1, or σ/2: 1 to replace one.
- *Replace one*: Remove one, add the other: (ε, δ) twice is (2ε, (1 + e^ε)δ) (group privacy; Dwork and Roth 2014),
  unless there is a better bound, as for one pass.

`accounting.schemes` has tighter bounds, from the pairs of distributions themselves. Chua et al. 2024a: "How Private are
DP-SGD Implementations?", ICML 2024; 2024b: "Scalable DP-SGD: Shuffling vs. Poisson Subsampling", NeurIPS 2024.

Functions take:
    sample_rate: q in (0, 1].
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from accounting.mechanism import ArgumentError, SubsampledGaussian, real, whole
from accounting.sampling import BY_EPOCH, HOME, Scheme

Answer = tuple[float, dict[str, Any]]
Ask = Callable[[SubsampledGaussian, float, float], Answer]


def at_home(mechanism: SubsampledGaussian) -> SubsampledGaussian:
    """Replace zero-out by add-remove where they are the same, because no other record moves."""
    apart = mechanism.sampling in (HOME[0], "balls_and_bins") and mechanism.adjacency == "zero_out"
    return replace(mechanism, adjacency=HOME[1]) if apart else mechanism


def batches_of_epoch(sample_rate: float) -> float:
    """⌊1/q⌋, at least 1."""
    inverse = 1.0 / sample_rate
    return max(1.0, float(math.floor(inverse * (1.0 + 1e-12)))) if inverse < 2.0**53 else inverse


def epochs_begun(sample_rate: float, steps: float) -> float:
    """E = ⌈T/⌊1/q⌋⌉: the most batches that a record is in, if an epoch has ⌊1/q⌋ steps."""
    epochs = steps / batches_of_epoch(sample_rate)
    return float(max(1, math.ceil(epochs))) if epochs < 2.0**53 else epochs


def as_poisson(sample_rate: float, steps: float, bands: int) -> tuple[float, float]:
    """(q', ⌈T/b⌉): the Poisson steps that T steps with b bands under cyclic Poisson sampling are accounted as.

    Args:
        sample_rate: B/n, the expected share of the records in a batch.
        bands: b, at least 1.

    Raises:
        ArgumentError: a number is out of its range, or there are more bands than batches in the data, n/B.
    """
    bands = int(whole("bands", bands, least=1))
    rate, count = bands * real("sample_rate", "in [0, 1]", sample_rate), whole("steps", steps)
    if rate > 1.0 + 1e-12:
        raise ArgumentError("bands", f"of at most {math.floor(1.0 / sample_rate * (1 + 1e-12))}, 1/sample_rate", bands)
    return min(1.0, rate), math.ceil(count / bands) if count < 2.0**53 else count / bands


def log_truncation(dataset_size: int, sample_rate: float, max_batch_size: int) -> float:
    """An upper bound on ln P[Bin(n, q) > B]: Chernoff's bound if B is above the mean, else 0.

    Args:
        dataset_size: n.
        max_batch_size: B.
    """
    if max_batch_size >= dataset_size:
        return -math.inf
    share = (max_batch_size + 1) / dataset_size
    if share <= sample_rate:
        return 0.0
    divergence = share * math.log(share / sample_rate)
    if share < 1.0:
        divergence += (1.0 - share) * (math.log1p(-share) - math.log1p(-sample_rate))
    return -dataset_size * divergence


def bound_elsewhere(
    at: Ask, supports: Collection[Scheme], mechanism: SubsampledGaussian, steps: float, delta: float
) -> Answer | None:
    """The smallest upper bound by the reductions of the module's text; None if none of them ends in `supports`.

    Args:
        at: (mechanism, steps, δ) -> an upper bound for a supported scheme; ∞ is one.
        supports: the schemes with a formula.
    """

    def ask(other: SubsampledGaussian, count: float, probability: float) -> Answer | None:
        if probability <= 0 or other.noise_multiplier == 0:  # δ or σ underflows
            return (math.inf, {}) if supports else None
        other = at_home(other)
        if other.scheme in supports:
            return at(other, count, probability)
        return bound_elsewhere(at, supports, other, count, probability)

    sampling, adjacency = mechanism.scheme
    half = replace(mechanism, noise_multiplier=0.5 * mechanism.noise_multiplier)
    found: list[Answer | None] = []
    if mechanism.scheme == HOME:
        return None
    if sampling in BY_EPOCH or (mechanism.sample_rate == 1 and sampling != "truncated_poisson"):
        sigma = (half if adjacency == "replace_one" else mechanism).noise_multiplier
        epoch = replace(mechanism, noise_multiplier=sigma, sample_rate=1.0, sampling=HOME[0], adjacency=HOME[1])
        begun = epochs_begun(mechanism.sample_rate, steps)
        passes = _told("one Gaussian step an epoch", ask(epoch, begun, delta), epochs=begun)
        if mechanism.scheme != ("balls_and_bins", "replace_one"):
            return passes
        found.append(passes)
    if sampling == "truncated_poisson":
        assert mechanism.dataset_size is not None and mechanism.max_batch_size is not None
        uncut = replace(mechanism, sampling="poisson", max_batch_size=None)
        sizes = mechanism.dataset_size, mechanism.sample_rate, mechanism.max_batch_size
        found.append(_at_smaller_delta(lambda d: ask(uncut, steps, d), log_truncation(*sizes) + math.log(steps), delta))
    if adjacency == "zero_out":
        found.append(_told("a zero for another record", ask(replace(mechanism, adjacency="replace_one"), steps, delta)))
    if sampling != "poisson" and adjacency == "add_remove":
        poisson = replace(half, sampling="poisson", max_batch_size=None)
        found.append(_told("Poisson sampling at half the noise", ask(poisson, steps, delta)))
    if adjacency == "replace_one":
        other = replace(mechanism, adjacency="add_remove")
        found.append(_twice(lambda d: ask(other, steps, d), delta))
    return min((answer for answer in found if answer), key=lambda answer: answer[0], default=None)


def _at_smaller_delta(answer: Callable[[float], Answer | None], log_distance: float, delta: float) -> Answer | None:
    """ε at δ − X(1 + e^ε), X = e^log_distance: first with half of δ for each part, then with the remainder."""
    first = answer(0.5 * delta)
    if first is None or not math.log(4.0) + log_distance + first[0] <= math.log(delta):  # NaN for 0 times ∞
        return None
    left = delta - math.exp(log_distance) - math.exp(log_distance + first[0])  # e^ε alone may be no float
    second = answer(left)
    best = second if second is not None and second[0] <= first[0] else first
    return _told("as if no batch were cut, at a smaller δ", best, delta=left)


def _twice(answer: Callable[[float], Answer | None], delta: float) -> Answer | None:
    """2ε(δ') at a δ' with δ'(1 + e^ε(δ')) ≤ δ.

    With l = −ln δ', the condition is l ≥ g(l) = −ln δ + ln(1 + e^ε). ε is roughly concave in l, so the secant of l − g
    overshoots the root, to where the condition holds.
    """
    at, before = math.log(4.0) - math.log(delta), (0.0, 0.0)
    for turn in range(16):
        one = answer(math.exp(-at))
        if one is None or one[0] == math.inf:
            return one
        wanted = one[0] + math.log1p(math.exp(-one[0])) - math.log(delta)
        if wanted <= at:
            words = "group privacy: a record removed and one added"
            return _told(words, (2.0 * one[0], one[1]), delta=math.exp(-at))
        slope = (wanted - before[1]) / (at - before[0]) if turn else 0.5
        step = (wanted - at) / (1.0 - slope) if slope < 0.95 else at
        before, at = (at, wanted), at + 1.005 * step + 0.005
    return math.inf, {"bound": "none that is finite"}


def _told(words: str, answer: Answer | None, **more: float) -> Answer | None:
    """The same ε, with only the reduction in its detail: other numbers in it are of another scheme."""
    if answer is None:
        return None
    inner = answer[1].get("bound")
    return answer[0], {"bound": f"{words}, {inner}" if inner else words, **more}
