"""AdamBC: against the paper's algorithm written out, and against torch's Adam; what the engine says of the noise."""

import copy
import itertools
import pickle

import pytest
import torch
from attached import attached, cross_entropy, says
from torch import nn

from dpbench import AdamBC, Misuse
from dpbench.engine import adjust

SHAPES = ((3, 4), (5,))


def gradients(steps, dtype=torch.float64, seed=0, scale=1.0):
    """[steps] lists of gradients, a signal of its own in each entry and normal noise."""
    source = torch.Generator().manual_seed(seed)
    signal = [torch.randn(shape, generator=source, dtype=dtype) for shape in SHAPES]
    return [[s + scale * torch.randn(s.shape, generator=source, dtype=dtype) for s in signal] for _ in range(steps)]


def parameters(dtype=torch.float64):
    source = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=source, dtype=dtype)) for shape in SHAPES]


def trained(optimizer, params, grads, noises=None):
    for step, every in enumerate(grads):
        for p, g in zip(params, every, strict=True):
            p.grad = g.clone()
        if noises is not None:
            optimizer.noise = noises[step]
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("floor", [0.4, None])
def test_it_is_the_paper_s_algorithm(floor):
    """arXiv:2312.14334, but for noise that changes: it is taken off its own gradients, and sets the floor."""
    params, grads, noises = parameters(), gradients(25), [2.0, 1.0, 0.3, 0.0, 0.7] * 5
    lr, b1, b2, eps, decay = 0.05, 0.8, 0.95, 1e-3, 0.1
    found = trained(AdamBC(params, lr, (b1, b2), eps, decay, floor=floor), params, grads, noises)
    floored = 0
    for k, theta in enumerate(p.detach() for p in parameters()):
        taken = []
        m = torch.zeros_like(theta)
        for t, every in enumerate(grads, 1):
            g = every[k] + decay * theta
            taken.append(g**2 - noises[t - 1] ** 2)
            m = b1 * m + (1 - b1) * g
            weights = [(1 - b2) * b2 ** (t - i) / (1 - b2**t) for i in range(1, t + 1)]
            second = sum(w * x for w, x in zip(weights, taken, strict=True))
            own = (2 * sum((w * s**2) ** 2 for w, s in zip(weights, noises, strict=False))) ** 0.5
            least = own if floor is None else floor
            floored += int((second < least).sum())
            theta = theta - lr * m / (1 - b1**t) / (second.clamp(min=least).sqrt() + eps)
        torch.testing.assert_close(found[k], theta, rtol=1e-12, atol=1e-12)
    assert 0 < floored < 25 * 17  # both sides of the floor were there


OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    {"foreach": True, "betas": (0.5, 0.6), "eps": 1e-3},
    {"foreach": False, "lr": torch.tensor(0.01)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_noise_it_is_torch_s_adam_to_the_bit(options, dtype):
    ends = []
    for kind in (AdamBC, torch.optim.Adam):
        params = parameters(dtype)
        optimizer = kind(params, **options)
        every = trained(optimizer, params, gradients(20, dtype), [0.0] * 20)
        ends.append((every, [optimizer.state[p]["exp_avg_sq"] for p in params]))
    for one, other in zip(itertools.chain(*ends[0]), itertools.chain(*ends[1]), strict=True):
        assert torch.equal(one, other)


def private(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3))
    return attached(model, AdamBC, 0.01, **{"max_grad_norm": 0.5, "noise_multiplier": 2.0, "steps": 10} | options)


def step(model, optimizer):
    optimizer.step(loss=cross_entropy(model(torch.randn(8, 6)), torch.arange(8) % 3))


@pytest.mark.parametrize("clip", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
def test_the_engine_says_the_noise_of_each_step(noise, clip):
    """As it is in `.grad`: of some 4000 entries, to five deviations of the estimate."""
    model, optimizer, engine = private(noise=noise, clip=clip)
    told = []
    for sigma in (2.0, 2.0) if noise == "discrete" else (2.0, 5.0):
        adjust.set_noise_multiplier(engine, sigma)
        step(model, optimizer)
        entries = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert abs(entries.std() / optimizer.noise - 1) < 5 * (2 * len(entries)) ** -0.5 + 0.01
        told.append(optimizer.noise)
    sensitivity = engine.sensitivity.bound
    assert told[0] == pytest.approx(2.0 * sensitivity / 8, rel=1e-2) and sensitivity == pytest.approx(0.5, rel=1e-2)
    engine.detach()
    with says(Misuse, r"expected PrivacyEngine.attach\(optimizer\) before a step of AdamBC.*noise is not"):
        optimizer.step()


def test_training_goes_on_from_a_checkpoint_bit_for_bit():
    grads, noises = gradients(20), [1.0, 0.5] * 10
    params = parameters()
    whole = [p.clone() for p in trained(AdamBC(params), params, grads, noises)]
    params = parameters()
    first = AdamBC(params)
    trained(first, params, grads[:9], noises[:9])
    for saved in [copy.deepcopy(first.state_dict()), pickle.loads(pickle.dumps(first.state_dict()))]:
        others = copy.deepcopy(params)
        second = AdamBC(others, lr=99.0)
        second.load_state_dict(saved)
        assert all(map(torch.equal, trained(second, others, grads[9:], noises[9:]), whole))
    held, moved = copy.deepcopy((params, first))  # as torch copies an optimizer
    assert all(map(torch.equal, trained(moved, held, grads[9:], noises[9:]), whole))


def test_a_checkpoint_of_torch_s_adam_is_taken_and_the_other_way_round():
    params, grads = parameters(), gradients(10)
    plain = torch.optim.Adam(params)
    trained(plain, params, grads)
    other = AdamBC(params, floor=0.25)
    other.load_state_dict(plain.state_dict())
    assert other.param_groups[0]["floor"] == 0.25
    trained(other, params, grads, [0.1] * 10)
    assert all(torch.isfinite(p).all() and other.state[p]["step"] == 20 for p in params)
    plain.load_state_dict(other.state_dict())
    trained(plain, params, grads)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"amsgrad": True}, "expected amsgrad=False for AdamBC, got True"),
        ({"fused": True}, "expected fused=False for AdamBC, got True"),
        ({"floor": 0.0}, "expected a finite floor > 0 or None for AdamBC, got 0.0"),
        ({"floor": float("inf")}, "expected a finite floor > 0"),
        ({"betas": (0.9, 0.0)}, r"expected betas\[1\] > 0 for AdamBC, got 0.0"),
    ],
)
def test_what_has_no_sense_is_refused_in_a_line(options, said):
    one, other = parameters()
    for given, more in (([one, other], options), ([{"params": [one]}, {"params": [other], **options}], {})):
        with says(ValueError, said):
            AdamBC(given, **more)


def test_a_checkpoint_of_amsgrad_and_banded_noise_are_refused():
    params = parameters()
    with says(ValueError, "expected amsgrad=False for AdamBC"):
        AdamBC(params).load_state_dict(torch.optim.Adam(params, amsgrad=True).state_dict())
    with says(Misuse, "expected noise='gaussian' or 'discrete' with AdamBC.*got correlated noise"):
        private(noise="banded:2")


def test_groups_have_floors_of_their_own():
    one, other = params = parameters()
    optimizer = AdamBC([{"params": [one]}, {"params": [other], "floor": 1e6}], lr=0.1, floor=1e-6)
    before = other.detach().clone()
    trained(optimizer, params, gradients(1), [0.1])
    assert [group["floor"] for group in optimizer.param_groups] == [1e-6, 1e6]
    assert (other - before).abs().max() < 1e-3
