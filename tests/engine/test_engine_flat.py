"""Sums in one flat tensor: the gradients handed over, and a GPU's batches that are not finite, which are told later."""

import copy
import itertools

import pytest
import torch
from attached import attached, cross_entropy, data
from torch import nn

from dpbench.conformance.modules import Net
from dpbench.engine import release
from dpbench.engine.noise import At, Secure
from dpbench.engine.release import gathered, release_gradients

KEY = bytes(range(32))


def mixed():
    """Parameters of every shape: matrices, single numbers, one of another dtype, a frozen one."""
    parts = {"first": nn.Linear(5, 40), "second": nn.Linear(40, 3), "norm": nn.LayerNorm(40)}
    parts |= {"scale": torch.tensor(1.5), "wide": nn.Linear(3, 3).double()}
    parts["second"].bias.requires_grad_(False)
    return Net(lambda m, x: m.wide((m.second(m.norm(m.first(x)).tanh()) * m.scale).double()), **parts)


@pytest.fixture
def on_gpu(monkeypatch):
    """As on a GPU, whose flags the host reads later."""
    monkeypatch.setattr(release, "LATER", {"cpu"})


@pytest.fixture(params=[0, release.SMALL], ids=["as they are", "copied"])
def on_cpu(request, monkeypatch):
    """The sums of a large model and of a small one."""
    monkeypatch.setattr(release, "SMALL", request.param)


def make(**changes):
    torch.manual_seed(0)
    model, optimizer, engine = attached(mixed(), lr=0.1, attach=False, **changes)
    engine.noise.load_state_dict({"kind": "secure", "key": KEY}, replay=True)
    engine._recorder.backend.settle()  # by formula: two trainings are compared bit by bit
    engine._sampler.take(KEY)
    engine.attach(optimizer)
    return model, optimizer, engine


def step(model, optimizer, x, y):
    optimizer.step(loss=cross_entropy(model(x), y))


def test_no_gradient_shares_an_entry_with_another(on_cpu):
    model, optimizer, _ = make()
    step(model, optimizer, *data()[:8])
    held = [p.grad for p in model.parameters() if p.grad is not None]
    places = sorted((g.data_ptr(), g.data_ptr() + g.numel() * g.element_size()) for g in held)
    assert len(held) == 8 and all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    before = [g.clone() for g in held]
    step(model, optimizer, *data()[8:16])  # what somebody has kept of a release stays as it is
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_each_sum_has_noise_of_its_own_whatever_memory_the_backend_formed_it_in(on_cpu):
    """Two parameters of one gradient, one of a number, expanded, one in another order, one without a gradient."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(6, 4)) for name in "abcdef"})
    whole = torch.randn(60)
    grads = {"a": torch.randn(6, 4), "c": torch.randn(4, 6).T, "d": torch.randn(()).expand(6, 4)}
    grads |= {"b": grads["a"], "e": whole[:24].view(6, 4)}
    kept = {name: g.clone() for name, g in grads.items()} | {"f": torch.zeros(6, 4)}
    noise, again = Secure(), Secure()
    for each in (noise, again):
        each.load_state_dict({"kind": "secure", "key": KEY}, replay=True)
    parameters = dict(model.named_parameters())
    release_gradients(parameters, gathered(grads, parameters), noise, 0.5, 4, 1)
    for number, (name, p) in enumerate(parameters.items()):
        assert torch.equal(p.grad, again.added(kept[name], 0.5, At(1, 0, number)) / 4), name


def test_a_checkpoint_that_is_gone_on_from_stays_as_it_is():
    model, optimizer, engine = make()
    optimizer.virtual_step(loss=cross_entropy(model(data()[:4][0]), data()[:4][1]))
    state = engine.state_dict()
    before = copy.deepcopy(state)
    ends = []
    for _ in range(2):
        again, _, resumed = make()
        resumed.load_state_dict(state, replay=True)
        resumed.empty_step()
        assert all(torch.equal(total, before["sums"][name]) for name, total in state["sums"].items())
        ends.append(torch.cat([p.detach().double().flatten() for p in again.parameters()]))
    assert torch.equal(*ends)


# what is not finite


def spoiled(x):
    x = x.clone()
    x[1] = float("nan")
    return x


def make_spoiled(deviation=1.0):
    """After a step that was not finite."""
    model, optimizer, engine = make(noise_multiplier=deviation)
    step(model, optimizer, *data()[:8])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = data()[8:16]
    step(model, optimizer, spoiled(x), y)
    return model, optimizer, engine, before


def test_noise_alone_is_released_of_a_step_that_is_not_finite(on_gpu):
    model, _, engine, before = make_spoiled()
    empty, _, other = make()
    other.steps = 1
    other.empty_step()
    for p, q in zip(model.parameters(), empty.parameters(), strict=True):
        if p.grad is not None or q.grad is not None:  # before it has seen shapes the other covers a little more
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-3)
    assert all(
        p.isfinite().all() and (torch.equal(p, before[n]) != p.requires_grad) for n, p in model.named_parameters()
    )
    assert engine.steps == 2


def test_without_noise_no_parameter_moves(on_gpu):
    model, _, _, before = make_spoiled(deviation=0.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


MESSAGE = r"expected finite gradients, got NaN or inf in '(scale|first\.weight)' at step 2: .* noise alone was released"


@pytest.mark.parametrize("call", ["step", "empty_step", "privacy_spent", "state_dict", "detach", "the epoch's end"])
def test_it_is_told_by_the_next_call_and_once(call, on_gpu):
    model, optimizer, engine, _ = make_spoiled()
    calls = {
        "step": lambda: step(model, optimizer, *data()[16:24]),
        "empty_step": engine.empty_step,
        "privacy_spent": engine.privacy_spent,
        "state_dict": engine.state_dict,
        "detach": engine.detach,
        "the epoch's end": lambda: [None for _ in engine.data_loader(data())],
    }
    with pytest.raises(FloatingPointError, match=MESSAGE):
        calls[call]()
    assert engine.steps == 2
    calls[call]()
    assert engine.steps == 2 + (call in ("step", "empty_step"))


def test_who_goes_back_behind_it_is_not_told_again(on_gpu):
    model, optimizer, engine = make()
    x, y = data()[:8]
    step(model, optimizer, x, y)
    state = engine.state_dict()
    step(model, optimizer, spoiled(x), y)
    engine.load_state_dict(state)
    engine._patch.optimizer.param_groups[0].pop("privacy_steps", None)
    step(model, optimizer, x, y)
    assert engine.privacy_spent().steps == 3  # that one, too


def test_a_step_waits_for_no_word_of_the_one_before(on_gpu, monkeypatch):
    """What has not arrived is left for later; who asks for ε waits for it."""

    class Late:
        waited = False

        def query(self):
            return self.waited

        def synchronize(self):
            Late.waited = True

    monkeypatch.setattr(release, "sent", lambda flags: (flags.clone(), Late()))
    model, optimizer, engine, _ = make_spoiled()
    step(model, optimizer, *data()[16:24])
    assert engine.steps == 3 and len(engine._unread._found) == 3 and not Late.waited
    with pytest.raises(FloatingPointError, match="at step 2"):
        engine.privacy_spent()
    assert Late.waited and engine.privacy_spent().steps == 3


def test_large_entries_whose_sum_overflows_are_finite_and_what_is_not_is_named(on_cpu):
    grads = {"none": torch.zeros(0), "a": torch.full((3,), 3e38), "b": torch.ones(2, 2)}
    gathered(grads, grads).require_finite()
    for bad in (float("nan"), -float("inf")):
        grads["b"][1, 1] = bad
        with pytest.raises(FloatingPointError, match="in 'b'"):
            gathered(grads, grads).require_finite()
