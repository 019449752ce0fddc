# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""The Triton program of `clipping.noise.chacha`, which alone imports this module, as it needs Triton.

A lane has two neighbouring blocks of the cipher, 32 words, and makes eight pairs of normals from them. No lane reads
another's results, so that any number of lanes gives the same bits.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=(
        *("groups", "deviation", "unit", "finer", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "step", "process"),
    )
)
def noisy(
    flat,
    labels,
    numbers,
    spoiled,
    groups,
    deviation,
    unit,
    finer,
    k0,
    k1,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    step,
    process,
    HAS_FLAG: tl.constexpr,
    LANES: tl.constexpr,
):
    """flat [128 · groups] + N(0, deviation²), rounded to multiples of grid, times unit / grid, in place.

    labels, numbers: for each group, the last word of the nonce, and the group's number within that nonce. spoiled: with
    HAS_FLAG a bool, whether to take zeros for what is in flat. deviation, unit and finer (1 / grid) are the bits of
    float64. k0 to k7, step and process: words of the key and the nonce.
    """
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    group, pair = lane // 8, (lane % 8).to(tl.int32)
    inside = group < groups
    label = tl.load(labels + group, mask=inside, other=0).to(tl.uint32, bitcast=True)
    block = (tl.load(numbers + group, mask=inside, other=0) * 16 + 2 * pair).to(tl.uint32, bitcast=True)
    key = (k0, k1, k2, k3, k4, k5, k6, k7)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = cipher(key, block, step, process, label)
    y0, y1, y2, y3, y4, y5, y6, y7, y8, y9, y10, y11, y12, y13, y14, y15 = cipher(key, block + 1, step, process, label)
    place = flat + group * 128 + pair
    scale = _real(deviation, lane), _real(unit, lane), _real(finer, lane)
    is_read = inside
    if HAS_FLAG:
        is_read = inside & (tl.load(spoiled) == 0)
    _add(place, inside, is_read, x0, y0, x8, y8, scale)
    _add(place + 16, inside, is_read, x1, y1, x9, y9, scale)
    _add(place + 32, inside, is_read, x2, y2, x10, y10, scale)
    _add(place + 48, inside, is_read, x3, y3, x11, y11, scale)
    _add(place + 64, inside, is_read, x4, y4, x12, y12, scale)
    _add(place + 80, inside, is_read, x5, y5, x13, y13, scale)
    _add(place + 96, inside, is_read, x6, y6, x14, y14, scale)
    _add(place + 112, inside, is_read, x7, y7, x15, y15, scale)


@triton.jit
def cipher(key, block, step, process, label):
    """Return the 16 words of the blocks with these numbers: RFC 8439, section 2.3.

    Args:
        key: its eight words.
        block: the numbers of the blocks.
        step, process, label: the three words of the nonce.
    """
    zero = block & 0
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k0, k1, k2, k3 = _word(key[0], zero), _word(key[1], zero), _word(key[2], zero), _word(key[3], zero)
    k4, k5, k6, k7 = _word(key[4], zero), _word(key[5], zero), _word(key[6], zero), _word(key[7], zero)
    n0, n1 = _word(step, zero), _word(process, zero)
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, block, n0, n1, label
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    a, b, c, d = x0 + c0, x1 + c1, x2 + c2, x3 + c3
    e, f, g, h = x4 + k0, x5 + k1, x6 + k2, x7 + k3
    i, j, k, m = x8 + k4, x9 + k5, x10 + k6, x11 + k7
    return a, b, c, d, e, f, g, h, i, j, k, m, x12 + block, x13 + n0, x14 + n1, x15 + label


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _turned(d ^ a, 16)
    c += d
    b = _turned(b ^ c, 12)
    a += b
    d = _turned(d ^ a, 8)
    c += d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _turned(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def _word(number, zero):
    """Turn an int32 from the host into 32-bit words, one a lane."""
    return (zero.to(tl.int32, bitcast=True) + number).to(tl.uint32, bitcast=True)


@triton.jit
def _real(bits, lane):
    """Return the float64 of these bits, in each lane."""
    return ((lane & 0) + bits).to(tl.float64, bitcast=True)


@triton.jit
def _add(place, inside, is_read, low, high, turn_low, turn_high, scale):
    """Add Box and Muller's two normals from 128 bits, at `place` and 8 entries further."""
    deviation, unit, finer = scale
    size = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    angle = (turn_low.to(tl.uint64) | (turn_high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
    uniform = ((size >> 1).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 1.0842021724855044e-19  # 2^-63
    radius = tl.sqrt(-2.0 * tl.log(uniform))
    x = ((angle << 2) | 2).to(tl.float64) * 1.0842021724855044e-19 * _exact(0.7853981633974483)  # within ±π/4
    # Taylor series, as in noise.c: a library's cos and sin of any angle would need memory and branches
    q = x * x
    c = q * _exact(1 / 20922789888000) - _exact(1 / 87178291200)
    c = q * (q * (q * (q * c + _exact(1 / 479001600)) - _exact(1 / 3628800)) + _exact(1 / 40320)) - _exact(1 / 720)
    s = q * _exact(1 / 355687428096000) - _exact(1 / 1307674368000)
    s = q * (q * (q * (q * s + _exact(1 / 6227020800)) - _exact(1 / 39916800)) + _exact(1 / 362880)) - _exact(1 / 5040)
    cosine = radius * (q * (q * (q * c + _exact(1 / 24)) - 0.5) + 1.0)
    sine = radius * (x + x * (q * (q * (q * s + _exact(1 / 120)) - _exact(1 / 6))))
    cosine = tl.where(angle < 0, -cosine, cosine)
    swapped = ((angle >> 62) & 1) != 0
    _store(place, inside, is_read, tl.where(swapped, sine, cosine), deviation, unit, finer)
    _store(place + 8, inside, is_read, tl.where(swapped, cosine, sine), deviation, unit, finer)


@triton.jit
def _exact(NUMBER: tl.constexpr):
    """Return a float64 constant; a bare literal may become a float32."""
    return tl.full((), NUMBER, tl.float64)


@triton.jit
def _store(place, inside, is_read, normal, deviation, unit, finer):
    total = tl.load(place, mask=is_read, other=0.0).to(tl.float64)
    # adding 1.5 · 2^52 removes the fraction
    rounded = ((total + normal * deviation) * finer + 6755399441055744.0) - 6755399441055744.0
    tl.store(place, (rounded * unit).to(place.dtype.element_ty), mask=inside)
