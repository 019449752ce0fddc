"""The answer of a step beside the oracle's: what passes, what does not, and what is said of it."""

import math

import pytest
import torch
from torch import nn

from clipping import Agreement, Flat, load_backend
from clipping.checks.verification import CAST_TOLERANCE, Limit, WrongGradient, compare
from clipping.core.types import ClippedGradient
from dpbench import PrivacyEngine
from dpbench.measure import verify
from dpbench.models.workload import Workload
from dpbench.trials.outcome import Mismatch


def workload(dtype: torch.dtype = torch.float64) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).to(dtype)
    inputs, targets = torch.randn(5, 1, 6, 6, dtype=dtype), torch.tensor([0, 1, 2, 0, 1])
    return Workload(model, nn.CrossEntropyLoss(reduction="none"), lambda size: (inputs[:size], targets[:size]))


def found(name: str, clip: Flat, work: Workload, size: int = 3) -> Agreement:
    inputs, targets = work.batch(size)
    with load_backend(name)(work.model, work.loss_fn, clip=clip, verify=False) as backend:
        agreement, tolerance, samples = verify.against_oracle(backend, inputs, targets)
    assert (tolerance, samples) == (Limit(CAST_TOLERANCE, CAST_TOLERANCE), 2)
    return agreement


@pytest.mark.parametrize("threshold", [0.0, 0.5, math.inf])
@pytest.mark.parametrize("name", ["nonprivate", "microbatch", "vmap", "ghost", "mixed_ghost"])
def test_an_exact_backend_agrees(name, threshold):
    agreement = found(name, Flat(max_grad_norm=threshold), workload())
    assert agreement.within(1e-12)


@pytest.mark.parametrize("name", ["nonprivate", "ghost"])
def test_float32_is_compared_in_float64(name):
    """So that an error of any size is the method's; the model comes back as it was, to the bit."""
    work = workload(torch.float32)
    before = {name: p.detach().clone() for name, p in work.model.named_parameters()}
    assert found(name, Flat(max_grad_norm=0.5), work).within(1e-12)
    assert all(p.dtype == torch.float32 and torch.equal(p, before[n]) for n, p in work.model.named_parameters())


class Alternating(nn.Module):
    """Sums a linear layer's outputs over positions with signs that cancel but for `rest`."""

    def __init__(self, rest: float) -> None:
        super().__init__()
        self.layer, self.rest = nn.Linear(20, 20, bias=False), rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return h[:, ::2].sum(1) - (1 - self.rest) * h[:, 1::2].sum(1)


@pytest.mark.parametrize("rest", [1e-2, 1e-4, 0.0])
@pytest.mark.parametrize("name", ["ghost", "bk_mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_whose_terms_cancel_is_compared_by_its_bound(dtype, name, rest):
    """It is clipped harder than its norm says, and may consist of rounding; a wrong gradient is still found."""
    torch.manual_seed(0)
    model, x = Alternating(rest).to(dtype), torch.randn(5, 1, 20, dtype=dtype).expand(5, 8, 20).contiguous()

    def loss_fn(outputs, targets):
        return 100 * (outputs.square().sum(1) + outputs.sum(1))

    with load_backend(name)(model, loss_fn, clip=Flat(0.1)) as backend:
        result = backend(x, x[:, 0])
    assert (result.bounds > 2 * result.norms).all()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(model, batch_size=5, sample_size=100, max_grad_norm=0.1, noise_multiplier=1.0, backend=name)
    engine.attach(optimizer)
    optimizer.step(loss=loss_fn(model(x), None))
    engine.detach()
    model.layer.weight.register_hook(lambda g: g + 1)
    with load_backend(name)(model, loss_fn, clip=Flat(0.1)) as backend, pytest.raises(WrongGradient):
        backend(x, x[:, 0])


def test_a_bound_does_not_explain_a_norm_that_is_too_large():
    """The bound is computed from the norm."""
    grads, losses, clip = {"w": torch.ones(1)}, torch.ones(1), Flat(0.1)
    for norm, bound, error in ((2.0, 2.0001, 1.0), (1.0, 5.0, 0.0), (0.5, 1.5, 0.0), (0.5, 0.75, 0.5)):
        given, right = (ClippedGradient(grads, torch.tensor([n]), losses, torch.tensor([bound])) for n in (norm, 1.0))
        assert compare(given, right, clip).norm_error == pytest.approx(error)


def test_losses_of_zero_verify_nothing():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    model.weight.register_hook(lambda g: 2 * g)

    def loss_fn(outputs, targets):
        return outputs[:, 0] * targets

    with load_backend("bk_mixed")(model, loss_fn) as backend:
        backend(x, torch.zeros(4))
        with pytest.raises(WrongGradient):
            backend(x, torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(model, batch_size=4, sample_size=100, max_grad_norm=1.0, noise_multiplier=1.0)
    engine.attach(optimizer)
    optimizer.step(loss=loss_fn(model(x), torch.zeros(4)))
    with pytest.raises(WrongGradient):
        optimizer.step(loss=loss_fn(model(x), torch.ones(4)))
    engine.detach()


def test_the_oracle_leaves_the_model_as_it_was():
    work = workload()
    before = {name: p.clone() for name, p in work.model.named_parameters()}
    verify.oracle(work, *work.batch(3), clip=Flat(max_grad_norm=1.0))
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in work.model.named_parameters())


def test_a_mismatch_names_the_parameter_and_the_numbers():
    limit = Limit(1e-9, 1e-9)
    verify.require("fast", Agreement(1e-12, 0.5e-9, "head.weight"), limit, {})
    with pytest.raises(Mismatch) as raised:
        verify.require("fast", Agreement(1e-12, 0.25, "head.weight"), limit, {"kept": 1}, where=" on a batch")
    assert str(raised.value) == (
        "fast differs from the microbatch oracle on a batch: relative error 1.0e-12 in the norms and 2.5e-01 in the "
        "gradient of 'head.weight', expected at most 1e-09"
    )
    assert raised.value.result == {"kept": 1}
