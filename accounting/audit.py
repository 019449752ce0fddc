"""Certified lower bounds on the ε of a mechanism, from the guesses of an adversary.

*One run with many canaries* (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846). Each of m canaries is in the data or
not, by an independent fair coin. The adversary sees the output and guesses r of the coins; v guesses are right. If the
mechanism is (ε, δ)-private under adding or removing one record, then, with V ~ Bin(r, e^ε/(1 + e^ε)), for every v
(theorem 5.2):

    P[v or more are right] <= P[V >= v] + 2mδ · max_{1 <= i <= v} P[v - i <= V < v] / i

If the right side is below β for the observed v, the mechanism is not (ε, δ)-private; this conclusion is wrong with
probability at most β.

*Many releases of one mechanism* (Nasr et al. 2023, arXiv:2302.07956). For each release the adversary says whether a
record is in it: wrongly "yes" at rate α, wrongly "no" at rate β. If the mechanism is μ-GDP, no test beats the best test
of N(0, 1) against N(μ, 1) (Dong, Roth and Su 2019, arXiv:1905.02383), so that

    Φ⁻¹(1 - α) - Φ⁻¹(β) <= μ

Upper bounds on both rates, each wrong with half the allowed probability (Clopper and Pearson 1934), make the left side
a lower bound on μ.

Functions take:
    canaries, guesses, correct: m >= 1, r in [0, m], v in [0, r]. r must be fixed before looking at the output.
    delta, confidence: δ in [0, 1]; 1 - β in (0, 1).
"""

import math

import numpy as np
from scipy.stats import beta, binom, norm

from accounting.gaussian import epsilon_of_shift
from accounting.mechanism import whole, within


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The bound of the module's text on the guesses of one run, at most 1.

    Args:
        epsilon: ε >= 0 of the claim to test.

    Raises:
        ValueError: not 0 <= correct <= guesses <= canaries, all whole, or ε or δ out of range.
    """
    canaries, guesses, correct = _counts(canaries=canaries, guesses=guesses, correct=correct)
    within("delta", delta)
    rate = 1.0 / (1.0 + math.exp(-within("epsilon", epsilon, 0.0, math.inf)))
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate))
    steepest = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, float(binom.sf(correct - 1, guesses, rate)) + 2.0 * canaries * delta * steepest)


def epsilon_lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest ε that one run refutes with this confidence; 0 if none.

    Raises:
        ValueError: not 0 <= correct <= guesses <= canaries, all whole, or δ or the confidence out of range.
    """
    level = 1.0 - within("confidence", confidence, open_ends=True)
    low, high = 0.0, 1.0
    if p_value(canaries, guesses, correct, 0.0, delta) >= level:
        return 0.0
    while p_value(canaries, guesses, correct, high, delta) < level:
        low, high = high, 2.0 * high
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if p_value(canaries, guesses, correct, middle, delta) < level else (low, middle)
    return low


def rate_upper_bound(wrong: int, trials: int, confidence: float = 0.95) -> float:
    """The largest error rate at which at most `wrong` errors have a probability of 1 - confidence or more.

    Exact for independent trials (Clopper and Pearson 1934); 1 without trials, or if all were wrong.

    Args:
        wrong, trials: the number of errors, and of trials.

    Raises:
        ValueError: `wrong` is not between 0 and `trials`, or the confidence is out of range.
    """
    trials, wrong = _counts(trials=trials, wrong=wrong)
    within("confidence", confidence, open_ends=True)
    return 1.0 if wrong == trials else float(beta.isf(1.0 - confidence, wrong + 1, trials - wrong))


def mu_lower_bound(
    false_positives: int, negatives: int, false_negatives: int, positives: int, confidence: float = 0.95
) -> float:
    """The largest μ such that these errors refute μ-GDP with this confidence; 0 if none.

    Args:
        false_positives, negatives: how many of the releases without the record were said to have it, and their number.
        false_negatives, positives: how many of the releases with the record were said not to have it, and their number.
            All releases are independent.
        confidence: of both rates together.

    Raises:
        ValueError: more errors than trials, or the confidence is out of range.
    """
    each = 0.5 + 0.5 * within("confidence", confidence, open_ends=True)
    alpha = rate_upper_bound(false_positives, negatives, each)
    missed = rate_upper_bound(false_negatives, positives, each)
    return max(0.0, float(norm.isf(alpha) - norm.ppf(missed)))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """ε at δ of a mechanism that is exactly μ-GDP; a lower bound if μ is one; ∞ at δ = 0.

    Args:
        mu: μ >= 0; 0 has ε = 0.

    Raises:
        ArgumentError: μ or δ out of range.
    """
    if within("mu", mu, 0.0, math.inf) == 0:
        return 0.0
    if within("delta", delta) == 0:
        return math.inf
    return epsilon_of_shift(math.log(mu), math.log(delta))


def _counts(**counts: int) -> tuple[int, ...]:
    """Whole numbers in falling order, else an error."""
    found = [whole(name, value) for name, value in counts.items()]
    if found != sorted(found, reverse=True):
        order = " <= ".join(reversed(counts))
        raise ValueError(f"expected 0 <= {order}, got {', '.join(f'{value:g}' for value in reversed(found))}")
    return tuple(int(value) for value in found)
