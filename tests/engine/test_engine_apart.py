"""In a training loop: a model or a loss that mixes samples is refused before anything is released, in any backend."""

import copy
import io
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from attached import attached
from torch import nn

from clipping import UnsupportedModel, WrongGradient
from clipping.backends.recording import one_by_one
from clipping.checks.sample_independence import PATIENCE, Occasions
from clipping.norms.collection import _WholeNorms
from dpbench.conformance.modules import Net
from dpbench.engine import mixing_check
from dpbench.engine.trace import Traced, plain

B = 12
X, Y = torch.randn(B, 20, generator=torch.Generator().manual_seed(1)), torch.arange(B) % 5
each = pytest.mark.parametrize("backend", ["bk_mixed", "microbatch"])  # with a tape, and without


def made(model=None, backend="bk_mixed"):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
    generator = torch.Generator().manual_seed(2)
    return attached(model, lr=0.1, batch_size=B, sample_size=1000, steps=100, backend=backend, generator=generator)


def cross_entropy(outputs, targets=Y):
    return F.cross_entropy(outputs, targets, reduction="none")


def contrastive(outputs):
    z = F.normalize(outputs)
    return F.cross_entropy(z @ z.roll(1, 0).T / 0.1, torch.arange(len(z)), reduction="none")


def trimmed(outputs):
    losses = cross_entropy(outputs)
    return losses * (losses.detach() < losses.detach().median())


def trimmed_by(fill):
    """`fill(mask, indices)` writes ones into the mask of the largest half."""

    def loss(outputs):
        losses, mask = cross_entropy(outputs), torch.zeros(len(outputs))
        fill(mask, losses.detach().topk(len(losses) // 2).indices)
        return losses * mask

    return loss


MIXING = {
    "divided by their mean": lambda o: cross_entropy(o) / cross_entropy(o).detach().mean(),
    "standardised": lambda o: (lambda x: (x - x.detach().mean()) / x.detach().std())(cross_entropy(o)),
    "trimmed": trimmed,
    "trimmed by an index": trimmed_by(lambda mask, indices: mask.__setitem__(indices, 1.0)),
    "trimmed by a filled mask": trimmed_by(lambda mask, indices: mask.index_fill_(0, indices, 1.0)),
    "contrastive": contrastive,
    "divided by a number": lambda o: (lambda x: x / x.detach().mean().item())(cross_entropy(o)),
    "trimmed by a number": lambda o: (lambda x: x * (x < float(x.detach().median())))(cross_entropy(o)),
    "sorted": lambda o: cross_entropy(o).sort()[0],
}


@each
def test_a_loss_that_mixes_samples_is_refused(backend):
    for loss in MIXING.values():
        model, optimizer, engine = made(backend=backend)
        before = copy.deepcopy(model.state_dict())
        for _ in range(2):  # and whoever catches that, and goes on, is refused again
            with pytest.raises(UnsupportedModel, match="samples mix"):
                optimizer.step(loss=loss(model(X)))
        assert engine.steps == 0
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@each
def test_mixing_that_starts_in_the_second_step_is_refused(backend):
    model, optimizer, engine = made(backend=backend)
    optimizer.step(loss=cross_entropy(model(X)))
    with pytest.raises(UnsupportedModel, match="samples mix"):
        optimizer.step(loss=contrastive(model(X)))
    assert engine.steps == 1


class Opening(nn.Module):
    """Subtracts the mean of the batch's chosen rows, behind a gate that is closed in so many steps."""

    def __init__(self, closed):
        super().__init__()
        self.layer, self.steps, self.closed = nn.Linear(20, 5), 0, closed

    def forward(self, x):
        self.steps += self.training
        found = self.layer(x)
        return found - float(self.steps > self.closed) * found[x[:, 0] > 0].detach().mean(0)


@each
@pytest.mark.parametrize(("closed", "least", "most"), [(0, 0, 0), (3, 3, 31)])
def test_a_model_that_mixes_samples_is_refused(closed, least, most, backend):
    """Soon where a schedule opens a gate: other records are NaN in most looks, and so not chosen while it is closed."""
    model, optimizer, engine = made(Opening(closed), backend)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for _ in range(32):
            optimizer.step(loss=cross_entropy(model(X)))
    assert least <= engine.steps <= most


@torch.jit.script
def scripted(outputs: torch.Tensor, targets: torch.Tensor):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs):
        ctx.save_for_backward(outputs)
        return (outputs**2).sum(1)

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g[:, None]


def with_metrics(outputs):
    losses = cross_entropy(outputs)
    assert outputs.argmax(1).eq(Y).float().mean().item() <= 1 and losses.sum().item() > 0
    assert outputs.detach().numpy().shape == (B, 5) and len(losses.tolist()) == B
    return losses


def in_place(outputs):
    outputs /= 2.0
    outputs[:, 0] += 1
    return cross_entropy(outputs)


def weighted(outputs):
    weights = torch.ones(B)
    weights[:3] = 0
    return cross_entropy(outputs) * weights


SOUND = {
    "cross entropy": cross_entropy,
    "scripted": lambda o: scripted(o, Y),
    "compiled": torch.compile(cross_entropy, backend="eager"),
    "a custom function": Squares.apply,
    "with metrics": with_metrics,
    "in place": in_place,
    "weighted": weighted,
    "with dropout": lambda o: cross_entropy(F.dropout(o, 0.5)),
    "of a mean over views": lambda o: (cross_entropy(o) + cross_entropy(o.flip(1))) / 2,
}


@each
def test_a_sound_loss_passes_and_releases_the_same_as_unseen(backend):
    for loss in SOUND.values():
        found = []
        for seen in (True, False):
            model, optimizer, engine = made(backend=backend)
            if not seen:
                engine._recorder._occasions = None
                engine._recorder._verify = False
            for _ in range(2):
                torch.manual_seed(5)
                optimizer.step(loss=loss(model(X)))
            found.append(model.state_dict())
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_a_model_that_asserts_the_size_of_its_batch_passes():
    class Fixed(nn.Linear):
        def forward(self, x):
            assert len(x) == B
            return super().forward(x)

    model, optimizer, engine = made(Fixed(20, 5))
    optimizer.step(loss=plain(model(X)).square().sum(1))  # which is not followed
    assert engine.steps == 1


def test_an_output_without_tensors_is_refused_unless_the_loss_is_known():
    class Predicted:
        def __init__(self, mean):
            self.mean = mean

    class Predicting(nn.Linear):
        def forward(self, x):
            return Predicted(super().forward(x)[:, 0])

    model, optimizer, engine = made(Predicting(20, 1))
    with pytest.raises(UnsupportedModel, match=r"output is Predicted, in which no tensors are found.*make_step"):
        optimizer.step(loss=(model(X).mean - Y).square())
    engine.make_step(lambda output, y: (output.mean - y).square(), compile=False)(X, Y)
    assert engine.steps == 1


def test_distributions_among_outputs_are_followed():
    class Predicting(nn.Linear):
        def forward(self, x):
            mean, log_scale, value = super().forward(x).unbind(1)
            return torch.distributions.Independent(torch.distributions.Normal(mean, log_scale.exp()), 0), value

    def loss(outputs, scale):
        normal, value = outputs
        return (value - Y).square() - normal.log_prob(Y) * scale(normal)

    model, optimizer, engine = made(Predicting(20, 3))
    optimizer.step(loss=loss(model(X), lambda normal: normal.mean.detach()))
    assert engine.steps == 1
    model, optimizer, _ = made(Predicting(20, 3))
    with pytest.raises(UnsupportedModel, match="samples mix"):
        optimizer.step(loss=loss(model(X), lambda normal: normal.mean.mean().detach()))


def test_tensors_of_the_callers_own_are_changed_once():
    model, optimizer, _ = made()
    total, history = torch.zeros(()), []
    for _ in range(2):
        losses = cross_entropy(model(X))
        total += losses.sum().detach()
        history.append(losses.detach())
        optimizer.step(loss=losses)
    assert type(total) is torch.Tensor
    torch.testing.assert_close(total, plain(history[0]).sum() + plain(history[1]).sum())


def test_what_was_traced_is_recorded_no_more_afterwards_and_saved_as_ordinary():
    model, optimizer, _ = made()
    losses = cross_entropy(model(X))
    assert isinstance(losses, Traced)
    optimizer.step(loss=losses)
    assert losses.mean().noted_by is losses.noted_by and not losses.noted_by._notes
    file = io.BytesIO()
    torch.save(losses.detach(), file)
    file.seek(0)
    assert type(torch.load(file)) is torch.Tensor


class Keeps(nn.Module):
    """Writes something of its batch to itself in each forward pass, and reads the attribute `read` in the next one."""

    def __init__(self, write, read="", *, persistent=True):
        super().__init__()
        self.layer, self.write, self.read = nn.Linear(20, 5), write, read
        nn.init.zeros_(self.layer.bias)
        self.register_buffer("buffer", torch.zeros(20), persistent=persistent)
        self.attribute, self.held = torch.zeros(20), []
        self.frozen = nn.Parameter(torch.zeros(20), requires_grad=False)
        with torch.inference_mode():
            self.register_buffer("constant", torch.ones(()))

    def forward(self, x):
        out = self.layer(x + getattr(self, self.read) if self.read else x)
        self.write(self, x.detach())
        return out


class Extra(Keeps):
    def get_extra_state(self):
        return {"held": self.held, "version": "1"}

    def set_extra_state(self, state):
        self.held = state["held"]


class Initialised(Keeps):
    def forward(self, x):
        if not self.layer.bias.any():
            self.layer.bias.data.copy_(x.mean(0)[:5])
        return super().forward(x)


def running_mean(model, x):
    model.buffer.lerp_(x.mean(0), 0.1)


def mean(model, x):
    model.attribute = x.mean(0)


def listed(model, x):
    model.held.append(x.mean(0))
    model.attribute = model.held[-1]


NEXT = "the next batch's output changes"
KEPT = {
    "a count in a buffer": (Keeps(lambda model, x: model.buffer.add_(1), "buffer"), None),
    "a count": (Keeps(lambda model, x: setattr(model, "attribute", model.attribute + 1), "attribute"), None),
    "an attribute that no step reads": (Keeps(mean), None),
    "a buffer that no step reads": (Keeps(running_mean, persistent=False), None),
    "a running mean": (Keeps(running_mean), "'buffer' changes"),
    "a count of records": (Keeps(lambda model, x: model.buffer.add_(len(x))), "'buffer' changes"),
    "extra state": (Extra(lambda model, x: model.held.append(x.mean().item())), "'_extra_state.*' changes"),
    "a rebound buffer": (Keeps(lambda model, x: setattr(model, "buffer", x[-1]), "buffer"), "'buffer' changes"),
    "some entries": (Keeps(lambda model, x: setattr(model, "buffer", x[x > 0])), "'buffer' changes"),
    "a frozen parameter": (Keeps(lambda model, x: model.frozen.copy_(x[-1])), "'frozen' changes"),
    "a running mean that is read": (Keeps(running_mean, "buffer", persistent=False), NEXT),
    "an attribute": (Keeps(mean, "attribute"), NEXT),
    "a number": (Keeps(lambda model, x: setattr(model, "attribute", float(x.mean())), "attribute"), NEXT),
    "a list": (Keeps(listed, "attribute"), NEXT),
    "the first batch": (Initialised(lambda model, x: None), f"samples mix|{NEXT}"),
}


@pytest.mark.parametrize("size", [1, len(X)])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_a_model_that_keeps_a_part_of_its_records_is_refused(kind, whole, size):
    model, reason = KEPT[kind]
    x, y = X[:size], Y[:size]
    model, optimizer, engine = made(copy.deepcopy(model))
    step = engine.make_step(cross_entropy, compile=False) if whole else None
    before = model.layer.weight.detach().clone()
    with pytest.raises(UnsupportedModel, match=reason) if reason else nullcontext():
        step(x, y) if step else optimizer.step(loss=cross_entropy(model(x), y))
    assert torch.equal(before, model.layer.weight) == bool(reason)


class Balanced(nn.Module):
    """Weighs classes by how often they were in earlier batches, or only keeps that."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.register_buffer("shares", torch.ones(5) / 5)

    def forward(self, outputs, targets):
        weights = 0.2 / self.shares.clone() if self.reads else None
        self.shares.lerp_(F.one_hot(targets, 5).float().mean(0), 0.1)
        return F.cross_entropy(outputs, targets, weights, reduction="none")


@pytest.mark.parametrize("reads", [False, True])
def test_a_loss_that_keeps_a_part_of_its_records_for_the_next_step_is_refused(reads):
    _, _, engine = made()
    step = engine.make_step(Balanced(reads), compile=False)
    y = torch.tensor([0] + [1] * (B - 2) + [0])  # the first and the last record are alike
    with pytest.raises(UnsupportedModel, match=NEXT) if reads else nullcontext():
        step(X, y)


HELD = {
    "a list": (list, lambda held, x: held.append(x), list),
    "a deque": (lambda: deque(maxlen=4), lambda held, x: held.append(x), list),
    "a dict of lists": (lambda: {"means": []}, lambda held, x: held["means"].append(x), lambda held: held["means"]),
    "a set": (set, lambda held, x: held.add(float(x[0])), lambda held: list(map(torch.tensor, held))),
    "an object": (
        SimpleNamespace,
        lambda held, x: vars(held).update({f"mean {len(vars(held))}": x}),
        lambda held: list(vars(held).values()),
    ),
    "a tensor in a list": (lambda: [torch.zeros(20)], lambda held, x: held[0].add_(x), list),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", HELD)
def test_looks_leave_what_a_model_holds_as_they_found_it(kind, whole):
    made_of, write, read = HELD[kind]
    model, optimizer, engine = made(Keeps(lambda model, x: write(model.held, x.mean(0))))
    model.held, expected = made_of(), made_of()
    step = engine.make_step(cross_entropy, compile=False) if whole else None
    for _ in range(2):
        step(X, Y) if step else optimizer.step(loss=cross_entropy(model(X)))
        write(expected, X.mean(0))
    assert len(read(model.held)) == len(read(expected))
    assert all(map(torch.equal, read(model.held), read(expected)))


def test_a_step_is_looked_at_if_memory_for_the_first_look_was_missing(monkeypatch):
    model, optimizer, _ = made(Keeps(running_mean))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(mixing_check, "Draws", Mock(side_effect=torch.OutOfMemoryError))
        model(X)
    with pytest.raises(UnsupportedModel, match="'buffer' changes"):
        optimizer.step(loss=cross_entropy(model(X)))


def test_norms_that_are_a_little_too_small_are_found(monkeypatch):
    """The comparison is in one graph, where no more than rounding can differ. A step that failed is compared again."""
    model, optimizer, _ = made()
    total = _WholeNorms._total
    monkeypatch.setattr(_WholeNorms, "_total", lambda self: tuple(norms * 0.985 for norms in total(self)))
    for _ in range(2):
        with pytest.raises(WrongGradient, match="expected at most 1e-03"):
            optimizer.step(loss=cross_entropy(model(X)) * 2)
    with pytest.raises(FloatingPointError):
        optimizer.step(loss=cross_entropy(model(X * torch.nan)) * 2)


@pytest.mark.parametrize(("rows", "backend"), [(B, "bk_mixed"), (1, "bk_mixed"), (1, "microbatch")])
def test_rows_of_a_constant_beside_the_batch(rows, backend):
    """As many as the batch has belong to its records; others to none, so that a gradient there is in no norm."""

    def beside(net, x):
        both = net.layer(torch.cat([x, torch.full((rows, 20), 0.3)]))
        return both[: len(x)] - 2 * both[len(x) :]

    model, optimizer, engine = made(Net(lambda net, x: net.layer(x), layer=nn.Linear(20, 5)), backend)
    optimizer.step(loss=cross_entropy(model(X)))
    model.run = beside
    if rows < B and backend == "bk_mixed":
        with pytest.raises(UnsupportedModel, match="rows that belong to no sample"):
            optimizer.step(loss=cross_entropy(model(X)))
        return
    plain = copy.deepcopy(model)
    expected = one_by_one(cross_entropy(plain(X)), dict(plain.named_parameters()), engine.clip)
    found = engine._recorder.finish(cross_entropy(model(X)))
    assert found.norms.tolist() == pytest.approx(expected.norms.tolist())


@each
def test_rows_behind_a_gate_are_looked_at_when_it_opens(backend):
    """A gradient of zeros shows nothing. The owners of the rows behind the gate are not followed."""
    parts = {"layer": nn.Linear(20, 5), "head": nn.Linear(20, 5), "gate": torch.zeros(())}
    gated = Net(lambda net, x: net.head(x) + net.gate * net.layer(x.rot90(2)).rot90(2), **parts)
    model, optimizer, engine = made(gated, backend)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(3):
        optimizer.step(loss=cross_entropy(model(X)))
    model.gate.data.fill_(0.3)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        optimizer.step(loss=cross_entropy(model(X)))
    assert engine.steps == 3


def test_a_use_that_no_loss_depends_on_is_looked_at_a_few_times():
    occasions, tries = Occasions(), 0
    for tries in range(100):  # noqa: B007
        occasions.rows(4, 1)
        if not occasions.is_new:
            break
        occasions.rows_passed(1, whole=False)
    assert tries == PATIENCE
