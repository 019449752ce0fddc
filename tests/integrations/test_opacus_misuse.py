"""What is not sound is refused by name, and what is odd but sound is done: loops as people write them for Opacus."""

import copy
import io
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from marks import slow_unless
from opacus.accountants import RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_made import ADAPTIVE, Made
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from clipping.core.types import UnsupportedModel
from dpbench import Misuse, PrivacyWarning
from dpbench.conformance.modules import Net
from dpbench.integrations.opacus import DPDataLoader, DPOptimizer, GradSampleModule

Loss = Callable[[Tensor, Tensor], Any]
MODES = pytest.mark.parametrize("mode", ["hooks", "ghost"])
#: The same batches, and gradients that are mostly clipped.
FIXED: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": 0.1, "poisson_sampling": False}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data(n: int = 240) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def private(net: nn.Module | None = None, *, records: Any = None, batch_size: int = 24, **others: Any) -> Made:
    return Made(net or model(), records or data(), batch_size=batch_size, **others)


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
        assert private().train(SOUND[name]).steps == 10


def test_losses_that_mix_samples_are_refused():
    """However much memory they take."""

    def wide(o: Tensor) -> Tensor:
        return o.unsqueeze(-1).expand(*o.shape, 500).contiguous().mean(-1)

    for loss in MIXING.values():
        for mixing in (loss, lambda o, y, loss=loss: loss(wide(o), y)):
            with pytest.raises(UnsupportedModel, match="criterion: samples mix: the gradient of the loss of sample"):
                private().train(mixing)


@pytest.mark.parametrize("reads", [True, False])
def test_a_loss_over_the_mean_of_earlier_batches_is_refused_and_a_log_of_it_is_not(reads):
    kept = [torch.ones(())]

    def loss(o: Tensor, y: Tensor) -> Tensor:
        losses, mean = F.cross_entropy(o, y, reduction="none"), kept[-1]
        kept.append(0.9 * mean + 0.1 * losses.detach().mean())
        return losses.mean() / (mean if reads else 1.0)

    with pytest.raises(UnsupportedModel, match=r"samples mix.* or an earlier one") if reads else nullcontext():
        private().train(loss)


def test_a_sum_is_no_mean_and_a_mean_no_sum():
    summed = partial(F.cross_entropy, reduction="sum")
    with pytest.raises(UnsupportedModel, match=r"is a sum over the batch.*say loss_reduction='sum'"):
        private().train(summed)
    with pytest.raises(UnsupportedModel, match=r"is a mean over the batch.*say loss_reduction='mean'"):
        private(loss_reduction="sum").train(F.cross_entropy)
    with pytest.raises(UnsupportedModel, match="is a sum over the batch"):  # Poisson batches have other sizes
        private().train(lambda o, y: summed(o, y) / 24)
    for reduction in ("mean", "sum"):
        with pytest.raises(UnsupportedModel, match="over the batch"):
            private(loss_reduction=reduction).train(lambda o, y: F.cross_entropy(o, y) + o.square().sum())
    assert private(loss_reduction="sum").train(summed).steps == 10


def test_outputs_that_are_changed_in_place_where_the_model_needs_them():
    """As in ordinary training: an error of autograd's, and no wrong gradient."""
    made = private(nn.Sequential(nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0)))
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        warnings.simplefilter("ignore", PrivacyWarning)
        made.train(lambda o, y: F.mse_loss(o.mul_(3.0), (y == 1).float()))
    assert made.steps == 0


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


SOME = torch.rand(120, 5, generator=torch.Generator().manual_seed(3)) < 0.3


def tokens(ignored: Tensor | None = None) -> TensorDataset:
    """Sequences with their next tokens as targets; `ignored` marks the targets that the loss leaves out."""
    x = torch.randint(0, 11, (120, 5), generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, x.roll(-1, 1) if ignored is None else x.roll(-1, 1).where(~ignored, -100))


def of_tokens(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, 11), y.view(-1))


def test_a_mean_over_tokens_is_a_mean_over_samples_if_none_is_left_out():
    assert private(Tokens(), records=tokens()).train(of_tokens).steps == 5
    with pytest.raises(UnsupportedModel, match=r"samples mix.*grad_sample_mode='ghost'"):
        private(Tokens(), records=tokens(SOME)).train(of_tokens)


@pytest.mark.parametrize("ignored", [None, SOME], ids=["all", "some"])
def test_the_ghost_criterion_averages_over_the_tokens_of_each_sample(ignored):
    """As Opacus' does by `shape`: the weights are those of losses made by hand."""

    def one_by_one(logits: Tensor, y: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(a, b) for a, b in zip(logits, y, strict=True)])

    by_shape, by_hand = (
        private(Tokens(), records=tokens(ignored), criterion=criterion, grad_sample_mode="ghost", **FIXED)
        for criterion in (nn.CrossEntropyLoss(), one_by_one)
    )
    by_shape.train(lambda o, y: by_shape.criterion(o.view(-1, 11), y.view(-1), shape=o.shape))
    assert torch.allclose(by_shape.weights, by_hand.train().weights, atol=1e-6)


def test_a_loss_of_parameters_would_be_lost_and_is_refused():
    made = private()
    with pytest.raises(Misuse, match=r"got one at parameter '0.weight'.* would be lost: .*weight_decay="):
        made.train(lambda o, y: F.cross_entropy(o, y) + sum(p.pow(2).sum() for p in made.net.parameters()))
    assert made.steps == 0


def one_after_the_other(net: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy((out := net(x)), y).backward(retain_graph=True)
    out.square().mean().backward()


def evaluating(net: Any, x: Tensor, y: Tensor) -> None:
    out = net(x)
    net.eval()
    net(torch.randn(50, 6)).sum().item()
    with torch.no_grad():
        net(torch.randn(7, 6))
        net.train()
        net(torch.randn(9, 6))
    net(x)  # in training mode, with a graph that nobody uses
    F.cross_entropy(out, y).backward()


ODD: dict[str, tuple[Callable[..., None], Loss, Callable[[nn.Module], nn.Module]]] = {
    "a sample and its negative": (
        lambda net, x, y: (F.cross_entropy(net(x), y) + F.cross_entropy(net(-x), y)).backward(),
        lambda o, y: F.cross_entropy(o[:, 0], y) + F.cross_entropy(o[:, 1], y),
        lambda inner: Net(lambda net, x: torch.stack([net.inner(x), net.inner(-x)], 1), inner=inner),
    ),
    "two passes": (one_after_the_other, lambda o, y: F.cross_entropy(o, y) + o.square().mean(), lambda net: net),
    "evaluating": (evaluating, F.cross_entropy, lambda net: net),
}


@pytest.mark.parametrize(("odd", "loss", "wrap"), ODD.values(), ids=ODD)
def test_what_is_odd_but_sound_has_the_weights_of_the_plain_loop(odd, loss, wrap):
    """The sum moves by C for a sample, whatever its forward and backward passes; Opacus clips each of the latter."""
    found = []
    plain = lambda net, x, y: loss(net(x), y).backward()  # noqa: E731
    for step, made in ((odd, private(**FIXED)), (plain, private(wrap(model()), **FIXED))):
        for x, y in made.loader:
            step(made.model, x, y)
            made.optimizer.step()
            made.optimizer.zero_grad()
        found.append(made.weights)
    assert torch.allclose(*found, atol=1e-6)


@MODES
def test_a_batch_that_is_given_up_by_zero_grad_is_in_no_sum(mode):
    found = []
    for skip in (True, False):
        made = private(grad_sample_mode=mode, **FIXED)
        for i, (x, y) in enumerate(made.loader):
            if skip or i != 1:
                made.criterion(made.model(x), y).backward()
            if i != 1:
                made.optimizer.step()
            made.optimizer.zero_grad()
        found.append(made.weights)
    assert torch.equal(*found)


@pytest.mark.parametrize("poisson", [True, False])
@MODES
def test_gradients_of_several_batches_are_not_added_up(mode, poisson):
    made = private(grad_sample_mode=mode, poisson_sampling=poisson)
    batches = iter(made.loader)
    x, y = next(batches)
    made.criterion(made.model(x), y).backward()
    x, y = next(batches)
    with pytest.raises(Misuse, match=r"not accumulated; take a larger batch_size, and BatchMemoryManager"):
        made.criterion(made.model(x), y).backward()


def test_forward_passes_of_two_batches_before_their_backward_passes():
    made = private(poisson_sampling=False)
    batches = iter(made.loader)
    losses = [F.cross_entropy(made.model(x), y) for x, y in (next(batches), next(batches))]
    for loss in losses:
        loss.backward()
    with pytest.raises(Misuse, match="not accumulated"):
        made.optimizer.step()
    assert made.steps == 0


@pytest.mark.parametrize("evaluating", [True, False])
def test_what_has_no_gradient_at_the_outputs_is_no_step(evaluating):
    made = private()
    x, y = made.batch()
    made.model.train(not evaluating)
    loss = F.cross_entropy(made.model(x), y)
    if evaluating:
        loss.backward()
    with pytest.raises(Misuse, match=r"expected loss.backward\(\) of a forward pass in training mode"):
        made.optimizer.step()
    with pytest.raises(Misuse, match=r"expected optimizer\.step"):
        made.optimizer.original_optimizer.step()


def test_several_groups_and_frozen_parameters_as_in_opacus():
    def weights(**engine: Any) -> Tensor:
        net = model()
        net[0].bias.requires_grad_(False)
        groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[2].parameters(), "lr": 0.001}]
        return private(net, optimizer=lambda _: torch.optim.AdamW(groups), **FIXED, **engine).train().weights

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = weights(engine=opacus.PrivacyEngine())
    assert torch.allclose(weights(), theirs, atol=1e-5)


@MODES
def test_samples_of_no_records_are_steps_like_any_other(mode):
    made = private(records=data(20), batch_size=1, grad_sample_mode=mode)
    empty = 0
    for _ in range(3):
        for x, y in made.loader:
            before = made.weights
            made.train(loader=[(x, y)])
            if not len(x):
                empty += 1
                assert not torch.equal(before, made.weights)
    assert empty > 5 and made.steps == 60 and made.engine.accountant.history == [(1.0, 1 / 20, 60)]
    assert bool(made.weights.isfinite().all())


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


class TimeFirst(Labelled):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(x).transpose(0, 1)
        return {"loss": F.cross_entropy(logits.reshape(-1, 11), labels.t().reshape(-1))}


def labelled(net: nn.Module, inside: bool = True, ignored: Tensor | None = None) -> Tensor:
    """The weights after four steps without noise on all records, by the model's own loss or that of its logits."""
    made = private(net, records=tokens(ignored), batch_size=120, noise_multiplier=0.0, max_grad_norm=0.1)
    for _ in range(4):
        for x, y in made.loader:
            made.optimizer.zero_grad()
            out = made.model(x, labels=y)
            (out["loss"] if inside else of_tokens(out["logits"], y)).backward()
            made.optimizer.step()
    return made.weights


def test_a_loss_of_labels_inside_of_the_model_is_that_of_its_logits():
    last = torch.arange(5).expand(120, 5) == 4  # of each sample the last token, as of every causal model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = labelled(Labelled())
        assert torch.allclose(inside, labelled(Labelled(), inside=False), atol=1e-7)
        found = labelled(Labelled(), ignored=last)
    assert not torch.allclose(found, inside, atol=1e-4) and bool(found.isfinite().all())


def test_a_loss_inside_that_is_no_mean_over_samples_is_refused():
    for net, ignored in ((Labelled(), SOME), (Labelled(weight=torch.arange(11.0)), None), (Labelled(aux=True), None)):
        with pytest.raises(Misuse, match="samples are mixed already: compute the loss outside of the model"):
            labelled(net, ignored=ignored)
    with pytest.raises(Misuse, match="got one that they are computed from"):
        labelled(Labelled(feeds=True), inside=False)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        labelled(TimeFirst())


@MODES
def test_a_loss_inside_of_positional_labels_is_refused(mode):
    made = private(Labelled(), records=tokens(), grad_sample_mode=mode)
    x, y = made.batch()
    with pytest.raises(Misuse, match=r"samples are mixed already: compute the loss outside of the model"):
        made.model(x, y)["loss"].backward()


def test_a_forward_pass_that_fails_leaves_nothing_behind():
    made = private(Labelled(), records=tokens())
    x, y = made.batch()
    with pytest.raises((RuntimeError, ValueError)):
        made.model(x, labels=y[:, :2])
    assert torch.overrides._len_torch_function_stack() == 0


def test_batches_of_the_caller_s_own_loader_are_seen_to_be_assumed():
    """Its labels are constants where the loss runs again: what is made of outputs alone is found all the same."""
    made, own = private(), DataLoader(data(), batch_size=24)
    with (
        pytest.warns(PrivacyWarning, match=r"batches had exactly 24 samples: not Poisson samples"),
        pytest.warns(PrivacyWarning, match=r"a batch was not one of the loader that make_private returned"),
    ):
        for _ in range(2):
            made.train(loader=own)
    with pytest.warns(PrivacyWarning, match="NOT PRIVATE"):
        made.engine.get_epsilon(1e-5)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        private().train(MIXING["centred by a detached mean"], loader=own)


def test_what_cannot_be_run_again_is_said():
    def loss(o: Tensor, y: Tensor) -> Tensor:
        scale = float(o.detach().abs().mean())  # has left torch: a constant, when it runs again
        o.mul_(0.5)
        return F.cross_entropy(o, y) * scale

    with pytest.warns(PrivacyWarning, match="whether the loss mixes samples could not be checked"):
        private().train(loss)


def test_a_loss_that_becomes_another_one_later_is_looked_at_again():
    made = private(batch_size=6)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        made.train(lambda o, y: (F.cross_entropy if made.steps < 25 else MIXING["centred by a detached mean"])(o, y))
    assert 25 <= made.steps <= 27


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "pairs of samples": lambda x: 0.7 * x + 0.3 * x[torch.arange(len(x) - 1, -1, -1)],
    "divided by the batch's deviation": lambda x: (x - x.mean(0)) / x.std(0),
    "centred in place": lambda x: x.sub_(x.mean(0)),
}


@pytest.mark.parametrize("name", INPUTS)
@MODES
def test_inputs_that_mix_samples_are_refused(mode, name):
    made = private(grad_sample_mode=mode)
    with pytest.raises(UnsupportedModel, match=r"what the model reads for sample \d+ changes with the other samples"):
        made.train(loader=((INPUTS[name](x), y) for x, y in made.loader))


@MODES
def test_inputs_that_are_made_of_each_sample_alone_are_taken(mode):
    def inputs(x: Tensor) -> Tensor:
        return ((x - 0.1) / 2 + 0.1 * torch.randn_like(x) - x.mean(1, keepdim=True)).flip(1)

    made = private(grad_sample_mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.train(loader=((inputs(x), y) for x, y in made.loader))
    assert made.steps == 10


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
    with pytest.raises(UnsupportedModel, match="samples mix"):
        private(grad_sample_mode="ghost", criterion=criterion).train()


def test_a_pass_that_only_evaluates_is_no_look_at_the_loss():
    made = private()
    made.model.eval()
    with torch.no_grad():
        assert sum(len(made.model(x)) for x, _ in made.loader) > 0
    made.model.train()
    with pytest.raises(UnsupportedModel, match="samples mix"):
        made.train(MIXING["divided by the classes' weights"])


def test_losses_and_outputs_are_tensors_like_others_in_every_batch():
    kept = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(out, y)
        assert f"{found:.2f}" == f"{found.item():.2f}" and repr(out.detach()).startswith("tensor(")
        assert copy.deepcopy(found.detach()) == found and out.detach().numpy().shape == (len(y.numpy()), 3)
        assert float(out.argmax(1).eq(y).float().mean()) <= 1
        torch.save([found, y], io.BytesIO())
        kept.append(found)
        return found

    private().train(loss)
    assert len(kept) == 10 and sum(kept).item() == pytest.approx(sum(float(each) for each in kept), rel=1e-5)


def test_copies_of_the_model_are_ordinary_ones():
    made = private()
    for x, y in made.loader:
        F.cross_entropy(made.model(x), y).backward()
        average = copy.deepcopy(made.model)
        F.cross_entropy(average(x), y).backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        average.cleanup()
    file = io.BytesIO()
    torch.save(made.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.eval()(x), made.model.eval()(x)) and made.steps == 10


def test_gradients_of_inputs_end_at_the_outputs_and_are_refused():
    made, maker = private(), nn.Linear(6, 6)
    x, _ = made.batch()
    with pytest.raises(Misuse, match=r"inputs that need no gradient.*call model.eval\(\)"):
        made.model(maker(x))
    made.model.eval()
    made.model(maker(x)).sum().backward()
    assert bool(maker.weight.grad.any())
    made.optimizer.zero_grad()
    made.model.train()
    made.model(x).sum().div(len(x)).backward()
    made.optimizer.step()


@MODES
def test_scaled_losses_are_refused(mode):
    made, scaler = private(grad_sample_mode=mode), torch.amp.GradScaler("cpu")
    x, y = made.batch()
    with pytest.raises(Misuse, match="expected no GradScaler"):
        scaler.scale(made.criterion(made.model(x), y)).backward()
        scaler.step(made.optimizer)


WEIGHTED = DataLoader(data(), batch_size=24, sampler=WeightedRandomSampler([1.0] * 240, 240))
REFUSED = [
    (dict(clipping="adaptiv"), ValueError, "expected clipping, got .*; did you mean 'adaptive'.*one of flat, "),
    (dict(grad_sample_mode="gost"), ValueError, "expected grad_sample_mode, got .*; did you mean 'ghost'"),
    (dict(grad_sample_mode="no_op"), ValueError, "expected grad_sample_mode, one of hooks"),
    (dict(loss_reduction="none"), ValueError, "expected loss_reduction, one of mean, sum, got 'none'"),
    (dict(batch_first=False), ValueError, "expected batch_first=True, got False: let the samples come first"),
    (dict(rand_on_empty=True), ValueError, "expected rand_on_empty=False"),
    (dict(max_grad_nrom=1.0), TypeError, "arguments of make_private with clipping='flat', got 'max_grad_nrom'"),
    (dict(max_grad_norm=[1.0, 1.0]), ValueError, "expected a number as max_grad_norm, or with clipping='per_layer'"),
    (dict(max_grad_norm=[1.0], clipping="per_layer"), ValueError, "one of each of the 4 trainable parameters, got 1"),
    (dict(max_grad_norm=-1.0), ValueError, "max_grad_norm=-1.0 >= 0"),
    (dict(max_grad_norm=0.0), ValueError, "expected max_grad_norm > 0, got 0"),
    (dict(noise_multiplier=-1.0), ValueError, "noise_multiplier"),
    (dict(data_loader=WEIGHTED, poisson_sampling=False), Misuse, "shuffle=.*, got one with WeightedRandomSampler"),
    (dict(data_loader=WEIGHTED), Misuse, "without a sampler of its own with poisson_sampling=True, got one with Wei"),
    (
        dict(data_loader=opacus.data_loader.DPDataLoader(data(), sample_rate=0.1)),
        ValueError,
        r"with a batch_size, .*, got one without: hand in DataLoader\(dataset, batch_size=...\)",
    ),
    (dict(net=torch.jit.trace(model(), torch.zeros(2, 6))), UnsupportedModel, "is TorchScript, "),
    (
        dict(criterion=nn.CrossEntropyLoss(reduction="sum"), grad_sample_mode="ghost"),
        ValueError,
        "expected a criterion with reduction='mean' as loss_reduction says, got 'sum'",
    ),
    (dict(optimizer=lambda p: torch.optim.SGD(list(p)[2:])), Misuse, "'0.weight' is not among its: freeze it"),
    (dict(net=nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))), UnsupportedModel, "BatchNorm mixes the samples"),
    (dict(net=opacus.GradSampleModule(model())), TypeError, r"hand in module.to_standard_module\(\)"),
    (dict(ADAPTIVE, poisson_sampling=False), Misuse, "expected poisson_sampling=True with clipping='adaptive'"),
    (dict(ADAPTIVE, unclipped_num_std=0.5), ValueError, "unclipped_num_std > noise_multiplier / 2 = 0.5, got 0.5"),
    (dict(ADAPTIVE, target_unclipped_quantile=1.5), ValueError, "expected target_unclipped_quantile in"),
    (dict(ADAPTIVE, min_clipbound=20.0), ValueError, "0 < min_clipbound < max_clipbound, got 20.0 and 10.0"),
    (dict(ADAPTIVE, clipping="flat"), TypeError, "with clipping='flat', got 'clipbound_learning_rate' beside them"),
    (dict(clipping="adaptive"), TypeError, "with clipping='adaptive', got none named 'clipbound_learning_rate'"),
]


def test_arguments_that_are_refused_in_one_line():
    for arguments, error, words in REFUSED:
        with pytest.raises(error) as caught:
            private(**arguments)
        assert re.search(words, str(caught.value)) and "\n" not in str(caught.value)


def test_one_engine_has_one_model():
    made = private()
    for refused, words in (
        (lambda: private(engine=made.engine), "expected one make_private of a PrivacyEngine"),
        (lambda: made.optimizer.grad_samples, "got optimizer.grad_samples"),
        (lambda: made.optimizer.pre_step(), "without per-sample gradients, got optimizer.pre_step: "),
        (lambda: made.model.disable_hooks(), r"expected eval mode or torch\.no_grad\(\)"),
        (lambda: made.optimizer.signal_skip_step(True), "expected BatchMemoryManager"),
        (
            lambda: made.engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1),
            r"expected no accountant.step\(\)",
        ),
        (
            lambda: setattr(made.engine, "accountant", RDPAccountant()),
            r"as it counts the steps of this engine, got another one: .*load_state_dict\(other\.state_dict\(\)\)",
        ),
    ):
        with pytest.raises(Misuse, match=words):
            refused()


def test_opacus_own_manager_of_batches_names_ours():
    made = private()
    with pytest.raises(AttributeError, match=r"take BatchMemoryManager of dpbench\.integrations\.opacus"):
        BatchMemoryManager(data_loader=made.loader, max_physical_batch_size=4, optimizer=made.optimizer).__enter__()


def test_losses_of_the_ghost_criterion_are_added_and_weighed():
    def by_hand(out: Tensor, y: Tensor) -> Tensor:
        first, second = (F.cross_entropy(sign * out, y, reduction="none") for sign in (1, -1))
        return first / 8 + second

    def loss(out: Tensor, y: Tensor) -> Any:
        found = 0.25 * made.criterion(out, y) / 2 - -made.criterion(-out, y)
        assert float(found) == pytest.approx(found.item()) and found.detach().dim() == 0
        assert f"{found:.3f}" == f"{found.item():.3f}"
        return found

    made = private(grad_sample_mode="ghost", **FIXED)
    wanted = private(grad_sample_mode="ghost", criterion=by_hand, **FIXED).train().weights
    assert torch.allclose(made.train(loss).weights, wanted, atol=1e-6)
    x, y = made.batch()
    out = made.model(x)
    with pytest.raises(Misuse, match="a gradient of its own would not be clipped"):
        made.criterion(out, y) + made.net[0].weight.pow(2).sum()
    made.criterion(out, y).backward()
    with pytest.raises(Misuse, match=r"\(loss_a \+ loss_b\).backward\(\)"):
        made.criterion(-out, y).backward()


@pytest.mark.parametrize(
    "by_hand",
    [
        lambda: GradSampleModule(model(), batch_first=True, loss_reduction="mean"),
        lambda: DPOptimizer(
            torch.optim.SGD(model().parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=4,
        ),
        lambda: DPDataLoader(data(), sample_rate=0.1),
    ],
)
def test_what_make_private_returns_is_not_made_by_hand(by_hand):
    with pytest.raises(Misuse, match=r"expected PrivacyEngine\(\).make_private\(.* made by hand"):
        by_hand()


@pytest.mark.parametrize("records", [240, 245])
def test_the_batch_size_that_was_chosen_divides(records):
    """Not int(n / len(loader)), which is 22 of 245 records, and tells of their number."""
    settings = private(records=data(records)).engine.engine.settings
    assert settings.batch_size == 24 and settings.mechanism.sample_rate == 1 / -(-records // 24)


def test_a_loader_of_one_process_s_share_has_the_batch_size_of_all():
    records = TensorDataset(torch.zeros(96, 6), torch.zeros(96, dtype=torch.long))
    sampler = DistributedSampler(records, num_replicas=4, rank=0)
    settings = private(data_loader=DataLoader(records, batch_size=6, sampler=sampler)).engine.engine.settings
    assert settings.batch_size == 24 and settings.mechanism.sample_rate == 1 / 4


def test_the_ghost_mode_names_its_criterion():
    made = private(grad_sample_mode="ghost")
    with pytest.raises(Misuse, match=r"expected loss.backward\(\) of the criterion that make_private returned"):
        made.optimizer.step()
    with pytest.raises(Misuse, match="take the criterion that make_private returned"):
        made.train(F.cross_entropy)
