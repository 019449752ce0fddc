"""Thresholds of each parameter, and the norm that follows a quantile: exact, within their sensitivity, accounted."""

import math
import warnings
from typing import Any

import opacus
import pytest
import torch
from opacus.schedulers import ExponentialNoise
from opacus_made import ADAPTIVE, Made, digits
from torch import nn
from torch.utils.data import TensorDataset

from clipping import load_backend
from dpbench.integrations.opacus.clips import PerTensor

X, Y = (tensor[:400] for tensor in digits())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 10))


@pytest.mark.parametrize("name", ["microbatch", "vmap", "ghost", "bk_mixed"])
def test_every_backend_has_the_threshold_of_each_parameter(name):
    """Against clipping by hand of the gradients of single samples."""
    model, x, y = net().double(), X[:6].double(), Y[:6]
    clip = PerTensor((0.02, 3.0, 0.4, 0.007))
    expected = {parameter: torch.zeros_like(p) for parameter, p in model.named_parameters()}
    for a, b in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(a[None]), b[None])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for c, (parameter, g) in zip(clip.thresholds, zip(expected, grads, strict=True), strict=True):
            expected[parameter] += g * min(1.0, c / (float(g.norm()) + 1e-6))
    with load_backend(name)(model, lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"), clip=clip) as one:
        found = one(x, y)
    for parameter, wanted in expected.items():
        assert torch.allclose(found.grads[parameter], wanted, rtol=2e-3, atol=1e-9), parameter


def test_thresholds_of_another_number_of_parameters_keep_the_sensitivity():
    clip = PerTensor((0.3, 4.0, 0.5))
    norms = torch.logspace(-3, 3, 50).expand(5, -1)
    assert float((clip.factors(norms) * norms).norm(dim=0).max()) <= clip.sensitivity * (1 + 1e-6)


def private(**others: Any) -> Made:
    return Made(net(), TensorDataset(X, Y), **{"batch_size": 100, **ADAPTIVE, **others})


def train(made: Made, epochs: int = 1) -> list[float]:
    """The norm after each step."""
    norms = []
    for _ in range(epochs):
        for batch in made.loader:
            made.train(loader=[batch])
            norms.append(float(made.optimizer.max_grad_norm))
    return norms


def test_without_noise_norm_and_weights_are_those_of_opacus():
    """All records are in each batch, so that Poisson sampling is no chance; and the count is nearly exact."""
    exact = dict(noise_multiplier=0.0, unclipped_num_std=1e-6, batch_size=400)
    mine = private(**exact)
    norms = train(mine, epochs=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = private(engine=opacus.PrivacyEngine(), poisson_sampling=False, **exact)
        expected = train(theirs, epochs=10)
    assert norms == pytest.approx(expected, rel=1e-4) and norms[0] != norms[-1]
    assert float((mine.weights - theirs.weights).abs().max()) < 1e-5


def test_the_norm_comes_to_the_median_and_is_accounted_as_said():
    made = private(max_grad_norm=8.0, unclipped_num_std=10.0)
    made.optimizer.param_groups[0]["lr"] = 1e-4
    norms = train(made, epochs=12)
    gradients = [
        torch.autograd.grad(nn.functional.cross_entropy(made.net.eval()(a[None]), b[None]), made.net.parameters())
        for a, b in zip(X[:150], Y[:150], strict=True)
    ]
    median = float(torch.tensor([math.sqrt(sum(float(g.square().sum()) for g in each)) for each in gradients]).median())
    assert sum(norms[-12:]) / 12 == pytest.approx(median, rel=0.15)
    assert made.engine.accountant.history == [(1.0, 0.25, 48)]
    share = 1 / math.sqrt(1 - 1 / (2 * 10) ** 2)
    assert made.engine.engine.sensitivity.bound == pytest.approx(norms[-1] * share, rel=5e-3)
    of_sum, of_count = share, 2 * 10.0
    assert (of_sum**-2 + of_count**-2) ** -0.5 == pytest.approx(1.0)


def test_noise_of_sum_and_count_have_their_deviations():
    made = private(unclipped_num_std=0.6, clipbound_learning_rate=1.0)
    quantile, core = made.optimizer._clips.quantile, made.engine.engine
    drawn = []
    for step in range(1, 801):
        core.steps = step
        core.counted = 7.0
        drawn.append((-math.log(quantile.next(core, 1.0))) * 100)
    noise = torch.tensor(drawn)
    assert float(noise.mean()) == pytest.approx(7.0, abs=0.1) and float(noise.std()) == pytest.approx(0.6, rel=0.1)
    assert core.sensitivity.bound == pytest.approx(1 / math.sqrt(1 - 1 / 1.2**2), rel=5e-3)


@pytest.mark.filterwarnings("ignore::dpbench.PrivacyWarning")
def test_the_count_is_of_the_whole_batch_whatever_its_pieces():
    def counts(most: int) -> list[float]:
        found = []
        made = private(noise_generator=torch.Generator().manual_seed(5), max_grad_norm=2.0)
        quantile = made.optimizer._clips.quantile
        after = quantile.next
        quantile.next = lambda engine, norm: found.append(engine.counted) or after(engine, norm)
        with made.pieces(most) as pieces:
            made.train(loader=pieces)
        return found

    assert counts(400) == counts(17) and len(counts(400)) == 4


def test_a_step_that_fails_leaves_no_count():
    made = private()
    with pytest.raises(FloatingPointError):
        made.train(lambda o, y: nn.functional.cross_entropy(o, y) * float("nan"))
    assert made.engine.engine._sums.counted == 0 and made.steps == 0


@pytest.mark.parametrize("saved", [False, True])
def test_pieces_that_are_dropped_are_in_no_count_and_those_that_are_saved_in_one(saved, tmp_path):
    def prepared() -> Made:
        return private(max_grad_norm=1e9, clipbound_learning_rate=1e-9)

    made = prepared()
    with made.pieces(10) as pieces:
        made.train(loader=pieces, batches=3)
    assert made.engine.engine._sums.counted == 15  # three pieces of ten, none above C
    if saved:
        made.save(tmp_path / "c.pt", optimizer=made.optimizer)
        made = prepared()
        made.load(tmp_path / "c.pt", optimizer=made.optimizer)
        assert made.engine.engine._sums.counted == 15
    released, engine = [], made.engine.engine
    release = engine._release
    engine._release = lambda *of, **how: (released.append(engine._size), release(*of, **how))
    with made.pieces(10) as pieces:
        for piece in pieces:
            made.train(loader=[piece])
            if engine.stepped:
                break
    assert engine.counted == released[0] / 2


def test_noise_that_changes_moves_the_share_of_the_count(tmp_path):
    made = private(unclipped_num_std=0.8)
    scheduler = ExponentialNoise(made.optimizer, gamma=0.5)
    made.train()
    scheduler.step()
    bound = pytest.approx(made.optimizer.max_grad_norm / math.sqrt(1 - 0.25 / 1.6**2), rel=5e-3)
    assert made.engine.engine.sensitivity.bound == bound
    with pytest.raises(ValueError, match="expected unclipped_num_std > noise_multiplier / 2"):
        made.optimizer.noise_multiplier = 1.7
    assert made.optimizer.noise_multiplier == 0.5 and made.engine.engine.sensitivity.bound == bound
    made.save(tmp_path / "c.pt", noise_scheduler=scheduler)
    again = private(unclipped_num_std=0.8)
    again.load(tmp_path / "c.pt", noise_scheduler=ExponentialNoise(again.optimizer, gamma=0.5))
    assert again.optimizer.noise_multiplier == 0.5 and again.engine.engine.sensitivity.bound == bound
