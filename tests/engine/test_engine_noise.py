"""The engine's noise: the cipher's words, the normal distribution, one draw at each place, what checkpoints keep."""

import itertools
import math
import multiprocessing
import struct

import numpy as np
import pytest
import torch
from fake_graph import Recorder
from scipy import special, stats
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from clipping.accel import cpu
from clipping.native import library
from clipping.noise.chacha import Segments, _normals, add_to_flat, words
from dpbench import Misuse
from dpbench.engine.discrete import Discrete
from dpbench.engine.noise import At, Pseudo, Secure, secret

LIBRARY = pytest.mark.skipif(not cpu.supported(torch.empty(0)), reason="no C compiler that could make the kernels")
KEY = bytes(range(32))
AT = At(step=3, process=1, parameter=2)


@pytest.fixture(params=[True, False], ids=["compiled", "by torch"])
def either_way(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(cpu, "_library", lambda dtype: None)


def noise_of(key: bytes = KEY) -> Secure:
    noise = Secure()
    noise.load_state_dict({"kind": "secure", "key": key}, replay=True)
    return noise


def drawn(count: int, key: bytes = KEY, at: At = AT) -> Tensor:
    """Normals, float64, on a grid of 2^-20."""
    return noise_of(key).added(torch.zeros(count, dtype=torch.float64), 1.0, at)


def noisy(total: Tensor, deviation: float, grid: float, key: bytes, nonce: tuple[int, int, int]) -> Tensor:
    """The sum of n · 128 entries with noise, at this nonce."""
    flat = total.clone()
    add_to_flat(flat, Segments((len(flat),), nonce[2:]), deviation, grid, key, nonce[:2])
    return flat


def stream(found: Tensor, block: int) -> str:
    """A block as the bytes that RFC 8439 writes."""
    return struct.pack("<16i", *found[:, block].tolist()).hex()


# RFC 8439, section 2.3.2, and appendix A.1, vector 4: key, nonce, number of the block, block
VECTORS = [
    (
        KEY,
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        bytes([0, 0xFF, *[0] * 30]),
        "00" * 12,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
]


@pytest.mark.parametrize(("key", "nonce", "block", "expected"), VECTORS)
def test_the_cipher_is_that_of_rfc_8439(key, nonce, block, expected):
    numbers = struct.unpack("<3I", bytes.fromhex(nonce))
    assert stream(words(key, numbers, block, 1, "cpu"), 0) == expected
    assert stream(words(key, numbers, 0, 5, "cpu"), block) == expected


@LIBRARY
@pytest.mark.parametrize("narrower", ["", pytest.param("-mno-avx512f", marks=pytest.mark.slow), "-mno-avx"])
def test_the_kernel_and_torch_s_operations_draw_the_same(narrower, monkeypatch, tmp_path):
    """The same normals to 2^-48, with vectors of every width, and so the same words of the cipher."""
    if narrower and not library._processor().startswith("flags"):
        pytest.skip("chooses among the vectors of x86 processors")
    if narrower:
        monkeypatch.setattr(library, "_folder", lambda: tmp_path)
        monkeypatch.setenv("CC", f"cc {narrower}")
        monkeypatch.setattr(library, "_load", library._load.__wrapped__)
        monkeypatch.setattr(cpu, "_library", cpu._library.__wrapped__)
    key, nonce = secret(None), (2**32 - 1, 5, 2**31)
    total = torch.zeros(128 * 700, dtype=torch.float64)
    finest = noisy(total, 1.0, 2.0**-50, key, nonce)
    assert (finest - _normals(words(key, nonce, 0, 16 * 700, "cpu"))).abs().max() < 2**-48
    total = torch.linspace(-9, 9, 128 * 700, dtype=torch.float64)
    compiled = noisy(total, 1.5, 2.0**-20, key, nonce)
    monkeypatch.setattr(cpu, "_library", lambda dtype: None)
    found = noisy(total, 1.5, 2.0**-20, key, nonce)
    assert (found != compiled).sum() <= 1 and (found - compiled).abs().max() <= 2**-20  # one in some 10^9 is rounded up


def assert_independent(a: Tensor, b: Tensor) -> None:
    limit = 5 / len(a) ** 0.5
    assert abs((a * b).mean().item()) < limit
    assert abs(((a**2 - 1) * (b**2 - 1)).mean().item()) / 2 < limit
    assert abs((a[1:] * b[:-1]).mean().item()) < limit and abs((a[:-1] * b[1:]).mean().item()) < limit


@pytest.mark.parametrize("other", [At(4, 1, 2), At(3, 0, 2), At(3, 1, 1), At(1, 3, 2), At(3 + 2**31, 1, 2)])
def test_different_places_have_independent_noise(other):
    assert_independent(drawn(10**6), drawn(10**6, at=other))


def test_neighbouring_coordinates_and_those_of_one_pair_are_independent():
    found = drawn(2**20)
    for apart in (8, 16, 128, 2**12):  # cos and sin of an angle lie 8 apart
        assert_independent(found[:-apart], found[apart:])
    pairs = found.view(-1, 2, 8)
    a, b = pairs[:, 0].flatten(), pairs[:, 1].flatten()
    assert_independent(a, b)
    assert abs(torch.corrcoef(torch.stack([a.abs(), b.abs()]))[0, 1].item()) < 5 / len(a) ** 0.5


def assert_normal(found: Tensor) -> None:
    """Moments, the distance of the empirical distribution, and the tails: none beyond five standard errors."""
    count = len(found)
    for moment in range(1, 7):
        expected = 0 if moment % 2 else special.factorial2(moment - 1)
        variance = special.factorial2(2 * moment - 1) - expected**2
        assert abs((found**moment).mean().item() - expected) < 5 * (variance / count) ** 0.5, moment
    for beyond in (2.0, 3.0, 4.0, 5.0):
        for side in (found, -found):
            expected = count * special.ndtr(-beyond)
            # a count of a few is not normal: beyond five deviations of it, as probable as one of a normal
            low, high = stats.poisson.ppf([3e-7, 1 - 3e-7], expected)
            assert low <= (side > beyond).sum().item() <= high, beyond
    below = special.ndtr(found.sort().values.numpy())
    steps = np.arange(count + 1) / count
    distance = max((steps[1:] - below).max(), (below - steps[:-1]).max())
    assert special.kolmogorov(distance * count**0.5) > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_normal(dtype, either_way):
    assert_normal(noise_of().added(torch.zeros(2 * 10**6, dtype=dtype), 1.0, AT).double())


def test_a_coordinate_s_noise_depends_on_its_index_alone(either_way, monkeypatch):
    monkeypatch.setattr("clipping.noise.chacha._CHUNK", 2**9)
    longest = drawn(1500)
    for count in (1, 127, 128, 129, 1024, 1499):
        assert torch.equal(drawn(count), longest[:count])


def test_every_number_is_a_multiple_of_one_grid(either_way):
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.float16]:
        for deviation in [1.5, 1.0, 3e-7, 1e3]:
            total = (torch.linspace(-40, 40, 999, dtype=torch.float64) * deviation).to(dtype)
            given = total.clone()
            found = noise_of().added(total, deviation, AT)
            assert found.dtype == torch.promote_types(dtype, torch.float32) and torch.equal(total, given)
            grid = 2.0 ** (math.floor(math.log2(deviation)) - 20)
            multiples = found.double() / grid
            assert torch.equal(multiples, multiples.round()) and len(multiples.unique()) > 990
            left = found.double() - total.double() - drawn(999) * deviation
            assert left.abs().max() < 4e-6 * deviation  # 2^-19, and float32 beyond 16


def test_strides_sizes_and_no_deviation(either_way):
    total = torch.randn(7, 33, 20).permute(2, 0, 1)[::2]
    assert torch.equal(noise_of().added(total, 1.0, AT), noise_of().added(total.contiguous(), 1.0, AT))
    one = torch.randn(1, 1).expand(5, 300)
    assert torch.equal(noise_of().added(one, 1.0, AT), noise_of().added(one.clone(), 1.0, AT))
    assert noise_of().added(torch.zeros(0, 3), 1.0, AT).shape == (0, 3)
    assert noise_of().added(torch.zeros(()), 1.0, AT).shape == ()
    noise = noise_of()
    for _ in range(2):  # nothing is drawn, so no place is taken
        assert torch.equal(noise.added(total, 0.0, AT), total)
    assert noise.added(total.bfloat16(), 0.0, AT).dtype == torch.float32
    parameter = nn.Parameter(torch.zeros(3))
    assert not noise.added(parameter, 1.0, AT).requires_grad


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_another_device_nothing_is_drawn_or_read_on_the_host(device):
    """Tensors without values: whatever asked the device for a number would raise."""
    with FakeTensorMode(), Recorder() as recorder:
        found = Secure().added(torch.zeros(30, 40, device=device), 1.0, AT)
    assert found.shape == (30, 40) and found.device.type == device and found.dtype == torch.float32
    assert {x.device.type for x in tree_leaves(recorder.ran) if isinstance(x, Tensor)} == {device}


def test_a_place_is_drawn_once():
    """Two draws at one place are one: the difference of what they were added to is there to be seen."""
    noise, total = Secure(), torch.zeros(5)
    noise.added(total, 1.0, At(2, 0, 0))
    noise.added(total, 1.0, At(2, 0, 1))
    noise.added(total, 1.0, At(2, 1, 0))
    for taken in (At(2, 0, 1), At(1, 0, 7)):
        with pytest.raises(Misuse, match=r"expected a place at which no noise was drawn, got At\(step="):
            noise.added(total, 1.0, taken)
    noise.added(total, 1.0, At(3, 0, 0))


def test_what_fits_in_no_nonce_and_a_deviation_that_is_none_are_refused():
    for at in (At(2**32, 0, 0), At(0, 2**32, 0), At(0, 0, 2**32), At(0, 0, -1)):
        with pytest.raises(ValueError, match="nonce of 3 words of 32 bits"):
            Secure().added(torch.zeros(2), 1.0, at)
    for deviation in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="expected a finite deviation >= 0"):
            Secure().added(torch.zeros(2), deviation, AT)
    with pytest.raises(ValueError, match=f"at most {2**35} coordinates"):
        Secure().added(torch.zeros(1).expand(2**35 + 1), 1.0, AT)


def draw(noise, at=AT) -> Tensor:
    return noise.added(torch.zeros(1000), 1.0, at)


def test_a_checkpoint_is_gone_on_from_with_a_fresh_key_or_replayed():
    noises = [Secure() for _ in range(4)]
    state = noises[0].state_dict()
    for noise, replay in zip(noises[1:], (True, False, False), strict=True):
        noise.load_state_dict(state, replay=replay)
    original, replayed, *fresh = map(draw, noises)
    assert torch.equal(replayed, original)
    for a, b in itertools.combinations([original, *fresh], 2):
        assert (a == b).sum() < 5
    noises[1].load_state_dict(state, replay=True)  # again, from where the checkpoint is
    assert torch.equal(draw(noises[1]), original)


def test_checkpoints_of_another_kind_do_not_load():
    seeded = Pseudo(torch.Generator())
    others = ((Secure(), Discrete(1.0, 9)), (Discrete(1.0, 9), Secure()), (Secure(), seeded), (seeded, Secure()))
    for noise, state in ((noise, other.state_dict()) for noise, other in others):
        with pytest.raises(ValueError, match="same kind of noise"):
            noise.load_state_dict(state)


def _draw_here(noise, queue) -> None:
    queue.put((draw(noise, At(9, 0, 0)).tolist(), noise.state_dict()["key"]))


def test_a_forked_process_has_a_key_of_its_own():
    noise, context = Secure(), multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_draw_here, args=(noise, queue))
    child.start()
    theirs, key = queue.get()
    child.join()
    assert key != noise.state_dict()["key"] and draw(noise, At(9, 0, 0)).tolist() != theirs
