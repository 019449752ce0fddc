"""Normals from the cipher ChaCha20, added to sums and rounded: in C on CPUs, else by Triton or torch's operations.

    words           blocks of ChaCha20, RFC 8439 (Nir and Langley 2018): 20 rounds, a key of 256 bits
    _normals        N(0, 1) from these words
    add_to_flat     N(0, deviation²) added to many tensors in one flat tensor, rounded to multiples of a power of two

**A normal** is one of two from 128 bits by Box and Muller (1958), in float64: √(-2 ln u) uses 63 bits, the cos and sin
of an angle 64. The largest is 9.4, which real normals exceed with probability 6e-21. Coordinate i is a function of
(key, nonce, i) alone: of the cipher's blocks 16⌊i/128⌋ + {0..15}. So it does not depend on the number of threads or
tensors.

**All implementations** read the same words, and their normals differ in the last bits of float64; after rounding to
2^-20 of the deviation, about one in some hundred million differs. The C kernel (`noise.c`, compiled as
`clipping.accel.cpu` describes) is branch-free and does everything in one pass over all sums, on all threads. On a GPU
one launch of a Triton program does so. Elsewhere integer operations of torch do the same on the device, chunk by chunk;
the host draws nothing, except for devices without float64 (MPS).
"""

import ctypes
import functools
import importlib
import itertools
import math
import struct
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.numerics import kernels

BLOCKS, WORDS, NORMALS = 16, 16, 128
"""Per group: blocks of the cipher, 32-bit words in each, normals made from all of them."""
LONGEST = 2**32 // BLOCKS * NORMALS
"""Coordinates that one nonce has blocks for: the counter of RFC 8439 has 32 bits."""
CONSTANT = struct.unpack("<4I", b"expand 32-byte k")

_CHUNK, _LARGE = 2**17, 2**22
"""Normals to draw at once by torch's operations, so that temporaries fit a CPU's cache."""
_LANES = 128
"""Pairs of cipher blocks in a Triton program, one a thread."""


class Segments:
    """Positions of tensors in a flat one. Each begins at a multiple of 128 entries, so that no group spans two of them.

    Args:
        counts: number of entries of each tensor.
        labels: last nonce word of each tensor; they must differ, or two tensors would get the same noise.

    Raises:
        ValueError: a tensor has too many entries, or a label does not fit 32 bits.

    Attributes:
        groups: number of groups of each tensor.
        length: number of entries of the flat tensor, gaps included.
    """

    def __init__(self, counts: Sequence[int], labels: Sequence[int]) -> None:
        if (most := max(counts, default=0)) > LONGEST:
            raise ValueError(f"expected at most {LONGEST} coordinates in a draw, got {most}")
        if min(labels, default=0) < 0 or max(labels, default=0) >= 2**32:
            raise ValueError(f"expected a nonce of 3 words of 32 bits, got {min(labels)} to {max(labels)} as the last")
        self.counts, self.labels = tuple(counts), tuple(labels)
        self.groups = [-(-count // NORMALS) for count in counts]
        self._starts = list(itertools.accumulate(self.groups, initial=0))  # in groups, with the end
        self.length = NORMALS * self._starts[-1]
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __reduce__(self) -> Any:
        """Return the call that makes a copy; it has no tables yet."""
        return Segments, (self.counts, self.labels)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return each tensor's entries [count], views of `flat`.

        Args:
            flat: all tensors, [length], or without the last gap.
        """
        return [flat[NORMALS * at : NORMALS * at + count] for at, count in zip(self._starts, self.counts, strict=False)]

    @functools.cached_property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Labels, counts and first groups (and the end), for C."""
        return _unsigned(self.labels), kernels.cpu._numbers(self.counts), kernels.cpu._numbers(self._starts)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return, for each group of 128 entries, its tensor's label and its index there: int32, cached."""
        if device in self._tables:
            return self._tables[device]
        labels = torch.cat(
            [
                torch.full((groups,), _signed(label), dtype=torch.int32, device=device)
                for groups, label in zip(self.groups, self.labels, strict=True)
            ]
        )
        numbers = torch.cat([torch.arange(groups, dtype=torch.int32, device=device) for groups in self.groups])
        if not isinstance(numbers, FakeTensor):
            self._tables[device] = labels, numbers
        return labels, numbers


def add_to_flat(
    flat: Tensor,
    segments: Segments,
    deviation: float,
    grid: float,
    key: bytes,
    nonce: Sequence[int],
    *,
    spoiled: Tensor | None = None,
    divisor: float = 1.0,
) -> None:
    """Add N(0, deviation²) in place to each tensor in `flat`, with the nonce (*nonce, label), and divide by `divisor`.

    The noisy sum is computed in float64 and rounded to multiples of `grid`. On a CUDA device with Triton this is one
    launch for any number of tensors.

    Args:
        flat: [segments.length], or without the last gap; contiguous, float32 or float64. Gaps between the tensors get
            arbitrary numbers.
        segments: positions of the tensors.
        deviation: > 0.
        grid: a power of two.
        nonce: the first two words of the nonces; no other draw with this key may use the same words and label.
        spoiled: bool [], on the device of `flat`: True to take zeros for what is in `flat`.
        divisor: > 0.

    Raises:
        ValueError: a key or nonce has a wrong size.
    """
    groups, unit = segments.length // NORMALS, grid / divisor
    if not groups:
        return
    state = state_of(key, 0, (*nonce, segments.labels[0]))
    if kernels.cpu.supported(flat) and spoiled is None:
        run_compiled("noisy", flat, segments, (deviation, grid, unit), state)
        return
    if gap := segments.length - len(flat):
        padded = torch.nn.functional.pad(flat, (0, gap))
        add_to_flat(padded, segments, deviation, grid, key, nonce, spoiled=spoiled, divisor=divisor)
        flat.copy_(padded[: len(flat)])
        return
    device = torch.device("cpu") if flat.device.type == "mps" else flat.device
    labels, numbers = segments.tables(device)
    if kernels.cuda.supported(labels) and (isinstance(flat, FakeTensor) or _agrees(device)):
        _launch(flat, labels, numbers, (deviation, unit, 1 / grid), state, spoiled)
        return
    if spoiled is not None:
        flat.masked_fill_(spoiled, 0.0)
    chunk = (_CHUNK if device.type == "cpu" else _LARGE) // NORMALS
    rows = flat.view(-1, NORMALS)
    for start in range(0, groups, max(1, chunk)):
        part = rows[start : start + max(1, chunk)]
        drawn = _normals(_words(state, labels[start : start + len(part)], numbers[start : start + len(part)]))
        total = part.to(device).double() + drawn.view(-1, NORMALS) * deviation
        part.copy_((torch.round(total / grid) * unit).to(flat.dtype))


@functools.cache
def _agrees(device: torch.device) -> bool:
    """True if the Triton program runs on this device and draws the same as torch's operations. Tested once; warns if
    not.

    (Triton needs a C compiler to launch, and wrong noise would go unnoticed.)
    """
    state = state_of(bytes(range(32)), 0, (1, 2, 0))
    labels, numbers = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([3, -4], [0, 2**28 - 1]))
    found = torch.zeros(2 * NORMALS, dtype=torch.float64, device=device)
    try:
        _launch(found, labels, numbers, (1.0, 2.0**-48, 2.0**48), state)
        if float((found - _normals(_words(state, labels, numbers))).abs().max()) < 2.0**-40:
            return True
        reason = "it draws other numbers"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    warnings.warn(
        f"expected Triton's program to draw the noise on {device}, but {reason}; torch's operations draw it, slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _launch(
    flat: Tensor,
    labels: Tensor,
    numbers: Tensor,
    scale: Sequence[float],
    state: Sequence[int],
    spoiled: Tensor | None = None,
) -> None:
    """Launch the Triton program once. The cipher's `state` takes its block and label from the tables."""
    if isinstance(flat, FakeTensor):
        return
    program = importlib.import_module("clipping.noise.chacha_program").noisy
    words = [_signed(word) for word in (*state[4:12], *state[13:15])]
    programs = -(-len(flat) // NORMALS * BLOCKS // 2 // _LANES)
    with torch.cuda.device_of(flat):
        given = flat, labels, numbers, labels if spoiled is None else spoiled, len(labels), *map(_bits, scale), *words
        program[(programs,)](*given, HAS_FLAG=spoiled is not None, LANES=_LANES)


def run_compiled(
    kernel: str, flat: Tensor, segments: Segments, scale: tuple[float, float, float], state: Sequence[int]
) -> None:
    """Call a C kernel once for all tensors in `flat`, which `kernels.cpu` supports.

    Args:
        kernel: "noisy" or "discrete_noisy".
        flat, segments: as in `add_to_flat`.
        scale: the deviation or its logarithm, the grid, and what one step of the grid becomes.
        state: of the cipher; labels replace its last word.
    """
    if isinstance(flat, FakeTensor):
        return
    labels, counts, units = segments.arrays
    given = kernels.cpu._torch().torch_parallel_for, _unsigned(state), labels, flat.data_ptr(), counts, units
    getattr(_typed(kernels.cpu._loaded(flat.dtype)), kernel)(*given, len(segments.counts), *scale)


def _normals(found: Tensor) -> Tensor:
    """[128 · groups] normals from the cipher's words [16, 16 · groups]."""
    bits = found.view(torch.int64)
    groups = bits.shape[1] // (BLOCKS // 2)
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
    """Return the words of the cipher's blocks from number `block` on, [16, blocks] int32, by torch's operations.

    Args:
        block: the number of the first.
        blocks: number of blocks.
    """
    return _ciphered(_filled(state_of(key, block, nonce), torch.arange(block, block + blocks, device=device)))


def _words(state: Sequence[int], labels: Tensor, numbers: Tensor) -> Tensor:
    """[16, 16 · groups]: words of groups of several nonces, by the last word and the group's number for each."""
    within = torch.arange(BLOCKS, device=numbers.device)
    filled = _filled(state, (numbers.long()[:, None] * BLOCKS + within).view(-1))
    filled[15] = labels[:, None].expand(-1, BLOCKS).reshape(-1)
    return _ciphered(filled)


def _filled(state: Sequence[int], counts: Tensor) -> Tensor:
    """[16, blocks] int32: the cipher's state before its rounds, with these block numbers."""
    filled = torch.empty(WORDS, len(counts), dtype=torch.int32, device=counts.device)
    for word, value in enumerate(state):
        filled[word].fill_(_signed(value))
    filled[12] = _wrapped(counts)
    return filled


def _ciphered(state: Tensor) -> Tensor:
    """[16, blocks]: 20 rounds, plus the initial state."""
    blocks = state.shape[1]
    a, b, c, d = (rows.clone() for rows in state.view(4, 4, blocks))
    for turn in (0, 1) * 10:
        if turn:
            b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x += y
            z ^= x
            high = z << bits
            z >>= 32 - bits
            z &= (1 << bits) - 1  # int32 shifts keep the sign
            z |= high
        if turn:
            b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return state + torch.cat([a, b, c, d])


def state_of(key: bytes, block: int, nonce: Sequence[int]) -> list[int]:
    """Return the cipher's state before a block. In a draw for several tensors, their labels replace its last word.

    Args:
        block: its number.

    Raises:
        ValueError: a key or nonce has a wrong size.
    """
    if len(key) != 32 or len(nonce) != 3 or min(nonce) < 0 or max(nonce) >= 2**32:
        raise ValueError(f"expected a key of 32 bytes and a nonce of 3 words of 32 bits, got {len(key)} bytes, {nonce}")
    return [*CONSTANT, *struct.unpack("<8I", key), block, *nonce]


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _wrapped(x: Tensor) -> Tensor:
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def _bits(number: float) -> int:
    """Return the bits of a float64 as an integer: Triton would pass a float32."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def _unsigned(state: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(state))(*state)


@functools.cache
def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    address, real = ctypes.c_void_p, ctypes.c_double
    library.noisy.argtypes = library.discrete_noisy.argtypes = [*[address] * 6, ctypes.c_int64, *[real] * 3]
    library.noisy.restype = library.discrete_noisy.restype = None
    return library
