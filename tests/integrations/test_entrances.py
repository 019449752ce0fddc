"""Loops in which records mix, by every entrance: all end in one gate, and what one of them refuses all refuse.

In a loop of the caller's the engine sees the model, and the operations on its outputs, but no loss function: what
divides the losses by their number, or weighs them by labels that are counted, is the caller's to see to there.
"""

import warnings
from functools import partial
from itertools import islice, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import slow_unless
from opacus_made import Made
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipping import Flat, UnsupportedModel, load_backend
from clipping.checks.verification import WrongGradient
from dpbench import AdamBC, Misuse, PrivacyEngine
from dpbench.conformance.cases import cross_entropy as each
from tests.support.graphs import not_compiled

B, RECORDS = 8, 64
REFUSED = (UnsupportedModel, WrongGradient, Misuse)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    warnings.filterwarnings("ignore")
    not_compiled(monkeypatch)  # steps are traced, which is what is looked at


def data():
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(RECORDS, 6, generator=numbers), torch.randint(0, 3, (RECORDS,), generator=numbers)


class Model(nn.Module):
    """An MLP; `how` is what comes between."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.how = nn.Linear(6, 8), nn.Linear(8, 3), how

    def forward(self, x):
        return self.b(self.how(self.a(x).tanh()))


def itself(h):
    return h


@torch.jit.script
def scripted(h: torch.Tensor) -> torch.Tensor:
    return h / (h.detach().abs().mean() + 1e-3)


def hooked(h):
    if h.requires_grad:
        h.register_hook(lambda g: g / (g.norm() + 1e-3))
    return h


def checked(h):
    assert not h.isnan().any(), "a number"
    return h / (h.detach().norm() + 1e-3)


#: What a model does with a batch [B, 8] that is to be refused.
MODELS = {
    "a detached mean": lambda h: h - h.detach().mean(0),
    "batch statistics": lambda h: (h - h.mean(0)) / (h.std(0, correction=0) + 1),
    "a gate at zero": lambda h: h + 0.0 * (h.detach() @ h.detach().t()).softmax(1) @ h,
    "a script": scripted,
    "a hook": hooked,
    "the number of records": lambda h: h / h.shape[0],
    "dropout over the number of records": lambda h: F.dropout(h, 0.1) / h.shape[0],
    "a check for numbers": checked,
    "rolled by two": lambda h: h + 0.1 * h.roll(2, 0),
}


def counted(outputs, targets):
    weights = 1 / torch.bincount(targets, minlength=3).clamp(min=1)
    return each(outputs, targets) * weights[targets]


def trimmed(outputs, targets):
    losses = each(outputs, targets)
    return losses * (losses.detach() <= losses.detach().median())


def weighted_by_numpy(outputs, targets):
    losses = each(outputs, targets)
    weights = np.exp(losses.detach().numpy())
    return losses * torch.from_numpy(weights / weights.sum())


#: Losses [B] -> are they seen where the caller computes them?
LOSSES = {
    "their detached mean": (lambda o, y: each(o, y) / each(o, y).detach().mean(), True),
    "trimmed": (trimmed, True),
    "their number": (lambda o, y: each(o, y) / len(o), False),
    "labels that are counted": (counted, False),
    "weights of NumPy's": (weighted_by_numpy, False),
}


def engine_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(
        model, batch_size=B, sample_size=RECORDS, steps=20, max_grad_norm=1.0, noise_multiplier=1.0, clip="flat"
    )
    engine.attach(optimizer)
    return engine, optimizer


def by_step(model, loss, first="step"):
    _, optimizer = engine_of(model)
    for name, x, y in zip((first, "step"), *(tensor.split(B) for tensor in data()), strict=False):
        getattr(optimizer, name)(loss=loss(model(x), y))


def by_make_step(model, loss, compile=False):
    engine, _ = engine_of(model)
    step = engine.make_step(loss, compile=compile)
    for x, y in islice(zip(*(tensor.split(B) for tensor in data()), strict=True), 5):
        step(x, y)


def by_backend(model, loss):
    x, y = data()
    with load_backend("bk_mixed")(model, loss, clip=Flat(max_grad_norm=1.0)) as backend:
        backend(x[:B], y[:B])


def by_opacus(model, loss, mode="hooks"):
    class Criterion:
        reduction = "mean"

        def __call__(self, outputs, targets):
            losses = loss(outputs, targets)
            return losses if self.reduction == "none" else losses.mean()

    options = {"grad_sample_mode": mode, **({"criterion": Criterion()} if mode == "ghost" else {})}
    sgd = partial(torch.optim.SGD, lr=0.1)  # or what a test puts in its place
    made = Made(model, TensorDataset(*data()), batch_size=B, optimizer=sgd, **options)
    made.train(made.criterion if mode == "ghost" else Criterion())


def by_lightning(model, loss):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from dpbench.integrations.lightning import PrivateStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, batch_idx):
            return loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = PrivateStrategy(privacy={"max_grad_norm": 1.0, "noise_multiplier": 1.0})
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(strategy=strategy, max_epochs=1, enable_checkpointing=False, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(*data()), batch_size=B))


def by_trainer(model, loss):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from dpbench.integrations.huggingface import PrivacyArguments, PrivateTrainer

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x, labels=None):
            return self.net(x)

    x, y = data()
    records = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    trainer = PrivateTrainer(
        model=Wrapped(),
        args=transformers.TrainingArguments(per_device_train_batch_size=B, max_steps=2, **quiet),
        privacy=PrivacyArguments(max_grad_norm=1.0, noise_multiplier=1.0),
        train_dataset=records,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        compute_loss_func=lambda outputs, labels, num_items_in_batch: loss(outputs, labels),
    )
    trainer.train()


#: Functions that train a model, by name. Those in `KNOWING` take the loss function.
ENTRANCES = {
    "step": by_step,
    "virtual_step": partial(by_step, first="virtual_step"),
    "make_step": by_make_step,
    "compiled": partial(by_make_step, compile=True),
    "backend": by_backend,
    "opacus": by_opacus,
    "opacus, ghost": partial(by_opacus, mode="ghost"),
    "lightning": by_lightning,
    "trainer": by_trainer,
}
KNOWING = ("make_step", "compiled", "backend", "lightning", "trainer")


@pytest.mark.parametrize("entrance", [name for name in ENTRANCES if name != "backend"])
def test_the_bias_correction_of_adam_knows_the_noise(entrance, tmp_path, monkeypatch):
    """What mixes nothing is trained; in `.grad` are noise of the deviation told, and gradients of a 40th of that."""
    seen = []

    def look(optimizer, *_):
        entries = torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]])
        seen.append((len(entries), float(entries.std()) / optimizer.noise))

    def made(parameters, lr):
        optimizer = AdamBC(parameters, lr=lr)
        optimizer.register_step_pre_hook(look)
        return optimizer

    monkeypatch.setattr(torch.optim, "SGD", made)
    monkeypatch.chdir(tmp_path)
    model = Model(itself)
    model.a, model.b = nn.Linear(6, 600), nn.Linear(600, 3)
    ENTRANCES[entrance](model, each)
    assert seen
    for count, ratio in seen:
        assert count > 6000 and ratio == pytest.approx(1.0, abs=5 / (2 * count) ** 0.5)


#: All end in the gate of `optimizer.step` or of a program: one of each meets every model and loss, and the others some.
SOME = ("a detached mean", "a hook", "the number of records")


@pytest.mark.parametrize(
    ("entrance", "name"),
    slow_unless(lambda entrance, name: entrance in ("step", "compiled") or name in SOME, product(ENTRANCES, MODELS)),
)
def test_a_model_that_mixes_is_refused(entrance, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(REFUSED):
        ENTRANCES[entrance](Model(MODELS[name]), each)


@pytest.mark.parametrize(
    ("entrance", "loss"),
    [
        (entrance, loss)
        for entrance, loss in product(ENTRANCES, LOSSES)
        if entrance in KNOWING or LOSSES[loss][1]
        if entrance in ("step", "make_step") or loss in ("their detached mean", "labels that are counted")
    ],
)
def test_a_loss_that_mixes_is_refused(entrance, loss, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(REFUSED):
        ENTRANCES[entrance](Model(itself), LOSSES[loss][0])
