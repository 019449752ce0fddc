"""Loops as in Opacus' examples with one import changed: without noise they come to its weights, and at the same ε."""

import math
import warnings
from functools import partial
from typing import Any

import opacus
import pytest
import torch
from opacus.layers import DPLSTM
from opacus_made import ConvNet, Made, digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.integrations.opacus import PrivacyEngine

X, Y = digits()
IMAGES = TensorDataset(X[:640], Y[:640])
FIXED: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "poisson_sampling": False}
THRESHOLDS = [0.05 * (k + 1) for k in range(8)]


class CharNet(nn.Module):
    """The network of the names example: an embedding, a recurrent layer, the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12)
        self.rnn = DPLSTM(12, 24, num_layers=1, batch_first=True)
        self.out_layer = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.rnn(self.embedding(x), None)
        return self.out_layer(x[:, -1, :])


def names() -> DataLoader:
    """Rows of pixels as sequences [500, 16] of 17 values, with a collator of one's own."""

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]).long()

    rows = (8 * X[:500, 0, 3:5] + 8).long().flatten(1)
    return DataLoader(TensorDataset(rows, Y[:500]), batch_size=50, collate_fn=collate)


CASES = {
    "hooks": {},
    "functorch": {"grad_sample_mode": "functorch", "batch_size": 100},  # six batches and a smaller one
    "ew": {"grad_sample_mode": "ew"},
    "ghost": {"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss()},
    "per_layer": {"clipping": "per_layer", "max_grad_norm": THRESHOLDS},
    "names": {"net": CharNet, "data_loader": names, "lr": 2.0},
}


@pytest.mark.parametrize("case", CASES)
def test_without_noise_the_weights_after_ten_steps_are_those_of_opacus(case):
    def trained(engine: Any, divided: float = 1.0) -> Made:
        known = {"net": ConvNet, "batch_size": 64, "lr": 0.25, "records": IMAGES, **FIXED, **CASES[case]}
        net, loader = known.pop("net"), known.pop("data_loader", None)
        torch.manual_seed(1)
        sgd = partial(torch.optim.SGD, lr=known.pop("lr") / divided, momentum=0.5)
        made = Made(net(), engine=engine, optimizer=sgd, data_loader=loader and loader(), **known)
        made.train()
        return made.train() if case == "functorch" else made

    mine = trained(PrivacyEngine(), 0.91 if case == "functorch" else 1.0)  # Opacus divides by int(640 / 7), we by 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = trained(opacus.PrivacyEngine())
    assert mine.steps >= 10
    assert float((mine.weights - theirs.weights).abs().max()) < 1e-5
    torch.manual_seed(1)
    before = torch.cat([p.detach().flatten() for p in type(mine.net)().parameters()])
    assert float((mine.weights - before).abs().max()) > 1e-2
    if case == "per_layer":
        assert mine.engine.engine.clip.sensitivity == pytest.approx(math.hypot(*THRESHOLDS))


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
    x = X[:200].double()  # in float32 rounding decides, on some processors, which of two alike pixels pooling takes
    torch.manual_seed(4)
    by_hand, net = ConvNet().double(), ConvNet().double()
    net.load_state_dict(by_hand.state_dict())
    private = {**FIXED, "max_grad_norm": 0.5, "clipping": "automatic", "grad_sample_mode": mode}
    made = Made(
        net, TensorDataset(x, Y[:200]), batch_size=20, optimizer=partial(torch.optim.SGD, lr=0.5), **private
    ).train()
    for a, b in zip(x.split(20), Y[:200].split(20), strict=True):
        found = per_sample_gradients_of_opacus(by_hand, a, b)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        with torch.no_grad():
            for name, p in by_hand.named_parameters():
                p -= 0.5 * torch.einsum("i,i...->...", 0.5 / norms, found[name]) / 20
    torch.testing.assert_close(list(made.net.parameters()), list(by_hand.parameters()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "above", "below"), [("prv", 0.0, 0.02), ("rdp", 1e-9, 0.03), ("gdp", 1e-3, 1e-3)])
def test_epsilon_is_that_of_opacus_accountants(name, above, below):
    """Theirs of `prv` is an upper bound within 0.01; of `rdp` the best of some orders, ours of all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, engine = opacus.accountants.create_accountant(name), PrivacyEngine(accountant=name)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        Made(net, TensorDataset(X, Y), batch_size=90, engine=engine, noise_multiplier=1.1).train()
        for _ in range(20):
            theirs.step(noise_multiplier=1.1, sample_rate=1 / 20)
        assert engine.accountant.history == theirs.history
        found, expected = engine.get_epsilon(1e-5), theirs.get_epsilon(1e-5)
    assert engine.accountant.get_epsilon(delta=1e-5) == found
    assert expected - below <= found <= expected + above
