"""Draw the records of each batch as a function of a secret key and the step's number alone.

(After training resumes from an earlier checkpoint, also of the number of undone steps: a step that is accounted twice
draws two different batches.)

So training can resume in the middle of an epoch, even if a loader's workers had fetched batches ahead. All processes of
a distributed run draw the same batch. The bits are SHAKE-256 of key and number, and look random without the key.
Amplification by sampling assumes that the batches are secret: keep the key secret.

    poisson              each record with probability q = b/n; the batch may be empty
    truncated_poisson    the same; a batch above the maximum is cut to it, uniformly at random
    cyclic_poisson       for banded noise: Poisson samples from one group of records after the other
    balls_and_bins       an epoch of ⌊n/b⌋ batches: each record in one, drawn independently; a batch may be empty
    without_replacement  b records, drawn again each step
    shuffled             a permutation an epoch, cut into ⌊n/b⌋ batches; the rest is left out
    one_pass             the records in their order, cut in the same way, every epoch

ε is for adding or removing one record; under the last two schemes, for making one record's gradient zero, as removing
it would shift every later batch (`accounting.sampling.PROVED`).
"""

import hashlib
import math
import os
from collections import Counter
from typing import Any

import numpy as np

from dpbench.engine.distributed import place, shared_key
from dpbench.engine.settings import Settings

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
_Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

SURE = 1e-9
"""Sizes less likely than this under Poisson sampling are reported."""
DEVIATIONS = 7.0
"""The same for the two tails of the sum, in standard deviations."""
FEW = 8
"""Least number of batches for a test of their sum, so that a short example with any batch size passes."""


class Sampler:
    """Draws the batches of `settings.mechanism.sampling` under `key`, 32 secret bytes."""

    def __init__(self, settings: Settings, key: bytes) -> None:
        self.settings = settings
        self._key: bytes | None = key
        self.branch = 0
        """Steps that were abandoned when a checkpoint was loaded; 0 before."""
        self._drawn: tuple[int, Indices] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles lack the key, which is as secret as the data."""
        return {"settings": self.settings, "branch": 0, "_key": None, "_drawn": None}

    @property
    def key(self) -> bytes:
        """32 bytes, the same in all processes; a copy draws its own."""
        if self._key is None:
            self._key = shared_key(os.urandom(32))
        return self._key

    def take(self, key: bytes, branch: int = 0) -> None:
        """Switch to another key, for existing loaders as well."""
        self._key, self.branch, self._drawn = key, branch, None

    def batch(self, step: int) -> Indices:
        """The records of a logical batch, ascending unless shuffled."""
        scheme, n = self.settings.mechanism.sampling, self.settings.sample_size
        b = self.settings.batch_size
        if scheme == "without_replacement":
            return np.sort(np.argsort(self._words("batch", step, n), kind="stable")[:b])
        if scheme in ("poisson", "truncated_poisson"):
            sample = np.flatnonzero(_uniform(self._words("batch", step, n)) < self.settings.mechanism.sample_rate)
            if (groups := self.settings.bands) > 1:  # drawn once, independently for each record
                group = (_uniform(self._words("group", 0, n)) * groups).astype(np.int64)
                sample = sample[group[sample] == step % groups]
            most = self.settings.mechanism.max_batch_size
            if most is not None and len(sample) > most:
                order = np.argsort(self._words("cut", step, len(sample)), kind="stable")
                sample = np.sort(sample[order[:most]])
            return sample
        epoch, place = divmod(step, self.settings.steps_per_epoch)
        if scheme == "balls_and_bins":
            return np.flatnonzero(self._of_epoch(epoch) == place)
        return self._of_epoch(epoch)[place * b : (place + 1) * b]

    def seed_of_workers(self, step: int) -> int:
        """A loader's base seed for an iteration from this logical batch, another one in each process."""
        rank, processes = place()
        return int(self._words("workers", step, processes)[rank])

    def _of_epoch(self, epoch: int) -> Indices:
        """The order of the records; under balls and bins, each record's batch."""
        n = self.settings.sample_size
        if self.settings.mechanism.sampling == "one_pass":
            return np.arange(n)
        if self._drawn is None or self._drawn[0] != epoch:
            words = self._words("epoch", epoch, n)
            if self.settings.mechanism.sampling == "balls_and_bins":
                drawn = (_uniform(words) * self.settings.steps_per_epoch).astype(np.int64)
            else:
                drawn = np.argsort(words, kind="stable")
            self._drawn = epoch, drawn
        return self._drawn[1]

    def _words(self, purpose: str, number: int, count: int) -> _Words:
        """`count` random 64-bit words."""
        seed = self.key + purpose.encode() + number.to_bytes(16, "little")
        if self.branch and purpose != "group":  # groups do not change, as banded noise continues
            seed += self.branch.to_bytes(16, "little")
        return np.frombuffer(hashlib.shake_256(seed).digest(8 * count), dtype="<u8")


def _uniform(words: _Words) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Multiples of 2^-53 in [0, 1): below q with probability q, within 2^-53."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Sizes:
    """Tests whether the sizes of the caller's batches can come from Poisson sampling; reports near-certain violations.

    Under Poisson sampling each size is an independent Binomial(n, q). Two events are then next to impossible: too many
    equal sizes among T, and a sum too far from T·b. With p the probability of the likeliest size,

        P(some size occurs k times or more) ≤ C(T, k) p^(k-1),

    since Σ_v p_v^k ≤ p^(k-1). A loader that shuffles has one size except for an epoch's last batch; a loader of another
    batch size has another sum; a repeated batch has both.

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
