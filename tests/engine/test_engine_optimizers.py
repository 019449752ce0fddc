"""Every optimizer of torch's takes the engine's gradient as it would any other: once, at the end of a logical batch."""

import pytest
import torch
from attached import cross_entropy
from torch import nn

from clipping import Flat, load_backend
from dpbench import PrivacyEngine

#: Those that ask for several gradients a step, or for sparse ones.
OTHERS = {"Optimizer", "LBFGS", "SparseAdam"}
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in OTHERS
)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))  # Muon takes matrices


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_s_own_step_with_the_clipped_gradient(name):
    batches = [(torch.randn(6, 5), torch.randint(0, 3, (6,))) for _ in range(3)]
    ends = []
    for private in (True, False):
        model = small()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if private:
            engine = PrivacyEngine(model, batch_size=8, sample_size=100, max_grad_norm=0.1, noise_multiplier=0.0)
            engine.attach(optimizer)
        reference = load_backend("microbatch")(model, cross_entropy, clip=Flat(0.1))
        for x, y in batches:
            if private:
                optimizer.step(loss=cross_entropy(model(x), y))
            else:
                for parameter, grad in zip(model.parameters(), reference(x, y).grads.values(), strict=True):
                    parameter.grad = grad / 8
                optimizer.step()
            scheduler.step()
        ends.append([p.detach() for p in model.parameters()])
    for found, wanted, start in zip(*ends, small().parameters(), strict=True):
        assert not torch.equal(wanted, start)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
