"""The discrete Gaussian of Canonne, Kamath and Steinke (2020, arXiv:2004.00010), added to sums on a grid.

    add_discrete        grid · (round(total / grid) + N_ℤ(0, 4^log)) of many tensors

N_ℤ(0, s²) takes each integer x with probability proportional to exp(-x² / 2s²); here s = 2^log. We sample it by their
Algorithms 1 to 3, with s and the scale of the Laplace proposal both 2^log:

    exp(-a)       draw until false, the k-th true with probability a/k; true after an odd number of draws (von Neumann)
    exp(-n)       n times exp(-1)
    proposal      u below 2^log, kept with exp(-u / 2^log); the number of times exp(-1) is true; a sign: exp(-|y| / s)
    kept          with exp(-(|y| - s)² / 2s²)

Every decision compares integers, uniform ones from the cipher with numerators over a power of two. So each x has
exactly its probability if the cipher's words are random. Floating point computes only round(total / grid), before the
noise, and the product with the grid afterwards, which is a one-to-one map.

**The stream.** Rejection takes a random number of words. The cipher's block at a tensor's place is the key of the
tensor's own streams, one for each group of 128 coordinates, with the group's number as nonce. 64-bit words are read
block after block, little-endian. So a draw is a function of (key, nonce, coordinate), on any number of threads.

Without a compiler, Python computes the same bits, much slower than the C kernel: for tests. Sums on other devices are
copied to the CPU and back.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clipping.noise.chacha import BLOCKS, NORMALS, WORDS, Segments, run_compiled, state_of, words
from clipping.numerics import kernels

WIDEST = 2.0**43
"""Totals are clamped to this many units of the grid; below, a float64 quotient has an error of at most 2^-10."""
ROUNDED = 1 + 2.0**-9
"""Most units of the grid by which rounding changes the difference of two totals."""


def add_discrete(flat: Tensor, segments: Segments, log: int, grid: float, key: bytes, nonce: Sequence[int]) -> None:
    """Round each tensor in `flat` to multiples of `grid`, and add discrete Gaussian noise of deviation 2^log · grid.

    Args:
        flat: [segments.length], or without the last gap, contiguous, float32 or float64, finite, changed in place.
        segments: positions of the tensors.
        log: 1 to 40.
        grid: > 0.
        nonce: the first two words of the nonces; no other draw with this key may use the same words and label.

    Raises:
        ValueError: a key, nonce or `log` has a wrong size.
    """
    if not 1 <= log <= 40:
        raise ValueError(f"expected the logarithm of a deviation from 1 to 40, got {log}")
    if not segments.length:
        return
    here, state = flat.cpu(), state_of(key, 0, (*nonce, segments.labels[0]))
    if kernels.cpu.supported(here):
        run_compiled("discrete_noisy", here, segments, (log, grid, grid), state)
    else:
        for part, label in zip(segments.parts(here), segments.labels, strict=True):
            nearest = torch.round((part.double() / grid).clamp(-WIDEST, WIDEST)).long()
            noise = torch.tensor(drawn(part.numel(), log, key, (*nonce, label)), dtype=torch.int64, device="cpu")
            part.copy_((nearest + noise).double() * grid)
    if here is not flat:
        flat.copy_(here)


def drawn(count: int, log: int, key: bytes, nonce: Sequence[int]) -> list[int]:
    """Return `count` draws of N_ℤ(0, 4^log), in Python.

    Args:
        count: number of draws.
        log: base-2 logarithm of the deviation.
    """
    own = words(key, nonce, 0, 1, "cpu")[:8, 0].numpy().tobytes()
    found: list[int] = []
    for group in range(-(-count // NORMALS)):
        stream = _words(own, group)
        found += [_discrete(stream, log) for _ in range(min(NORMALS, count - len(found)))]
    return found


def _words(key: bytes, group: int) -> Iterator[int]:
    """Yield 64-bit words without end."""
    nonce, block = (group % 2**32, group >> 32, 0), 0
    while True:
        rows = words(key, nonce, block, BLOCKS, "cpu").T.contiguous().numpy().tobytes()
        for start in range(0, BLOCKS * WORDS * 4, 8):
            yield int.from_bytes(rows[start : start + 8], "little")
        block += BLOCKS


def _uniform(stream: Iterator[int], bits: int) -> int:
    """Return a uniform integer below 2^bits, bits at most 128."""
    if bits <= 64:
        return next(stream) >> (64 - bits)
    high = next(stream)
    return (high << 64 | next(stream)) >> (128 - bits)


def _one_of(stream: Iterator[int], k: int) -> bool:
    """True with probability 1 / k."""
    even = 2**64 - 2**64 % k
    while (found := next(stream)) >= even:
        pass
    return found % k == 0


def _survives(stream: Iterator[int], a: int = 1, bits: int = 0) -> bool:
    """True with probability exp(-a / 2^bits); a <= 2^bits."""
    k = 1
    while (k == 1 or _one_of(stream, k)) and (a >> bits or _uniform(stream, bits) < a):
        k += 1
    return k % 2 == 1


def _discrete(stream: Iterator[int], log: int) -> int:
    while True:
        low = _uniform(stream, log)
        if not _survives(stream, low, log):
            continue
        size = 0
        while _survives(stream):
            size += 1
        size = size << log | low
        negative = _uniform(stream, 1)
        if negative and not size:
            continue
        square = (size - (1 << log)) ** 2
        whole, part = divmod(square, 2 ** (2 * log + 1))
        if all(_survives(stream) for _ in range(whole)) and _survives(stream, part, 2 * log + 1):
            return -size if negative else size
