"""Test whether the sizes of the caller's batches can come from Poisson sampling; report only near-certain violations.

Under Poisson sampling each size is an independent Binomial(n, q). Two events are then next to impossible: too many
equal sizes among T, and a sum too far from T·b. With p the probability of the likeliest size,

    P(some size occurs k times or more) ≤ C(T, k) p^(k-1),

since Σ_v p_v^k ≤ p^(k-1). A loader that shuffles has one size except for an epoch's last batch; a loader of another
batch size has another sum; a repeated batch has both.
"""

from __future__ import annotations

import math
from collections import Counter

SURE = 1e-9
"""Sizes less likely than this under Poisson sampling are reported."""
DEVIATIONS = 7.0
"""The same for the two tails of the sum, in standard deviations."""
FEW = 8
"""Least number of batches for a test of their sum: an example of a step or two may be of any size."""


class Sizes:
    """Counts the sizes so far.

    Args:
        sample_size: n, the records that a batch is drawn from.
        batch_size: b = nq, the expected size.
    """

    def __init__(self, sample_size: float, batch_size: float) -> None:
        self._rate, self._expected = batch_size / sample_size, batch_size
        self._variance = batch_size * (1 - self._rate)
        self._seen: Counter[int] = Counter()
        self._sum = 0

    def add(self, size: int) -> str | None:
        """Add a batch. Returns, in words, how all sizes so far violate Poisson sampling; None if they do not.

        Args:
            size: of the batch, in records.
        """
        self._seen[size] += 1
        self._sum += size
        if self._variance <= 0:  # q = 1: every batch is the whole
            return None
        count = self._seen.total()
        size, alike = self._seen.most_common(1)[0]
        likeliest = min(1.0, 1 / math.sqrt(2 * math.pi * self._variance) + 0.5 / self._variance)
        ways = math.lgamma(count + 1) - math.lgamma(alike + 1) - math.lgamma(count - alike + 1)
        if ways + (alike - 1) * math.log(likeliest) < math.log(SURE):
            return f"{alike} of {count} batches had exactly {size} samples"
        mean = self._sum / count
        if count >= FEW and abs(mean - self._expected) > DEVIATIONS * math.sqrt(self._variance / count) + 1:
            return f"{count} batches had {mean:.4g} samples on average where {self._expected:g} are expected"
        return None
