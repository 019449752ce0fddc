"""A certified lower bound on ε by one run with many canaries (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846).

m canaries are each in the data or not by a fair coin of their own; whoever sees the output guesses some of the coins, r
of them, and v guesses are right. If the mechanism is (ε, δ)-private under adding or removing one record, then, with
V ~ Bin(r, e^ε/(1 + e^ε)), for every v (theorem 5.2):

    P[v or more are right] <= P[V >= v] + 2mδ · max_{1 <= i <= v} P[v - i <= V < v] / i

A v for which the right side is below β says that the mechanism is not (ε, δ)-private; wrongly so with probability β at
most.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The bound of the module's text, at most 1."""
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate))
    steepest = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, float(binom.sf(correct - 1, guesses, rate)) + 2.0 * canaries * delta * steepest)


def epsilon_lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest ε that is refuted with this confidence; 0 if none is.

    Args:
        canaries: m >= 1.
        guesses: r in [0, m], the number of guesses, fixed before the output is looked at.
        correct: v in [0, r].
        delta: δ in [0, 1].
        confidence: 1 - β.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"expected 0 <= correct <= guesses <= canaries, got {correct}, {guesses}, {canaries}")
    level = 1.0 - confidence
    low, high = 0.0, 1.0
    if p_value(canaries, guesses, correct, 0.0, delta) >= level:
        return 0.0
    while p_value(canaries, guesses, correct, high, delta) < level:
        low, high = high, 2.0 * high
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if p_value(canaries, guesses, correct, middle, delta) < level else (low, middle)
    return low
