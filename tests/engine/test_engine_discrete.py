"""Discrete noise: exactly the distribution that is stated, on a grid, and bounds that hold for it."""

import math

import numpy as np
import pytest
import torch
from attached import attached, batch, cross_entropy, says
from scipy import stats
from torch import nn

from accounting.series import log_moments
from clipping.accel import cpu
from clipping.noise import discrete
from clipping.noise.chacha import Segments
from clipping.noise.discrete import ROUNDED, WIDEST, add_discrete
from dpbench import PrivacyEngine
from dpbench.engine.discrete import Discrete
from dpbench.engine.noise import At

LIBRARY = pytest.mark.skipif(not cpu.supported(torch.empty(0)), reason="no C compiler that could make the kernels")
KEY, NONCE = bytes(range(32)), (1, 2, 3)


def noisy(total: torch.Tensor, log: int, grid: float, nonce: tuple[int, int, int] = NONCE) -> torch.Tensor:
    segments = Segments((len(total),), nonce[2:])
    flat = total.new_zeros(segments.length)
    flat[: len(total)] = total
    add_discrete(flat, segments, log, grid, KEY, nonce[:2])
    return flat[: len(total)]


def integers(count: int, log: int, nonce: tuple[int, int, int] = NONCE) -> np.ndarray:
    """Draws by the kernel, or as many as Python makes in a second."""
    count = count if cpu.supported(torch.empty(0)) else 4000
    return noisy(torch.zeros(count, dtype=torch.float64), log, 1.0, nonce).long().numpy()


def probabilities(log: int, reach: int) -> np.ndarray:
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / 2 ** (2 * log + 1))
    return weights / weights.sum()


@pytest.mark.parametrize("log", [1, 2, 5])
def test_each_whole_number_has_its_probability(log):
    found, reach = integers(1_000_000, log), math.ceil(3.5 * 2**log)
    inside = found[np.abs(found) <= reach]
    assert 0.99 < len(inside) / len(found) < 1
    counts = np.bincount(inside + reach, minlength=2 * reach + 1)
    expected = probabilities(log, 12 * 2**log)[12 * 2**log - reach : 12 * 2**log + reach + 1]
    beyond = len(found) * (1 - expected.sum())
    p = stats.chisquare([*counts, len(found) - len(inside)], [*(expected * len(found)), beyond]).pvalue
    assert p > 1e-4


def test_on_a_fine_grid_it_is_normal_and_coordinates_are_independent():
    x = integers(400_000, 24) / 2.0**24
    assert stats.kstest(x, "norm").pvalue > 1e-4
    for lag in (1, 2, 127, 128, 256):
        assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 5 / math.sqrt(len(x))
    others = [integers(len(x), 24, nonce) / 2.0**24 for nonce in ((2, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert np.abs(np.corrcoef([x, *others]) - np.eye(4)).max() < 5 / math.sqrt(len(x))


@LIBRARY
@pytest.mark.parametrize("log", [1, 7, 24, 33, 40])
def test_the_kernel_and_python_draw_the_same(log, monkeypatch):
    segments = Segments((300, 35, 0, 1), range(4))
    for dtype in (torch.float32, torch.float64):
        flat = torch.randn(segments.length, dtype=dtype) * 50
        by_kernel, by_python = flat.clone(), flat.clone()
        add_discrete(by_kernel, segments, log, 0.3, KEY, (1, 2))
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "supported", lambda *_: False)
            add_discrete(by_python, segments, log, 0.3, KEY, (1, 2))
        assert torch.equal(by_kernel, by_python) and not torch.equal(by_kernel, flat)


def scripted(*words: int):
    return iter(words)


def test_decisions_are_of_whole_numbers_at_their_edges():
    top = 2**64 - 1
    assert discrete._uniform(scripted(top), 3) == 7 and discrete._uniform(scripted(5, top), 66) == 5 << 2 | 3
    assert not discrete._one_of(scripted(top, 1), 3)  # 2^64 - 1 is the one word too many for thirds
    assert discrete._one_of(scripted(top - 3), 3)
    assert discrete._survives(scripted(0), 0, 4)  # exp(0)
    assert discrete._survives(scripted(3 << 61), 3, 3)  # the first of 8 parts that is not below 3
    assert not discrete._survives(scripted(2 << 61, 1), 3, 3)  # below, and then no half
    assert discrete._survives(scripted(2 << 61, 2, 2 << 61, 1), 3, 3)  # below twice, and then no third


def test_what_is_released_lies_on_the_grid_and_large_totals_are_clamped():
    noise = Discrete(1.5, 100)
    grid = 0.25 / 2.0**noise._log
    found = noise.added(torch.randn(1000, dtype=torch.float64), 0.25, At(1, 0, 0)) / grid
    assert torch.equal(found, found.round())
    huge = noisy(torch.tensor([1e30, -1e30], dtype=torch.float64), 10, 1.0)
    assert ((huge.abs() - WIDEST).abs() < 20 * 2**10).all()


@pytest.mark.parametrize("created_for", [5000, 3000])
def test_rounding_moves_neighbours_no_further_apart_than_the_noise_allows_for(created_for):
    torch.manual_seed(0)
    d, sigma, bound = 5000, 0.7, 1.3
    noise = Discrete(sigma, created_for)
    deviation = noise.deviation(sigma, bound, d)
    grid = deviation / 2.0**noise._log
    assert sigma * (bound / grid + math.sqrt(d) * ROUNDED) == pytest.approx(2.0**noise._log, rel=1e-12)
    assert sigma * bound < deviation < sigma * bound * (1 + 2.0**-11)
    for scale in (1e-6, 1.0, 1e4):
        x, shift = scale * torch.randn(d, dtype=torch.float64), torch.randn(d, dtype=torch.float64)
        shift *= bound / shift.norm()
        moved = torch.round((x + shift) / grid) - torch.round(x / grid)
        assert moved.norm() <= 2.0**noise._log / sigma


@pytest.mark.parametrize("q", [1.0, 0.2])
@pytest.mark.parametrize(("sigma", "shift"), [(2.0, 1), (4.0, 3), (16.0, 16)])
def test_moments_of_the_pair_are_those_of_the_gaussian_at_most(q, sigma, shift):
    """Both directions, on the whole numbers, by adding up; `sigma` in units of the grid."""
    x = np.arange(-int(60 * sigma), int(60 * sigma) + 1.0)
    without = -(x**2) / (2 * sigma**2)
    normaliser = np.logaddexp.reduce(without)
    shifted = -((x - shift) ** 2) / (2 * sigma**2)
    mixed = np.logaddexp(math.log1p(-q) + without, math.log(q) + shifted) if q < 1 else shifted
    for order in (2, 3, 8, 20):
        stated = float(log_moments([order - 1.0], sigma / shift, q)[0])
        for p, of in ((mixed, without), (without, mixed)):
            moment = np.logaddexp.reduce(order * p - (order - 1) * of) - normaliser
            assert moment <= stated * (1 + 1e-9) + 1e-12


def engine_of(**options) -> PrivacyEngine:
    return attached(attach=False, **{"noise": "discrete"} | options)[2]


def test_an_engine_says_what_it_draws_and_accounts_for_that():
    engine = engine_of(noise_multiplier=None, target_epsilon=3.0, steps=10)
    spent = engine.privacy_spent()
    assert spent.accountant == "rdp:whole" and spent.noise.startswith("discrete Gaussian on a grid of 2^-")
    assert spent.kind == "upper_bound" and spent.private
    assert engine_of(noise="gaussian").privacy_spent().accountant == "prv"
    assert engine_of(accountant="moments").privacy_spent().accountant == "moments"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise": "discret"}, "expected noise, one of gaussian, discrete, banded:N, blt:N, got 'discret'"),
        ({"accountant": "prv"}, "expected accountant, one of rdp:whole, moments with noise='discrete', got 'prv'"),
        ({"sampling": "shuffled"}, "expected sampling='poisson' with noise='discrete', got 'shuffled'"),
        ({"generator": torch.Generator()}, "expected noise='discrete' or a generator, got both"),
        ({"noise_multiplier": 1e9}, "take noise='gaussian'"),
    ],
)
def test_what_it_cannot_promise_is_refused(options, words):
    with says(ValueError, words):
        engine_of(**options)


def test_without_noise_nothing_is_rounded():
    engine = engine_of(noise_multiplier=0.0)
    total = torch.tensor([math.pi])
    assert torch.equal(engine.noise.added(total, 0.0, At(1, 0, 0)), total)
    assert not engine.privacy_spent().private


def test_a_model_that_grows_gets_the_noise_of_its_size():
    model, optimizer, engine = attached(noise="discrete", sampling="poisson")
    asked = []
    engine.noise.deviation = lambda *given: asked.append(given[2]) or type(engine.noise).deviation(engine.noise, *given)
    x, y = batch(8)
    for _ in range(2):
        optimizer.step(loss=cross_entropy(model(x), y))
        model.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": list(model[-1].parameters())})
    assert asked == [75, 87]
