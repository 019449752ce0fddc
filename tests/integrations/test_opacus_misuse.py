"""What is not sound is refused by name, and what is odd but sound is done: loops as people write them for Opacus."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from marks import slow_unless
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from clipping.core.types import UnsupportedModel
from dpbench import Misuse, PrivacyWarning
from dpbench.integrations.opacus import PrivacyEngine

Loss = Callable[[Tensor, Tensor], Any]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data(n: int = 240) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def private(net: nn.Module | None = None, *, records: Any = None, batch_size: int = 24, **others: Any) -> Any:
    """(engine, model, optimizer, loader) or with a criterion before the loader."""
    net = net or model()
    optimizer = others.pop("optimizer", None) or torch.optim.SGD(net.parameters(), lr=0.1)
    loader = others.pop("data_loader", None) or DataLoader(records or data(), batch_size=batch_size)
    engine = PrivacyEngine()
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **others}
    return engine, *engine.make_private(module=net, optimizer=optimizer, data_loader=loader, **arguments)


def trained(loss: Loss, **others: Any) -> int:
    """Steps of one epoch under a loss of the caller's."""
    engine, net, optimizer, loader = private(**others)
    for x, y in loader:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    steps: int = engine.engine.steps
    return steps


CLASSES = torch.tensor([1.0, 2.0, 5.0])
SOUND: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "divided by hand": lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y),
    "multiplied by hand": lambda o, y: F.cross_entropy(o, y, reduction="sum") * (1 / len(y)),
    "weighted, then averaged": lambda o, y: F.cross_entropy(o, y, weight=CLASSES, reduction="none").mean(),
    "of several numbers a sample": lambda o, y: F.mse_loss(o, F.one_hot(y, 3).float()),
    "masked, and divided by all": lambda o, y: (F.cross_entropy(o, y, reduction="none") * (y != 1)).mean(),
    "divided by a tensor": lambda o, y: F.cross_entropy(o, y, reduction="sum") / torch.tensor(len(y)),
    "one number a sample": lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], (y == 1).float()),
    "divided and averaged": lambda o, y: F.cross_entropy(o, y) + F.cross_entropy(o, y, reduction="sum") / len(y),
    "with random numbers of its own": lambda o, y: F.cross_entropy(F.dropout(o, 0.3), y),
    "changed in place": lambda o, y: F.cross_entropy((o * 1).mul_(0.5), y),
    "a logarithm of its own": lambda o, y: -(o.log_softmax(1)[torch.arange(len(y)), y]).mean(),
}
MIXING: dict[str, Loss] = {
    "divided by the classes' weights": lambda o, y: F.cross_entropy(o, y, weight=CLASSES),
    "divided by those that count": lambda o, y: F.cross_entropy(o, y, ignore_index=1),
    "the same by hand": lambda o, y: (F.cross_entropy(o, y, reduction="none") * (y != 1)).sum() / (y != 1).sum(),
    "centred by a detached mean": lambda o, y: F.cross_entropy(o - o.detach().mean(0), y),
    "contrastive": lambda o, y: F.cross_entropy(o @ o.T, torch.arange(len(o))),
    "the hardest half": lambda o, y: F.cross_entropy(o, y, reduction="none").topk(len(o) // 2).values.mean(),
    "a root of the mean": lambda o, y: F.mse_loss(o, F.one_hot(y, 3).float()).sqrt(),
    "centred, with random numbers": lambda o, y: F.cross_entropy(F.dropout(o, 0.3) - o.detach().mean(0), y),
    "the largest": lambda o, y: F.cross_entropy(o, y, reduction="none").max(),
}


@pytest.mark.parametrize("name", slow_unless(lambda name: "divided" not in name or name == "divided by hand", SOUND))
def test_losses_that_keep_samples_apart_are_trained_with(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(SOUND[name]) == 10


def test_losses_that_mix_samples_are_refused():
    for name in MIXING:
        with pytest.raises(UnsupportedModel, match="criterion: samples mix: the gradient of the loss of sample"):
            trained(MIXING[name])


def test_a_sum_is_no_mean_and_a_mean_no_sum():
    with pytest.raises(UnsupportedModel, match=r"is a sum over the batch.*say loss_reduction='sum'"):
        trained(lambda o, y: F.cross_entropy(o, y, reduction="sum"))
    with pytest.raises(UnsupportedModel, match=r"is a mean over the batch.*say loss_reduction='mean'"):
        trained(F.cross_entropy, loss_reduction="sum")
    with pytest.raises(UnsupportedModel, match="is a sum over the batch"):  # Poisson batches have other sizes
        trained(lambda o, y: F.cross_entropy(o, y, reduction="sum") / 24)
    for reduction in ("mean", "sum"):
        with pytest.raises(UnsupportedModel, match="over the batch"):
            trained(lambda o, y: F.cross_entropy(o, y) + o.square().sum(), loss_reduction=reduction)
    assert trained(lambda o, y: F.cross_entropy(o, y, reduction="sum"), loss_reduction="sum") == 10


def test_outputs_that_are_changed_in_place_where_the_model_needs_them():
    """As in ordinary training: an error of autograd's, and no wrong gradient."""
    engine, net, optimizer, loader = private(nn.Sequential(nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0)))
    x, y = next(iter(loader))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        out = net(x)
        assert out.shape == (len(x),)
        F.mse_loss(out.mul_(3.0), (y == 1).float()).backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            optimizer.step()
    assert engine.engine.steps == 0


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def tokens(ignored: bool) -> TensorDataset:
    x = torch.randint(0, 11, (120, 5), generator=torch.Generator().manual_seed(2))
    y = x.roll(-1, 1)
    if ignored:
        y = torch.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(3)) < 0.3, -100, y)
    return TensorDataset(x, y)


def of_tokens(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, 11), y.view(-1))


def test_a_mean_over_tokens_is_a_mean_over_samples_if_none_is_left_out():
    assert trained(of_tokens, net=Tokens(), records=tokens(ignored=False)) == 5
    with pytest.raises(UnsupportedModel, match=r"samples mix.*grad_sample_mode='ghost'"):
        trained(of_tokens, net=Tokens(), records=tokens(ignored=True))


@pytest.mark.parametrize("ignored", [False, True])
def test_the_ghost_criterion_averages_over_the_tokens_of_each_sample(ignored):
    """As Opacus' does by `shape`: the weights are those of losses made by hand."""

    def weights(by_shape: bool) -> Tensor:
        net = Tokens()
        criterion = nn.CrossEntropyLoss() if by_shape else OneByOne()
        _, net, optimizer, loss, loader = private(
            net, records=tokens(ignored), criterion=criterion, grad_sample_mode="ghost", noise_multiplier=0.0,
            poisson_sampling=False,
        )  # fmt: skip
        for x, y in loader:
            optimizer.zero_grad()
            logits = net(x)
            if by_shape:
                loss(logits.view(-1, 11), y.view(-1), shape=logits.shape).backward()
            else:
                loss(logits, y).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    class OneByOne:
        def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
            return torch.stack([F.cross_entropy(a, b) for a, b in zip(logits, y, strict=True)])

    assert torch.allclose(weights(True), weights(False), atol=1e-6)


def test_a_loss_of_parameters_would_be_lost_and_is_refused():
    engine, net, optimizer, loader = private()
    x, y = next(iter(loader))
    (F.cross_entropy(net(x), y) + sum(p.pow(2).sum() for p in net.parameters())).backward()
    with pytest.raises(Misuse, match=r"a gradient of its own at parameter '0.weight'.*weight_decay="):
        optimizer.step()
    assert engine.engine.steps == 0


def test_two_views_of_a_batch_are_one_sample_each():
    """The sum moves by C for a sample however many forward passes it has: as of one model that does both."""

    class Both(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.inner(x), self.inner(-x)], 1)

    def weights(both: bool) -> Tensor:
        net = Both(model()) if both else model()
        _, net, optimizer, loader = private(net, noise_multiplier=0.0, max_grad_norm=0.1, poisson_sampling=False)
        for x, y in loader:
            optimizer.zero_grad()
            one, other = net(x).unbind(1) if both else (net(x), net(-x))
            (F.cross_entropy(one, y) + F.cross_entropy(other, y)).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.allclose(weights(True), weights(False), atol=1e-6)


def test_two_backward_passes_of_one_forward_pass_are_clipped_together():
    """Opacus clips each: a sample then moves the sum by 2 C."""

    def weights(together: bool) -> Tensor:
        _, net, optimizer, loader = private(noise_multiplier=0.0, max_grad_norm=0.1, poisson_sampling=False)
        for x, y in loader:
            optimizer.zero_grad()
            out = net(x)
            losses = F.cross_entropy(out, y), F.mse_loss(out, torch.zeros_like(out))
            if together:
                sum(losses).backward()
            else:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.allclose(weights(True), weights(False), atol=1e-6)


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_gradients_of_several_batches_are_not_added_up(mode, poisson):
    made = private(grad_sample_mode=mode, poisson_sampling=poisson)
    net, criterion, loader = made[1], made[3] if mode == "ghost" else F.cross_entropy, made[-1]
    batches = iter(loader)
    x, y = next(batches)
    criterion(net(x), y).backward()
    x, y = next(batches)
    with pytest.raises(Misuse, match=r"not accumulated; take a larger batch_size, and BatchMemoryManager"):
        criterion(net(x), y).backward()


def test_forward_passes_of_two_batches_before_their_backward_passes():
    engine, net, optimizer, loader = private(poisson_sampling=False)
    batches = iter(loader)
    (x, y), (x2, y2) = next(batches), next(batches)
    one, other = net(x), net(x2)
    F.cross_entropy(one, y).backward()
    F.cross_entropy(other, y2).backward()
    with pytest.raises(Misuse, match="not accumulated"):
        optimizer.step()
    assert engine.engine.steps == 0


def test_a_batch_that_is_given_up_by_zero_grad_is_in_no_sum():
    def weights(skip: bool) -> Tensor:
        _, net, optimizer, loader = private(noise_multiplier=0.0, poisson_sampling=False)
        for i, (x, y) in enumerate(loader):
            if skip or i != 1:
                F.cross_entropy(net(x), y).backward()
                if skip and i == 1:
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.equal(weights(True), weights(False))


def test_evaluation_in_between_changes_nothing():
    def weights(evaluate: bool) -> Tensor:
        _, net, optimizer, loader = private(noise_multiplier=0.0, poisson_sampling=False)
        for x, y in loader:
            out = net(x)
            if evaluate:
                net.eval()
                net(torch.randn(50, 6)).sum().item()
                with torch.no_grad():
                    net(torch.randn(7, 6))
                net.train()
                with torch.no_grad():
                    net(torch.randn(9, 6))
                net(x)  # in training mode, with a graph that nobody uses
            optimizer.zero_grad()
            F.cross_entropy(out, y).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.allclose(weights(True), weights(False), atol=1e-6)


def test_what_has_no_gradient_at_the_outputs_is_no_step():
    for spoil in ("no backward", "eval"):
        _, net, optimizer, loader = private()
        x, y = next(iter(loader))
        if spoil == "eval":
            net.eval()
        loss = F.cross_entropy(net(x), y)
        if spoil == "eval":
            loss.backward()
        with pytest.raises(Misuse, match=r"expected loss.backward\(\) of a forward pass in training mode"):
            optimizer.step()
    _, net, optimizer, _, loader = private(grad_sample_mode="ghost")
    with pytest.raises(Misuse, match=r"expected loss.backward\(\) of the criterion that make_private returned"):
        optimizer.step()
    with pytest.raises(Misuse, match=r"expected optimizer\.step"):
        optimizer.original_optimizer.step()


def test_several_groups_and_frozen_parameters_as_in_opacus():
    def weights(engine: Any) -> Tensor:
        net = model()
        net[0].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW(
            [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[2].parameters(), "lr": 0.001}]
        )
        made = engine.make_private(
            module=net, optimizer=optimizer, data_loader=DataLoader(data(), batch_size=24), noise_multiplier=0.0,
            max_grad_norm=0.1, poisson_sampling=False,
        )  # fmt: skip
        for x, y in made[2]:
            made[1].zero_grad()
            F.cross_entropy(made[0](x), y).backward()
            made[1].step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = weights(opacus.PrivacyEngine())
    assert torch.allclose(weights(PrivacyEngine()), theirs, atol=1e-5)


def test_an_optimizer_of_some_parameters():
    net = model()
    with pytest.raises(Misuse, match=r"'0.weight' is not among its: freeze it"):
        private(net, optimizer=torch.optim.SGD(net[2].parameters(), lr=0.1))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_samples_of_no_records_are_steps_like_any_other(mode):
    made = private(records=data(20), batch_size=1, grad_sample_mode=mode)
    engine, net, optimizer, loader = made[0], made[1], made[2], made[-1]
    criterion = made[3] if mode == "ghost" else F.cross_entropy
    empty = 0
    for _ in range(3):
        for x, y in loader:
            before = net._module[0].weight.detach().clone()
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()
            if not len(x):
                empty += 1
                assert not torch.equal(before, net._module[0].weight)
    assert empty > 5 and engine.engine.steps == 60 and engine.accountant.history == [(1.0, 1 / 20, 60)]
    assert all(bool(p.isfinite().all()) for p in net.parameters())


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.inner(x)
        return {"loss": F.cross_entropy(out, y), "logits": out}


def test_a_loss_inside_the_model_is_refused_and_logits_beside_it_are_taken():
    _, net, optimizer, loader = private(Inside())
    x, y = next(iter(loader))
    with pytest.raises(Misuse, match=r"samples are mixed already: compute the loss outside of the model"):
        net(x, y)["loss"].backward()
    _, net, optimizer, _, loader = private(Inside(), grad_sample_mode="ghost")
    with pytest.raises(Misuse, match=r"samples are mixed already: compute the loss outside of the model"):
        net(x, y)["loss"].backward()
    engine, net, optimizer, loader = private(Inside())
    for x, y in loader:
        F.cross_entropy(net(x, y)["logits"], y).backward()
        optimizer.step()
    assert engine.engine.steps == 10


class Labelled(nn.Module):
    """As a language model of transformers: the loss of its labels is inside, over the tokens."""

    def __init__(self, weight: Tensor | None = None, aux: bool = False, feeds: bool = False) -> None:
        super().__init__()
        self.inner, self.weight, self.aux, self.feeds = Tokens(), weight, aux, feeds

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(x)
        loss = F.cross_entropy(logits.view(-1, 11), labels.view(-1), self.weight)
        if self.aux:
            loss = loss + self.inner.head.weight.square().sum()
        return {"loss": loss, "logits": logits + 0 * loss if self.feeds else logits}


def labelled(net: nn.Module, loss: Callable[[Any, Tensor], Tensor], ignored: Tensor | None = None) -> Tensor:
    """The weights after an epoch without noise."""
    records = tokens(ignored=False)
    if ignored is not None:
        records = TensorDataset(records.tensors[0], torch.where(ignored, -100, records.tensors[1]))
    _, net, optimizer, loader = private(net, records=records, noise_multiplier=0.0, max_grad_norm=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        loss(net(x, labels=y), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_a_loss_of_labels_inside_of_the_model_is_that_of_its_logits():
    """All records in each batch, so that the two have the same ones."""

    def weights(inside: bool, ignored: Tensor | None) -> Tensor:
        records = tokens(ignored=False)
        if ignored is not None:
            records = TensorDataset(records.tensors[0], torch.where(ignored, -100, records.tensors[1]))
        _, net, optimizer, loader = private(
            Labelled(), records=records, batch_size=120, noise_multiplier=0.0, max_grad_norm=0.1
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                for x, y in loader:
                    optimizer.zero_grad()
                    out = net(x, labels=y)
                    (out["loss"] if inside else of_tokens(out["logits"], y)).backward()
                    optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    last = torch.arange(5).expand(120, 5) == 4  # of each sample the last token, as of every causal model
    assert torch.allclose(weights(True, None), weights(False, None), atol=1e-7)
    found = weights(True, last)
    assert not torch.allclose(found, weights(True, None), atol=1e-4) and bool(found.isfinite().all())


def test_a_loss_inside_that_is_no_mean_over_samples_is_refused():
    inside, some = (lambda out, y: out["loss"]), torch.rand(120, 5, generator=torch.Generator().manual_seed(3)) < 0.3
    for net, ignored in ((Labelled(), some), (Labelled(weight=torch.arange(11.0)), None), (Labelled(aux=True), None)):
        with pytest.raises(Misuse, match="samples are mixed already"):
            labelled(net, inside, ignored)
    with pytest.raises(Misuse, match="got one that they are computed from"):
        labelled(Labelled(feeds=True), lambda out, y: of_tokens(out["logits"], y))


def test_a_forward_pass_that_fails_leaves_nothing_behind():
    _, net, _, loader = private(Labelled(), records=tokens(ignored=False))
    x, y = next(iter(loader))
    with pytest.raises((RuntimeError, ValueError)):
        net(x, labels=y[:, :2])
    assert torch.overrides._len_torch_function_stack() == 0


def test_batches_of_the_caller_s_own_loader_are_seen_to_be_assumed():
    """Its labels are constants where the loss runs again: what is made of outputs alone is found all the same."""
    records = data()
    engine, net, optimizer, _ = private(records=records)
    with (
        pytest.warns(PrivacyWarning, match=r"batches had exactly 24 samples: not Poisson samples"),
        pytest.warns(PrivacyWarning, match=r"a batch was not one of the loader that make_private returned"),
    ):
        for _ in range(2):
            for x, y in DataLoader(records, batch_size=24):
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    with pytest.warns(PrivacyWarning, match="NOT PRIVATE"):
        engine.get_epsilon(1e-5)
    _, net, optimizer, _ = private(records=records)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for x, y in DataLoader(records, batch_size=24):
            F.cross_entropy(net(x) - net(x).detach().mean(0), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_what_cannot_be_run_again_is_said():
    def loss(o: Tensor, y: Tensor) -> Tensor:
        scale = float(o.detach().abs().mean())  # has left torch: a constant, when it runs again
        o.mul_(0.5)
        return F.cross_entropy(o, y) * scale

    with pytest.warns(PrivacyWarning, match="nobody has seen that the loss keeps samples apart"):
        trained(loss)


def test_a_loss_that_becomes_another_one_later_is_looked_at_again():
    _, net, optimizer, loader = private(batch_size=6)
    steps = 0
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for x, y in loader:
            out = net(x)
            optimizer.zero_grad()
            (F.cross_entropy(out, y) if steps < 25 else MIXING["centred by a detached mean"](out, y)).backward()
            optimizer.step()
            steps += 1
    assert 25 <= steps <= 27


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "pairs of samples": lambda x: 0.7 * x + 0.3 * x[torch.arange(len(x) - 1, -1, -1)],
    "divided by the batch's deviation": lambda x: (x - x.mean(0)) / x.std(0),
    "centred in place": lambda x: x.sub_(x.mean(0)),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_inputs_that_mix_samples_are_refused(mode, name):
    made = private(grad_sample_mode=mode)
    net, optimizer, loader = made[1], made[2], made[-1]
    criterion = made[3] if mode == "ghost" else F.cross_entropy
    with pytest.raises(UnsupportedModel, match=r"what the model reads for sample \d+ changes with the other samples"):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(net(INPUTS[name](x)), y).backward()
            optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_inputs_that_are_made_of_each_sample_alone_are_taken(mode):
    made = private(grad_sample_mode=mode)
    engine, net, optimizer, loader = made[0], made[1], made[2], made[-1]
    criterion = made[3] if mode == "ghost" else F.cross_entropy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in loader:
            optimizer.zero_grad()
            x = (x - 0.1) / 2 + 0.1 * torch.randn_like(x) - x.mean(1, keepdim=True)
            criterion(net(x.flip(1)), y).backward()
            optimizer.step()
    assert engine.engine.steps == 10


@pytest.mark.parametrize(
    "criterion",
    [
        lambda o, y: F.cross_entropy(o, y, reduction="none") * (y != 1) / (y != 1).sum(),
        lambda o, y: F.cross_entropy(o, y, reduction="none") / y.bincount(minlength=3)[y],
        lambda o, y: F.cross_entropy(o - o.mean(0), y, reduction="none"),
        lambda o, y: F.cross_entropy(o, y.flip(0), reduction="none"),
    ],
    ids=["divided by those that count", "balanced by the batch", "centred", "labels of others"],
)
def test_a_ghost_criterion_that_mixes_samples_is_refused(criterion):
    _, net, optimizer, loss, loader = private(grad_sample_mode="ghost", criterion=criterion)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for x, y in loader:
            loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_pass_that_only_evaluates_is_no_look_at_the_loss():
    _, net, optimizer, loader = private()
    net.eval()
    with torch.no_grad():
        assert sum(len(net(x)) for x, _ in loader) > 0
    net.train()
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for x, y in loader:
            F.cross_entropy(net(x), y, weight=CLASSES).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_losses_and_outputs_are_tensors_like_others_in_every_batch():
    _, net, optimizer, loader = private()
    kept = []
    for x, y in loader:
        optimizer.zero_grad()
        out = net(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        kept.append(loss)
        assert f"{loss:.2f}" == f"{loss.item():.2f}" and repr(out.detach()).startswith("tensor(")
        assert copy.deepcopy(loss.detach()) == loss and out.detach().numpy().shape == (len(y.numpy()), 3)
        assert float(out.argmax(1).eq(y).float().mean()) <= 1
        torch.save([loss, y], io.BytesIO())
    assert len(kept) == 10 and sum(kept).item() == pytest.approx(sum(float(each) for each in kept), rel=1e-5)


def test_copies_of_the_model_are_ordinary_ones():
    engine, net, optimizer, loader = private()
    for x, y in loader:
        F.cross_entropy(net(x), y).backward()
        average = copy.deepcopy(net)
        F.cross_entropy(average(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.cleanup()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.eval()(x), net.eval()(x)) and engine.engine.steps == 10


def test_gradients_of_inputs_end_at_the_outputs_and_are_refused():
    _, net, optimizer, loader = private()
    (x, _) = next(iter(loader))
    maker = nn.Linear(6, 6)
    with pytest.raises(Misuse, match=r"inputs that need no gradient.*call model.eval\(\)"):
        net(maker(x))
    net.eval()
    net(maker(x)).sum().backward()
    assert bool(maker.weight.grad.any())
    optimizer.zero_grad()
    net.train()
    net(x).sum().div(len(x)).backward()
    optimizer.step()


def test_scaled_losses_are_refused():
    _, net, optimizer, loader = private()
    x, y = next(iter(loader))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(F.cross_entropy(net(x), y)).backward()
    with pytest.raises(Misuse, match="expected no GradScaler"):
        scaler.step(optimizer)


REFUSED = [
    (dict(clipping="adaptiv"), ValueError, "expected clipping, got .*; did you mean 'adaptive'.*one of flat, "),
    (dict(grad_sample_mode="gost"), ValueError, "expected grad_sample_mode, got .*; did you mean 'ghost'"),
    (dict(grad_sample_mode="no_op"), ValueError, "expected grad_sample_mode, one of hooks"),
    (dict(loss_reduction="none"), ValueError, "expected loss_reduction, one of mean, sum, got 'none'"),
    (dict(batch_first=False), ValueError, "expected batch_first=True, got False: let the samples come first"),
    (dict(rand_on_empty=True), ValueError, "expected rand_on_empty=False"),
    (
        dict(max_grad_nrom=1.0),
        TypeError,
        "expected the arguments of make_private with clipping='flat', got 'max_grad_nrom'",
    ),
    (dict(max_grad_norm=[1.0, 1.0]), ValueError, "expected a number as max_grad_norm, or with clipping='per_layer'"),
    (dict(max_grad_norm=[1.0], clipping="per_layer"), ValueError, "one of each of the 4 trainable parameters, got 1"),
    (dict(max_grad_norm=-1.0), ValueError, "max_grad_norm=-1.0 >= 0"),
    (dict(noise_multiplier=-1.0), ValueError, "noise_multiplier"),
    (
        dict(
            poisson_sampling=False,
            data_loader=DataLoader(data(), batch_size=24, sampler=WeightedRandomSampler([1.0] * 240, 240)),
        ),
        Misuse,
        "expected poisson_sampling=True, or a data_loader with shuffle=.*, got one with WeightedRandomSampler",
    ),
    (
        dict(data_loader=DataLoader(data(), batch_size=24, sampler=WeightedRandomSampler([1.0] * 240, 240))),
        Misuse,
        "expected a data_loader without a sampler of its own with poisson_sampling=True, got one with WeightedRandom",
    ),
    (dict(max_grad_norm=0.0), ValueError, "expected max_grad_norm > 0, got 0"),
    (
        dict(net=torch.jit.trace(model(), torch.zeros(2, 6))),
        UnsupportedModel,
        "is TorchScript, ",
    ),
    (
        dict(criterion=nn.CrossEntropyLoss(reduction="sum"), grad_sample_mode="ghost"),
        ValueError,
        "expected a criterion with reduction='mean' as loss_reduction says, got 'sum'",
    ),
]


def test_arguments_that_are_refused_in_one_line():
    for arguments, error, words in REFUSED:
        with pytest.raises(error) as caught:
            private(**arguments)
        assert re.search(words, str(caught.value)) and "\n" not in str(caught.value)


def test_a_model_with_opacus_hooks_or_batch_norm_is_refused():
    with pytest.raises(TypeError, match=r"hand in module.to_standard_module\(\)"):
        private(opacus.GradSampleModule(model()))
    with pytest.raises(UnsupportedModel, match="BatchNorm mixes the samples"):
        private(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))


def test_one_engine_has_one_model():
    engine, net, optimizer, loader = private()
    with pytest.raises(Misuse, match="expected one make_private of a PrivacyEngine"):
        engine.make_private(
            module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    for refused in (lambda: optimizer.grad_samples, lambda: optimizer.signal_skip_step(True)):
        with pytest.raises(Misuse):
            refused()
    with pytest.raises(Misuse, match=r"expected no accountant.step\(\)"):
        engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)


def test_losses_of_the_ghost_criterion_are_added_and_weighed():
    def weights(apart: bool) -> Tensor:
        _, net, optimizer, criterion, loader = private(
            grad_sample_mode="ghost", noise_multiplier=0.0, poisson_sampling=False,
            criterion=nn.CrossEntropyLoss() if apart else Sum(),
        )  # fmt: skip
        for x, y in loader:
            out = net(x)
            loss = 0.25 * criterion(out, y) / 2 + criterion(-out, y) if apart else criterion(out, y)
            assert float(loss) == pytest.approx(loss.item()) and loss.detach().dim() == 0
            assert f"{loss:.3f}" == f"{loss.item():.3f}"
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    class Sum:
        def __call__(self, out: Tensor, y: Tensor) -> Tensor:
            each = [F.cross_entropy(sign * out, y, reduction="none") for sign in (1, -1)]
            return each[0] / 8 + each[1]

    assert torch.allclose(weights(True), weights(False), atol=1e-6)
    _, net, _, criterion, loader = private(grad_sample_mode="ghost")
    x, y = next(iter(loader))
    out = net(x)
    with pytest.raises(Misuse, match="a gradient of its own would not be clipped"):
        criterion(out, y) + net._module[0].weight.pow(2).sum()
    one, other = criterion(out, y), criterion(-out, y)
    one.backward()
    with pytest.raises(Misuse, match=r"\(loss_a \+ loss_b\).backward\(\)"):
        other.backward()


def test_labels_inside_of_the_model_in_another_order_than_the_samples():
    class TimeFirst(Labelled):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.inner(x).transpose(0, 1)
            return {"loss": F.cross_entropy(logits.reshape(-1, 11), labels.t().reshape(-1))}

    with pytest.raises(UnsupportedModel, match="samples mix"):
        labelled(TimeFirst(), lambda out, y: out["loss"])


@pytest.mark.parametrize("records", [240, 245])
def test_the_batch_size_that_was_chosen_divides(records):
    """Not int(n / len(loader)), which is 22 of 245 records, and tells of their number."""
    engine, *_ = private(records=data(records))
    assert engine.engine.settings.batch_size == 24
    assert engine.engine.settings.mechanism.sample_rate == 1 / -(-records // 24)


def test_the_ghost_mode_names_its_criterion_and_refuses_a_scaler():
    _, net, optimizer, criterion, loader = private(grad_sample_mode="ghost")
    x, y = next(iter(loader))
    with pytest.raises(Misuse, match="take the criterion that make_private returned"):
        F.cross_entropy(net(x), y).backward()
    optimizer.zero_grad()
    with pytest.raises(Misuse, match="expected no GradScaler"):
        torch.amp.GradScaler("cpu").scale(criterion(net(x), y)).backward()
