"""The discrete Gaussian of Canonne, Kamath and Steinke (2020, arXiv:2004.00010), added to sums on a grid.

    discrete_noisy      grid · (round(total / grid) + N_ℤ(0, 4^log)) of many tensors at once

N_ℤ(0, s²) has each whole number x with probability proportional to exp(-x² / 2s²), here with s = 2^log. It is sampled
as they do (Algorithms 1 to 3), with s and the scale of the Laplace proposal both 2^log:

    exp(-a)       draws, the k-th true with probability a / k, until one is false: is their number odd? (von Neumann)
    exp(-n)       n times exp(-1)
    proposal      u below 2^log kept with exp(-u / 2^log), then how often exp(-1) is true, and a sign: exp(-|y| / s)
    kept          with exp(-(|y| - s)² / 2s²)

Every decision compares whole numbers, uniform ones of the cipher with numerators over a power of two, so each x has
exactly its probability if the cipher's words are random. The one thing computed in floating point is round(total /
grid), before there is any noise; the product with the grid after it says the same number in other words.

**The stream.** Rejections take as many words as they take. The block of the cipher at a tensor's place is the key of
its own streams, one for each group of 128 coordinates, whose number is the nonce. Words of 64 bits are read from block
after block, little end first. So a draw is a function of (key, nonce, coordinate), on any number of threads.

The kernel in C takes some hundred nanoseconds a coordinate. Without a compiler Python does the same with the same bits,
and a thousand times slower: for tests. Tensors of other devices are taken to the CPU and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clipping.noise.chacha import BLOCKS, NORMALS, WORDS, _compiled, _operands, words
from clipping.numerics import kernels

WIDEST = 2.0**43
"""What a total is clamped to, in units of the grid; below it, a quotient of float64 is known to 2^-10."""
ROUNDED = 1 + 2.0**-9
"""Units of the grid by which the roundings of two totals differ from what the totals do, at the most."""


def discrete_noisy(
    totals: Sequence[Tensor],
    log: int,
    grid: float,
    key: bytes,
    nonces: Sequence[Sequence[int]],
    *,
    in_place: bool = False,
    divisor: float = 1.0,
) -> list[Tensor]:
    """Each total rounded to multiples of `grid`, discrete Gaussian noise of deviation 2^log · grid added, then divided.

    Args:
        totals: of any shapes, dtypes and devices, finite.
        log: 1 to 40.
        grid: > 0.
        key: 32 bytes.
        nonces: of each total three numbers of 32 bits: with this key, no other draw of any kind has the same.
        in_place: write results over those totals that are float32 or wider, in one piece and on the CPU; else none is
            changed.
        divisor: > 0.

    Returns:
        As `totals`, each in one piece, float32 or wider.

    Raises:
        ValueError: a key, a nonce or a `log` of another size.
    """
    if not 1 <= log <= 40:
        raise ValueError(f"expected the logarithm of a deviation from 1 to 40, got {log}")
    here, found = _operands(totals, key, nonces, in_place, "cpu")
    for dtype in {x.dtype for x in here}:
        members = [i for i, x in enumerate(here) if x.dtype == dtype]
        chosen, results = [here[i] for i in members], [found[i] for i in members]
        own = [nonces[i] for i in members]
        if kernels.cpu.supported(*chosen):
            _compiled("discrete_noisy", chosen, results, log, grid, key, own, divisor)
            continue
        for total, result, nonce in zip(chosen, results, own, strict=True):
            nearest = torch.round((total.double() / grid).clamp(-WIDEST, WIDEST)).long().view(-1)
            noise = torch.tensor(drawn(total.numel(), log, key, nonce), dtype=torch.int64, device="cpu")
            result.copy_(((nearest + noise).double() * grid).view(total.shape)).div_(divisor)
    return [result.to(total.device) for result, total in zip(found, totals, strict=True)]


def drawn(count: int, log: int, key: bytes, nonce: Sequence[int]) -> list[int]:
    """`count` draws of N_ℤ(0, 4^log), in Python.

    Args:
        count: how many.
        log: the logarithm of the deviation, to base 2.
        key: of the cipher, 32 bytes.
        nonce: of the cipher, words of 32 bits.
    """
    own = words(key, nonce, 0, 1, "cpu")[:8, 0].numpy().tobytes()
    found: list[int] = []
    for group in range(-(-count // NORMALS)):
        stream = _words(own, group)
        found += [_discrete(stream, log) for _ in range(min(NORMALS, count - len(found)))]
    return found


def _words(key: bytes, group: int) -> Iterator[int]:
    """Words of 64 bits, without end."""
    nonce, block = (group % 2**32, group >> 32, 0), 0
    while True:
        rows = words(key, nonce, block, BLOCKS, "cpu").T.contiguous().numpy().tobytes()
        for start in range(0, BLOCKS * WORDS * 4, 8):
            yield int.from_bytes(rows[start : start + 8], "little")
        block += BLOCKS


def _uniform(stream: Iterator[int], bits: int) -> int:
    """Below 2^bits, at most 128."""
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
