"""Normals from the cipher ChaCha20, added to a sum and rounded: a kernel in C on CPUs, torch's operations elsewhere.

    words       the cipher's blocks, ChaCha20 of RFC 8439 (Nir and Langley 2018): 20 rounds, a key of 256 bits
    normals     N(0, 1) of them
    noisy       total + N(0, deviation²), rounded to multiples of a power of two

**A normal** is one of two that Box and Muller (1958) make of 128 bits, in float64: √(-2 ln u) of 63 bits, cos and sin
of an angle of 64. The largest is 9.4, which real normals pass with probability 6e-21. Coordinate i is a function of
(key, nonce, i) alone: block 16⌊i/128⌋ + {0..15} of the cipher. So it is the same on any number of threads.

**Both ways** read the same words of the cipher, and their normals differ by the last bits of float64; after rounding to
2^-20 of the deviation one in some hundred million is another. The kernel (`noise.c`, compiled as `clipping.kernels.cpu`
says) is branch-free, and fuses all of it in one pass over the sum. Without a compiler, and on other devices, integer
operations of torch do the same on the device itself, chunk by chunk; nothing is drawn on the host for it, except for
devices without float64 (MPS).
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.kernels import cpu

BLOCKS, WORDS, NORMALS = 16, 16, 128
"""Of a group: blocks of the cipher, words of 32 bits in each, normals made of them all."""
LONGEST = 2**32 // BLOCKS * NORMALS
"""Coordinates for which one nonce has blocks: the counter of RFC 8439 has 32 bits."""
CONSTANT = struct.unpack("<4I", b"expand 32-byte k")

_CHUNK, _LARGE = 2**17, 2**22
"""Normals drawn at once by torch's operations: on a CPU what they work on stays in a cache."""


def noisy(total: Tensor, deviation: float, grid: float, key: bytes, nonce: Sequence[int]) -> Tensor:
    """`total` + N(0, deviation²) in each coordinate, formed in float64 and rounded to multiples of `grid`.

    Args:
        total: of any shape, strides and device; it is not changed.
        deviation: > 0.
        grid: a power of two.
        key: 32 bytes.
        nonce: three numbers of 32 bits: with this key, no other draw has the same.

    Returns:
        As `total`, in one piece, float32 or wider.

    Raises:
        ValueError: a key or a nonce of another size, or more coordinates than a nonce has blocks for.
    """
    if total.numel() > LONGEST:
        raise ValueError(f"expected at most {LONGEST} coordinates in a draw, got {total.numel()}")
    state = _state(key, 0, nonce)
    total = total.detach().to(torch.promote_types(total.dtype, torch.float32)).contiguous()
    if not total.numel():
        return total.clone()
    if cpu.supported(total):
        out = torch.empty_like(total)
        if not isinstance(total, FakeTensor):
            given = _unsigned(state), total.data_ptr(), total.numel(), deviation, grid, out.data_ptr()
            _loaded(total.dtype).noisy(cpu._torch().torch_parallel_for, *given)
        return out
    device = torch.device("cpu") if total.device.type == "mps" else total.device
    flat, parts = total.view(-1).to(device), []
    chunk = _CHUNK if device.type == "cpu" else _LARGE
    for start in range(0, len(flat), chunk):
        part = flat[start : start + chunk].double()
        drawn = normals(key, nonce, start // NORMALS, -(-len(part) // NORMALS), device)[: len(part)]
        parts.append((torch.round((part + drawn * deviation) / grid) * grid).to(total.dtype))
    return torch.cat(parts).view(total.shape).to(total.device)


def normals(key: bytes, nonce: Sequence[int], group: int, groups: int, device: torch.device | str) -> Tensor:
    """[128 · groups] normals, float64, in torch's operations on `device`: those from coordinate 128 · group on."""
    bits = words(key, nonce, group * BLOCKS, groups * BLOCKS, device).view(torch.int64)
    size, angle = bits.view(2, WORDS // 2, groups, BLOCKS // 2)
    uniform = (((size >> 1) & (2**63 - 1)).double() + 0.5) * 2.0**-63
    radius = torch.sqrt(-2 * torch.log(uniform))
    turn = ((angle << 2) | 2).double() * (math.pi / 4 * 2.0**-63)
    cosine, sine = radius * torch.cos(turn), radius * torch.sin(turn)
    cosine = torch.where(angle < 0, -cosine, cosine)
    swapped = ((angle >> 62) & 1).bool()
    pair = torch.stack([torch.where(swapped, sine, cosine), torch.where(swapped, cosine, sine)], 2)
    return pair.permute(1, 0, 2, 3).reshape(-1)


def words(key: bytes, nonce: Sequence[int], block: int, blocks: int, device: torch.device | str) -> Tensor:
    """[16, blocks]: the words of the cipher's blocks from number `block` on, as int32, in torch's operations."""
    first = [_signed(word) for word in _state(key, block, nonce)]
    state = torch.empty(WORDS, blocks, dtype=torch.int32, device=device)
    for word, value in enumerate(first):
        state[word] = value
    state[12] = _wrapped(torch.arange(block, block + blocks, device=device))
    a, b, c, d = (rows.clone() for rows in state.view(4, 4, blocks))
    for turn in (0, 1) * 10:
        if turn:
            b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x += y
            z ^= x
            high = z << bits
            z >>= 32 - bits
            z &= (1 << bits) - 1  # int32 is shifted with its sign
            z |= high
        if turn:
            b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return state + torch.cat([a, b, c, d])


def compiled_words(key: bytes, nonce: Sequence[int], block: int) -> Tensor:
    """[16, 16]: `words` of 16 blocks by the kernel, where `clipping.kernels.cpu.supported` says that there is one."""
    out = torch.empty(WORDS, BLOCKS, dtype=torch.int32)
    _loaded(torch.float32).cipher_words(_unsigned(_state(key, block, nonce)), out.data_ptr())
    return out


def _state(key: bytes, block: int, nonce: Sequence[int]) -> list[int]:
    if len(key) != 32 or len(nonce) != 3 or not all(0 <= word < 2**32 for word in nonce):
        raise ValueError(f"expected a key of 32 bytes and a nonce of 3 words of 32 bits, got {len(key)} bytes, {nonce}")
    return [*CONSTANT, *struct.unpack("<8I", key), block, *nonce]


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _wrapped(x: Tensor) -> Tensor:
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def _unsigned(state: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(state))(*state)


@functools.cache
def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    address, real = ctypes.c_void_p, ctypes.c_double
    library.noisy.argtypes = [address, address, address, ctypes.c_int64, real, real, address]
    library.cipher_words.argtypes = [address, address]
    library.noisy.restype = library.cipher_words.restype = None
    return library


def _loaded(dtype: torch.dtype) -> ctypes.CDLL:
    return _typed(cpu._loaded(dtype))
