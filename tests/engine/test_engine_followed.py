"""In one's own loop over `data_loader`: inputs and labels are followed to the losses."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attached import attached
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from clipping import UnsupportedModel
from dpbench.engine import recorder
from dpbench.engine.trace import Trace, Traced

B, N = 12, 48
LABELS = torch.arange(N) % 3
DATA = TensorDataset(torch.randn(N, 5, generator=torch.Generator().manual_seed(1)), LABELS, torch.rand(N) + 0.5)
entrances = pytest.mark.parametrize("known", [False, True], ids=["step", "make_step"])


def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    given = {"batch_size": B, "sample_size": N, "steps": 400, "noise_multiplier": 1.0}
    return attached(model, lr=0.1, **given | options)


def train(change=lambda x, y, w: (x, y, w), loss=None, known=False, epochs=2, backend="bk_mixed", **loader):
    """Train on changed batches, and return the number of steps."""
    loss = loss or (lambda o, y, w: F.cross_entropy(o, y, reduction="none"))
    model, optimizer, engine = made(backend=backend)
    step = engine.make_step(lambda outputs, targets: loss(outputs, *targets), compile=False) if known else None
    for _ in range(epochs):
        for batch in engine.data_loader(DATA, **loader):
            x, y, w = change(*batch)
            if step is None:
                losses = loss(model(x), y, w)
                optimizer.step(loss=losses)
                getattr(loss, "after", len)(losses)
            else:
                step(x, (y, w))
    return engine.steps


def mixed_by_data(x, y, w):
    x.data = x.data - x.data.mean(0)
    return x, y, w


MIXED = {
    "in a buffer": lambda x, y, w: (torch.empty(x.shape).copy_(x - x.mean(0)), y, w),
    "by data": mixed_by_data,
    "row by row": lambda x, y, w: (torch.stack([row - x.mean(0) for row in x]), y, w),
    "pairs": lambda x, y, w: (0.7 * x + 0.3 * x[torch.randperm(len(x))], y, w),
    "pairs in place": lambda x, y, w: (x.mul_(0.7).add_(0.3 * x.flip(0)), y, w),
    "standardised": lambda x, y, w: ((x - x.mean(0)) / x.std(0), y, w),
    "by 0": lambda x, y, w: (x + 0 * x.mean(0), y, w),
    "labels of others": lambda x, y, w: (x, y.flip(0), w),
    "inputs sorted alone": lambda x, y, w: (x[w.argsort()], y, w),
}


@entrances
@pytest.mark.parametrize("name", MIXED)
def test_inputs_that_are_mixed_before_the_model_are_refused(name, known):
    with pytest.raises(UnsupportedModel, match="samples mix"):
        train(MIXED[name], known=known)


LOSSES = {
    "weights of the batch's classes": lambda o, y, w: F.cross_entropy(
        o, y, 1 / (1.0 + y.bincount(minlength=3)), reduction="none"
    ),
    "advantages": lambda o, y, w: -(w - w.mean()) / w.std() * o.log_softmax(1).gather(1, y[:, None])[:, 0],
    "broadcast to [B, B]": lambda o, y, w: (o[:, :1] - w).square().mean(1),
    "over the sum of weights": lambda o, y, w: F.cross_entropy(o, y, reduction="none") * w / w.sum(),
    "the smaller half": lambda o, y, w: (
        F.cross_entropy(o, y, reduction="none") * (o.detach()[:, 0] < o.detach()[:, 0].median())
    ),
    "by a number": lambda o, y, w: F.cross_entropy(o, y, reduction="none") * w.mean().item(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_depend_on_the_labels_of_others_are_refused(name):
    loaders = {}, {"max_physical_batch_size": 5}, {"max_physical_batch_size": 5, "pad": True}
    for loader in (*loaders, {"change": SOUND["sorted"]}):
        with pytest.raises(UnsupportedModel, match="the loss or the norm of the gradient of sample"):
            train(loss=LOSSES[name], **loader)


def of_size(number):
    return lambda o, y, w: F.cross_entropy(o, y, reduction="none") * number(y)


@pytest.mark.parametrize("number", [lambda y: 1 / len(y), lambda y: y.shape[0], lambda y: 1.0 / float(y.numel())])
@pytest.mark.parametrize("known", [False, True], ids=["step", "make_step"])
def test_losses_that_are_scaled_by_the_number_of_samples_are_refused(number, known):
    with pytest.raises(UnsupportedModel, match="samples mix"):
        train(loss=of_size(number), known=known)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        train(lambda x, y, w: (x * number(y), y, w), known=known)


def test_what_is_logged_and_a_number_that_is_once_that_of_the_samples_are_not_refused():
    sizes, logged = [], []

    def loss(o, y, w):
        sizes.append(len(y))
        losses = F.cross_entropy(o, y, reduction="none") * sizes[0]
        logged.append(losses.mean() * len(y))
        return losses

    assert train(loss=loss) == 8 and len(set(sizes)) > 2


@pytest.mark.parametrize("compile", [None, False, True], ids=["step", "make_step", "program"])
def test_whoever_catches_a_refusal_and_goes_on_is_refused_again(compile):
    """As in a notebook, where a cell is run once more: not only in the steps that are checked in any case."""
    model, optimizer, engine = made(sampling="shuffled", batch_size=N // 8)

    def spread(outputs, y):
        return (outputs - outputs.detach().mean(0)).square().sum(1)

    step = None if compile is None else engine.make_step(spread, compile=compile)
    for x, y, _ in engine.data_loader(DATA):
        with pytest.raises(UnsupportedModel, match="samples mix"):
            optimizer.step(loss=model(x - x.mean(0)).square().sum(1)) if step is None else step(x, y)
    assert engine.steps == 0 and engine.drawn == 8


def test_they_are_without_a_tape():
    with pytest.raises(UnsupportedModel, match="samples mix"):
        train(loss=LOSSES["over the sum of weights"], backend="microbatch")


def queued():
    """Each output is compared with those of the last batch, as in momentum contrast."""
    kept = []

    def loss(o, y, w):
        similar = [o @ each.t() for each in kept]
        kept[:] = [o.detach()]
        return torch.cat([F.cross_entropy(o, y, reduction="none")[:, None], *similar], 1).logsumexp(1)

    return loss


def relative(of):
    """Losses over a running mean."""
    kept = []

    def loss(o, y, w):
        losses = F.cross_entropy(o, y, reduction="none")
        mean = kept[-1] if kept else torch.ones(())
        kept.append(0.9 * mean + 0.1 * of(losses.detach(), w).mean())
        return losses / mean

    return loss


def balanced():
    """Losses over their running mean, which is kept after the step."""
    kept = [torch.ones(())]

    def loss(o, y, w):
        return F.cross_entropy(o, y, reduction="none") / kept[-1]

    loss.after = lambda losses: kept.append(0.9 * kept[-1] + 0.1 * losses.detach().mean())
    return loss


def as_before():
    """Sound: weighs by a constant that is made once, and keeps losses for a log."""
    kept, log = [], []

    def loss(o, y, w):
        kept.append(torch.ones_like(o[0, 0]))
        log.append(F.cross_entropy(o.detach(), y))
        assert float(torch.stack(log).mean()) > 0
        return F.cross_entropy(o, y, reduction="none") * kept[0]

    return loss


FROM_BEFORE = {
    "outputs": queued,
    "losses": lambda: relative(lambda losses, w: losses),
    "the batch": lambda: relative(lambda losses, w: w),
    "after the step": balanced,
    "nothing": as_before,
}


@pytest.mark.parametrize("backend", ["bk_mixed", "microbatch"])
@pytest.mark.parametrize("name", FROM_BEFORE)
def test_losses_that_depend_on_an_earlier_batch_are_refused(name, backend):
    refused = pytest.raises(UnsupportedModel, match=r"samples mix.*of this batch or an earlier one")
    with refused if name != "nothing" else nullcontext():
        train(loss=FROM_BEFORE[name](), backend=backend)


def test_inputs_that_are_scaled_by_an_earlier_batch_are_refused():
    kept = [torch.ones(5)]

    def scaled(x, y, w):
        kept.append(0.9 * kept[-1] + 0.1 * x.abs().mean(0))
        return x / kept[-2], y, w

    with pytest.raises(UnsupportedModel, match="what the model reads for sample"):
        train(scaled, known=True)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        train(scaled)


def augmented_in_place(x, y, w):
    x.sub_(0.5).div_(2.0)[:, 0] = 0.0
    return x + 0.1 * torch.randn_like(x), y, w


def by_a_network(x, y, w):
    frozen = nn.Sequential(*[layer for _ in range(int(Trace.room)) for layer in (nn.Linear(5, 5), nn.Tanh())])
    with torch.no_grad():
        return frozen(x), y, w


def taught(x, y, w):
    with torch.no_grad():
        return x, nn.Linear(5, 3)(x).argmax(1), w


def against(x, y, w):
    x.requires_grad_()
    (slope,) = torch.autograd.grad((x**2).sum(), x)
    return (x + 0.1 * slope.sign()).detach(), y, w


COMPILED = torch.compile(lambda x: (x - 0.1) / 2, backend="eager")

SOUND = {
    "as they are": lambda x, y, w: (x, y, w),
    "augmented": lambda x, y, w: ((2 * x + 0.1 * torch.randn_like(x)).flip(1), y, w),
    "augmented in place": augmented_in_place,
    "by numpy": lambda x, y, w: (torch.from_numpy(np.asarray(x) * 2), torch.from_numpy(y.numpy()), w),
    "by a large network": by_a_network,
    "labelled by a teacher": taught,
    "moved against their gradient": against,
    "compiled": lambda x, y, w: (COMPILED(x), y, w),
    "sorted": lambda x, y, w: (x[w.argsort()], y[w.argsort()], w.sort().values),
    "shuffled": lambda x, y, w: tuple(each[torch.arange(len(x)).roll(3)] for each in (x, y, w)),
}


def test_a_batch_is_changed_in_place_once():
    kept = []

    def changed(x, y, w):
        x.mul_(2.0)
        kept.append((x, torch.Tensor(x.numpy().copy())))
        return x, y, w

    train(changed)
    assert all(torch.equal(x, copy) for x, copy in kept)


@entrances
@pytest.mark.parametrize("name", SOUND)
def test_sound_batches_pass(name, known):
    assert train(SOUND[name], known=known) == 8


class Centred(nn.Linear):
    begun = False

    def forward(self, x):
        return super().forward(x - x.mean(0) if self.begun else x)


def test_the_model_is_checked_where_what_came_before_cannot_be_run_again():
    """A gradient that is read from `.grad` is none when it runs again."""
    model, optimizer, engine = attached(Centred(5, 3), batch_size=B, sample_size=N, steps=400)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for x, y, _ in engine.data_loader(DATA):
            (x.requires_grad_() ** 2).sum().backward()
            moved = (x + 0.1 * x.grad.sign()).detach()
            model.begun = engine.steps > 0
            optimizer.step(loss=F.cross_entropy(model(moved), y, reduction="none"))


def test_mixing_that_begins_later_is_refused_soon():
    seen = []

    def begins(x, y, w):
        seen.append(len(x))
        return (x, y, w) if len(seen) < 10 else MIXED["standardised"](x, y, w)

    with pytest.raises(UnsupportedModel, match="what the model reads for sample"):
        train(begins, epochs=5)
    assert len(seen) <= 16


def test_a_batch_that_is_taken_before_the_last_one_is_stepped_is_followed():
    model, optimizer, engine = made()
    batches = iter(engine.data_loader(DATA))
    ahead = next(batches)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for following in batches:
            (x, y, w), ahead = ahead, following
            optimizer.step(loss=LOSSES["advantages"](model(x), y, w))
    assert not engine.steps


def test_labels_in_one_row_are_left_as_they_are():
    """Their lengths cannot be changed without them."""

    def collate(records):
        x, lengths = torch.randn(len(records), 9, 5), torch.tensor([2 + i % 4 for i in records], dtype=torch.long)
        return x, torch.ones(int(lengths.sum()), dtype=torch.long), lengths

    model, optimizer, engine = made(batch_size=4)
    for x, y, lengths in engine.data_loader(range(N), collate_fn=collate):
        if len(x):
            assert not any(isinstance(each, Traced) for each in (x, y, lengths))
            given = model(x).log_softmax(-1).transpose(0, 1), y, torch.full((len(x),), 9), lengths
            optimizer.step(loss=F.ctc_loss(*given, reduction="none"))
        else:
            engine.empty_step()
    assert engine.steps == 12


def test_as_many_fields_as_records_are_no_list_of_records():
    x, y, w = map(torch.stack, zip(*(DATA[i] for i in range(3)), strict=True))
    assert [isinstance(each, Traced) for each in Trace().batch([x, y, w])] == [True] * 3
    alike = list(torch.randn(3, 3))
    assert Trace().batch(alike) is alike
    records = [(x, y), (x, y), (x, y)]
    assert Trace().batch(records) is records


def test_few_batches_are_kept():
    """Though the model reads none of their tensors."""
    model, optimizer, engine = made()
    for _ in range(10):
        for x, y, _ in engine.data_loader(DATA, collate_fn=default_collate):
            given = torch.from_numpy(x.numpy().copy())
            optimizer.step(loss=F.cross_entropy(model(given), torch.from_numpy(y.numpy()), reduction="none"))
            assert len(engine._recorder._followed) <= recorder.AHEAD
