"""Sums in one flat tensor, as on a GPU: the same training to the last bit, and what is not finite is told later."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpbench import PrivacyEngine
from dpbench.engine import finite, sums
from dpbench.engine.noise import At, Secure
from dpbench.engine.release import release_gradients
from dpbench.engine.sums import apart, gathered

KEY = bytes(range(32))


class Mixed(nn.Module):
    """Parameters of every shape: matrices, single numbers, one of another dtype, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 40), nn.Linear(40, 3)
        self.norm, self.scale = nn.LayerNorm(40), nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Linear(3, 3).double()
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        return self.wide((self.second(self.norm(self.first(x)).tanh()) * self.scale).double())


@pytest.fixture
def flat(monkeypatch):
    """As on a GPU; calling it makes that so."""

    def now() -> None:
        monkeypatch.setattr(sums, "lies_flat", lambda device: True)
        monkeypatch.setattr(finite, "lies_flat", lambda device: True)

    return now


def make(optimizer=torch.optim.SGD, model=None, **changes):
    torch.manual_seed(0)
    model = Mixed() if model is None else model
    settings = {"batch_size": 8, "sample_size": 64, "max_grad_norm": 1.0, "noise_multiplier": 1.0}
    engine = PrivacyEngine(model, **settings | changes)
    engine.noise.load_state_dict({"kind": "secure", "key": KEY}, replay=True)
    engine._recorder.backend.settle()  # by formula: two trainings are compared bit by bit
    engine._sampler.take(KEY)
    chosen = optimizer(model.parameters(), lr=0.1)
    engine.attach(chosen)
    return model, chosen, engine


def data(count=64):
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 5, generator=numbers), torch.randint(0, 3, (count,), generator=numbers))


def step(model, optimizer, x, y):
    optimizer.step(loss=F.cross_entropy(model(x), y, reduction="none"))


def train(optimizer=torch.optim.SGD, zero=None, **loading):
    model, optimizer, engine = make(optimizer)
    for x, y in engine.data_loader(data(), **loading):
        step(model, optimizer, x, y)
        if zero is not None and engine.stepped:
            optimizer.zero_grad(set_to_none=zero)
            assert all(p.grad is None if zero else not p.grad.any() for p in model.parameters() if p.requires_grad)
    engine.empty_step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("zero", "most", "optimizer"),
    [(None, None, torch.optim.SGD), (True, 3, torch.optim.AdamW), (False, 3, torch.optim.Adagrad)],
)
def test_training_is_the_same_to_the_last_bit(optimizer, zero, most, flat):
    wanted = train(optimizer, zero, max_physical_batch_size=most)
    flat()
    found = train(optimizer, zero, max_physical_batch_size=most)
    assert all(torch.equal(found[name], p) for name, p in wanted.items())


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_optimizers_that_take_all_parameters_at_once(options, flat):
    def kind(parameters, lr):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr, **options)

    wanted = train(kind)
    flat()
    assert all(torch.equal(p, wanted[name]) for name, p in train(kind).items())


def test_no_gradient_shares_an_entry_with_another(flat):
    flat()
    model, optimizer, _ = make()
    step(model, optimizer, *data()[:8])
    held = [p.grad for p in model.parameters() if p.grad is not None]
    places = sorted((g.data_ptr(), g.data_ptr() + g.numel() * g.element_size()) for g in held)
    assert len(held) == 8 and all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert len({g.untyped_storage().data_ptr() for g in held}) == 2  # of float32, and of float64
    before = [g.clone() for g in held]
    step(model, optimizer, *data()[8:16])  # what somebody has kept of a release stays as it is
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_a_part_of_a_batch_is_saved_and_gone_on_from(flat):
    wanted = None
    for lies_flat in (False, True):
        if lies_flat:
            flat()
        model, optimizer, engine = make()
        optimizer.virtual_step(loss=F.cross_entropy(model(data()[:4][0]), data()[:4][1], reduction="none"))
        state = copy.deepcopy(engine.state_dict())
        again, other, resumed = make()
        resumed.load_state_dict(state, replay=True)
        step(again, other, *data()[4:8])
        step(model, optimizer, *data()[4:8])
        ends = [torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (model, again)]
        assert torch.equal(*ends) and (wanted is None or torch.equal(ends[0], wanted))
        wanted = ends[0]


def test_sums_of_another_layout_in_memory_are_taken_as_they_are(flat):
    flat()
    model = nn.Conv2d(3, 4, 3)
    grads = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    grads["weight"] = grads["weight"].to(memory_format=torch.channels_last)
    found = gathered(grads, dict(model.named_parameters()))
    assert len(found.blocks) == 1 and all(torch.equal(found[name], g) for name, g in grads.items())
    found = gathered({"bias": grads["bias"]}, dict(model.named_parameters()), ["weight", "bias"])
    assert torch.equal(found["bias"], grads["bias"]) and not found["weight"].any() and len(found) == 2


def test_noise_is_added_in_place_but_where_sums_share_memory():
    """Two parameters of one gradient, one of a number, expanded, one in another order: each has noise of its own."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(6, 4)) for name in ("a", "b", "c", "d", "e", "f")})
    whole = torch.randn(60)
    grads = {"a": torch.randn(6, 4), "c": torch.randn(4, 6).T, "d": torch.randn(()).expand(6, 4)}
    grads |= {"b": grads["a"], "e": whole[:24].view(6, 4), "f": whole[36:].view(6, 4)}
    kept = {name: g.clone() for name, g in grads.items()}
    noise = Secure()
    noise.load_state_dict({"kind": "secure", "key": KEY}, replay=True)
    found = gathered(grads, dict(model.named_parameters()))
    assert {name: block.own for block in found.blocks for name in block.names} == {
        **dict.fromkeys("abcd", False),
        **dict.fromkeys("ef", True),
    }
    release_gradients(dict(model.named_parameters()), found, noise, 0.5, 4, 1)
    for number, (name, p) in enumerate(model.named_parameters()):
        again = Secure()
        again.load_state_dict({"kind": "secure", "key": KEY}, replay=True)
        assert torch.equal(p.grad, again.added(kept[name].contiguous(), 0.5, At(1, 0, number)) / 4), name
    assert all(torch.equal(grads[name], kept[name]) for name in "abcd")
    assert model["e"].grad.data_ptr() == grads["e"].data_ptr()  # nothing was copied


def test_sums_that_overlap_are_not_apart():
    x = torch.zeros(10)
    assert apart([x[:4], x[4:8], x[8:]]) == [True] * 3
    assert apart([x, x[2:3], x[8:], torch.zeros(10)]) == [False, False, False, True]
    assert apart([x[6:], x[::2], torch.zeros(0), torch.zeros(0)]) == [False, False, True, True]
    assert apart([x[:6], x.view(torch.uint8)[20:28], x[6:8]]) == [False, False, False]
    assert apart([x[:6], x.view(torch.uint8)[24:28], x[7:]]) == [True] * 3


def test_a_checkpoint_that_is_gone_on_from_stays_as_it_is():
    model, optimizer, engine = make()
    optimizer.virtual_step(loss=F.cross_entropy(model(data()[:4][0]), data()[:4][1], reduction="none"))
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


def test_noise_alone_is_released_of_a_step_that_is_not_finite(flat):
    flat()
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


def test_without_noise_no_parameter_moves(flat):
    flat()
    model, _, _, before = make_spoiled(deviation=0.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


MESSAGE = r"expected finite gradients, got NaN or inf in '(scale|first\.weight)' at step 2: .* noise alone was released"


@pytest.mark.parametrize("call", ["step", "empty_step", "privacy_spent", "state_dict", "detach", "the epoch's end"])
def test_it_is_told_by_the_next_call_and_once(call, flat):
    flat()
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


def test_who_goes_back_behind_it_is_not_told_again(flat):
    flat()
    model, optimizer, engine = make()
    x, y = data()[:8]
    step(model, optimizer, x, y)
    state = engine.state_dict()
    step(model, optimizer, spoiled(x), y)
    engine.load_state_dict(state)
    engine._patch.optimizer.param_groups[0].pop("privacy_steps", None)
    step(model, optimizer, x, y)
    assert engine.privacy_spent().steps == 3  # that one, too


def test_a_step_waits_for_no_word_of_the_one_before(flat, monkeypatch):
    """What has not arrived is left for later; who asks for ε waits for it."""

    class Late:
        waited = False

        def query(self):
            return self.waited

        def synchronize(self):
            Late.waited = True

    flat()
    monkeypatch.setattr(finite, "sent", lambda flags: (flags.clone(), Late()))
    model, optimizer, engine, _ = make_spoiled()
    step(model, optimizer, *data()[16:24])
    assert engine.steps == 3 and len(engine._unread._found) == 3 and not Late.waited
    with pytest.raises(FloatingPointError, match="at step 2"):
        engine.privacy_spent()
    assert Late.waited and engine.privacy_spent().steps == 3


def test_the_parameters_that_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    grads = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    grads["1.weight"][1, 1] = -float("inf")
    grads["0.bias"] = torch.zeros(0)
    with pytest.raises(FloatingPointError, match=r"in '1\.weight'"):
        finite.require_finite(grads)


def test_large_entries_whose_sum_overflows_are_finite():
    finite.require_finite({"a": torch.full((3,), 3e38), "b": torch.ones(2)})
    with pytest.raises(FloatingPointError, match="in 'b'"):
        finite.require_finite({"a": torch.full((3,), 3e38), "b": torch.tensor([1.0, float("nan")])})
