"""Opacus' own loops with one import changed: they learn, cost the same ε, and without noise come to its weights."""

from __future__ import annotations

import math
import warnings
from typing import Any

import opacus
import pytest
import torch
from opacus.layers import DPLSTM
from opacus_loops import CharNet, ConvNet, accuracy, digits, ghost, mnist, names, sequences
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.integrations.opacus import PrivacyEngine

PRIVATE = dict(noise_multiplier=0.8, max_grad_norm=1.0)
FIXED = dict(noise_multiplier=0.0, max_grad_norm=0.3, poisson_sampling=False)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("_module."): p.detach().clone() for name, p in model.named_parameters()}


def of_opacus(**options: Any) -> opacus.PrivacyEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opacus.PrivacyEngine(**options)


def distance(one: nn.Module, other: nn.Module) -> float:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.slow  # without noise its weights are those of Opacus, and so is its ε, which tests below show
def test_the_mnist_loop_learns_and_says_what_it_cost():
    x, y = digits()
    torch.manual_seed(0)
    engine = PrivacyEngine()
    model, losses = mnist(engine, ConvNet(), TensorDataset(x, y), batch_size=128, epochs=10, **PRIVATE)
    assert accuracy(model, x, y) > 0.6 and losses[-1] < 0.8 * losses[0]
    assert engine.engine.steps == 10 * 15 and engine.accountant.history == [(0.8, 1 / 15, 150)]
    spent = engine.engine.privacy_spent(1e-5)
    assert engine.accountant.get_epsilon(delta=1e-5) == engine.get_epsilon(1e-5) == spent.epsilon
    assert spent.private and spent.sampled_by == "engine"


@pytest.mark.slow  # without noise its weights are those of Opacus, which a test below shows
def test_the_names_loop_learns_with_the_recurrent_layer_of_opacus_and_of_torch():
    data = sequences()
    for recurrent in (DPLSTM, nn.LSTM):
        torch.manual_seed(0)
        engine = PrivacyEngine(accountant="rdp")
        _, accuracies = names(engine, CharNet(recurrent), data, batch_size=300, epochs=4, **PRIVATE)
        assert len(accuracies) == engine.engine.steps == 4 * math.ceil(1797 / 300)
        assert sum(accuracies[-6:]) > 1.3 * sum(accuracies[:6])
        assert math.isfinite(engine.get_epsilon(1e-5))


@pytest.mark.slow  # the same
def test_the_ghost_loop_learns():
    x, y = digits()
    torch.manual_seed(0)
    engine = PrivacyEngine()
    model, losses = ghost(engine, ConvNet(), TensorDataset(x, y), batch_size=128, epochs=6, **PRIVATE)
    assert accuracy(model, x, y) > 0.6 and losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("mode", "batch_size"), [("hooks", 64), ("functorch", 100), ("ew", 64)])
def test_without_noise_the_weights_after_ten_steps_are_those_of_opacus(mode, batch_size):
    x, y = digits()
    data = TensorDataset(x[:640], y[:640])  # ten batches, or six and a smaller one
    torch.manual_seed(1)
    mine = ConvNet()
    theirs = ConvNet()
    theirs.load_state_dict(mine.state_dict())
    epochs = 1 if batch_size == 64 else 2
    before = weights(mine)
    settings = {"batch_size": batch_size, "epochs": epochs, "grad_sample_mode": mode, **FIXED}
    rounded = {64: 64, 100: 91}[batch_size]  # int(640 / 7), by which Opacus divides; we divide by the batch size
    mine, losses = mnist(PrivacyEngine(), mine, data, lr=0.25 * batch_size / rounded, **settings)
    theirs, same = mnist(of_opacus(), theirs, data, **settings)
    assert losses == pytest.approx(same, rel=1e-4)
    assert distance(mine, theirs) < 1e-5
    assert max(float((p - before[name]).abs().max()) for name, p in weights(mine).items()) > 1e-2


def test_without_noise_the_weights_of_the_names_loop_are_those_of_opacus():
    data = sequences()
    data = TensorDataset(*(tensor[:500] for tensor in data.tensors))
    torch.manual_seed(2)
    mine, theirs = CharNet(DPLSTM), CharNet(DPLSTM)
    theirs.load_state_dict(mine.state_dict())
    mine, accuracies = names(PrivacyEngine(), mine, data, batch_size=50, epochs=1, **FIXED)
    theirs, same = names(of_opacus(), theirs, data, batch_size=50, epochs=1, **FIXED)
    assert accuracies == same and len(same) == 10
    assert distance(mine, theirs) < 1e-5


def test_without_noise_the_weights_of_the_ghost_loop_are_those_of_opacus():
    x, y = digits()
    data = TensorDataset(x[:640], y[:640])
    torch.manual_seed(3)
    mine, theirs = ConvNet(), ConvNet()
    theirs.load_state_dict(mine.state_dict())
    mine, losses = ghost(PrivacyEngine(), mine, data, batch_size=64, epochs=1, adam=False, **FIXED)
    theirs, same = ghost(of_opacus(), theirs, data, batch_size=64, epochs=1, adam=False, **FIXED)
    assert losses == pytest.approx(same, rel=1e-4)
    assert distance(mine, theirs) < 1e-5


def per_sample_gradients_of_opacus(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    hooked = opacus.GradSampleModule(model)
    nn.functional.cross_entropy(hooked(x), y).backward()
    found = {name: p.grad_sample.detach().clone() for name, p in model.named_parameters()}
    hooked.to_standard_module()
    model.zero_grad()
    return found


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_automatic_clipping_by_the_gradients_that_opacus_computes(mode):
    """Opacus has no automatic clipping, but the gradients of the samples to make it of: ten steps of SGD by hand."""
    x, y = (tensor[:200] for tensor in digits())
    x = x.double()  # in float32 rounding decides, on some processors, which of two alike pixels a pooling layer takes
    torch.manual_seed(4)
    mine, by_hand = ConvNet().double(), ConvNet().double()
    by_hand.load_state_dict(mine.state_dict())
    made = PrivacyEngine().make_private(
        module=mine,
        optimizer=torch.optim.SGD(mine.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=20),
        criterion=nn.CrossEntropyLoss(),
        clipping="automatic",
        grad_sample_mode=mode,
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
    )
    model, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    for a, b in loader:
        criterion(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
        found = per_sample_gradients_of_opacus(by_hand, a, b)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        with torch.no_grad():
            for name, p in by_hand.named_parameters():
                p -= 0.5 * torch.einsum("i,i...->...", 0.5 / norms, found[name]) / 20
    assert distance(model, by_hand) < 1e-12


def test_thresholds_of_each_parameter_as_in_opacus():
    x, y = digits()
    data = TensorDataset(x[:640], y[:640])
    torch.manual_seed(5)
    mine, theirs = ConvNet(), ConvNet()
    theirs.load_state_dict(mine.state_dict())
    thresholds = [0.05 * (k + 1) for k in range(8)]
    fixed = {**FIXED, "max_grad_norm": thresholds, "clipping": "per_layer"}
    mine, _ = mnist(engine := PrivacyEngine(), mine, data, batch_size=64, epochs=1, **fixed)
    theirs, _ = mnist(of_opacus(), theirs, data, batch_size=64, epochs=1, **fixed)
    assert distance(mine, theirs) < 1e-5
    assert engine.engine.clip.sensitivity == pytest.approx(math.hypot(*thresholds))


def test_epsilon_is_that_of_opacus_accountants():
    """Theirs of `prv` is an upper bound within 0.01; of `rdp` the best of some orders, ours of all."""
    x, y = digits()
    for name, above, below in (("prv", 0.0, 0.02), ("rdp", 1e-9, 0.03), ("gdp", 1e-3, 1e-3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = opacus.accountants.create_accountant(name)
            mine = PrivacyEngine(accountant=name)
            mnist(mine, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), TensorDataset(x, y), batch_size=90,
                             epochs=1, noise_multiplier=1.1, max_grad_norm=1.0)  # fmt: skip
            for _ in range(20):
                theirs.step(noise_multiplier=1.1, sample_rate=1 / 20)
            assert mine.accountant.history == theirs.history
            found, expected = mine.get_epsilon(1e-5), theirs.get_epsilon(1e-5)
        assert expected - below <= found <= expected + above, name


def test_the_noise_for_an_epsilon():
    x, y = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=100),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
    )
    theirs = of_opacus()
    sigma = opacus.accountants.utils.get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=1 / 18, epochs=2, accountant="prv"
    )
    assert optimizer.noise_multiplier == pytest.approx(sigma, rel=0.01) and theirs is not None
    for _ in range(2):
        for a, b in loader:
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert engine.engine.steps == 36 and 2.95 < engine.get_epsilon(1e-5) <= 3.0
