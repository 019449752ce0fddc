"""Accelerate: `prepare` before the engine or after it, and within accumulate(), gives the engine's own training."""

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate import Accelerator, skip_first_batches
from ranks import ranks

from dpbench import AdamBC, Misuse, PrivacyEngine
from dpbench.engine import PrivacyWarning
from dpbench.integrations.opacus import PrivacyEngine as OpacusEngine

SGD = partial(torch.optim.SGD, momentum=0.5)
SETTINGS = {"batch_size": 12, "sample_size": 60, "epochs": 2, "max_grad_norm": 0.3}


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore", message=".*can be repeated.*")


def parts(order, noise=1.0, kind=SGD, linked=False):
    """(accelerator, model, optimizer, scheduler, engine) after `prepare` in this order."""
    accelerator = None
    if order != "none":
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, step_scheduler_with_optimizer=linked)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = kind(model.parameters(), lr=0.5)
    settings = SETTINGS | {"noise_multiplier": noise, "generator": torch.Generator().manual_seed(3)}
    engine = None
    if order in ("first", "made first"):
        engine = PrivacyEngine(model, **settings)
    if order == "first":
        engine.attach(optimizer)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    if accelerator is not None:
        scheduler = accelerator.prepare(scheduler)
    if engine is None:
        engine = PrivacyEngine(model, **settings)
    if order != "first":
        engine.attach(optimizer)
    return accelerator, model, optimizer, scheduler, engine


def data():
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(60, 6, generator=numbers, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (60,), generator=numbers))


def train(order, accumulate=False, **options):
    accelerator, model, optimizer, scheduler, engine = parts(order, **options)
    loader = engine.data_loader(data(), max_physical_batch_size=4)
    if accelerator is not None:
        loader = accelerator.prepare(loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model) if accumulate else nullcontext():
                losses = F.cross_entropy(model(x), y, reduction="none")
                optimizer.step(loss=losses)
                if engine.stepped or (accelerator is not None and accelerator.step_scheduler_with_optimizer):
                    scheduler.step()
                optimizer.zero_grad()
    spent = engine.privacy_spent()
    engine.detach()
    return [p.detach().clone() for p in engine.model.parameters()], spent


@pytest.mark.parametrize(
    ("order", "accumulate", "options"),
    [
        *(("first", False, {}), ("last", True, {}), ("made first", True, {})),
        *(("first", True, {"kind": AdamBC}), ("last", False, {"kind": AdamBC})),
        *(("first", False, {"linked": True}), ("last", False, {"linked": True})),
        *(("first", True, {"linked": True}), ("last", True, {"linked": True})),
    ],
)
def test_either_order_is_the_engine_alone(order, accumulate, options):
    """A linked scheduler may step at every piece: it goes on where the parameters move."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before.*")
        wanted, spent = train("none", **options)
        found, others = train(order, accumulate, **options)
    assert spent == others and spent.steps == 10
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_step_without_losses_says_what_to_do(order):
    _, model, optimizer, _, engine = parts(order)
    model(data().tensors[0][:4])
    with pytest.raises(Misuse, match=r"expected optimizer\.step\(loss=losses\) with per-sample losses, got no loss"):
        optimizer.step()
    engine.detach()
    model(data().tensors[0][:4]).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # an ordinary one again
    assert all(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_interface_of_opacus_takes_what_accelerate_has_prepared(mode):
    def weights(prepare):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        made = (model, SGD(model.parameters(), lr=0.5), DataLoader(data(), batch_size=12))
        model, optimizer, loader = prepare(*made)
        settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.3, "noise_generator": torch.Generator().manual_seed(3)}
        private = OpacusEngine()
        model, optimizer, *criterion, loader = private.make_private(
            module=model, optimizer=optimizer, data_loader=loader, grad_sample_mode=mode, **settings
        )
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        for x, y in loader:
            optimizer.zero_grad()
            (criterion or [F.cross_entropy])[0](model(x), y).backward()
            optimizer.step()
        assert len(steps) == private.engine.steps == 5
        return torch.cat([p.detach().flatten() for p in made[0].parameters()])

    assert torch.equal(weights(Accelerator(cpu=True).prepare), weights(lambda *made: made))


def test_a_piece_that_is_left_out_of_its_logical_batch_is_said():
    accelerator, model, optimizer, _, engine = parts("last")
    with pytest.warns(PrivacyWarning, match=r"on each piece of a logical batch.*within accelerator\.accumulate\(\)"):
        for x, y in engine.data_loader(data(), max_physical_batch_size=1):
            with accelerator.accumulate(model):
                losses = F.cross_entropy(model(x), y, reduction="none")
                if accelerator.sync_gradients:  # each third
                    optimizer.step(loss=losses)
    engine.detach()


def test_a_step_round_the_engine_is_refused():
    _, model, optimizer, _, engine = parts("last")
    model(data().tensors[0][:4])
    with pytest.raises(Misuse, match="goes round the privacy engine"):
        optimizer.optimizer.step()
    engine.detach()


def test_skipping_batches_says_that_the_engine_resumes_by_itself():
    accelerator, _, _, _, engine = parts("last")
    loader = accelerator.prepare(engine.data_loader(data()))
    assert len(loader.dataset) == 60  # as PyTorch's quickstart reads it
    with pytest.raises(AttributeError, match=r"after engine\.load_state_dict it goes on behind the last step"):
        skip_first_batches(loader, 2)
    engine.detach()


def test_a_scaled_optimizer_is_refused():
    _, model, optimizer, _, engine = parts("last")
    engine.detach()
    optimizer.scaler = object()
    with pytest.raises(Misuse, match="take mixed_precision='bf16'"):
        PrivacyEngine(model, **SETTINGS, noise_multiplier=1.0).attach(optimizer)


def main(folder):
    """In each process: (parameters, steps) of each order."""
    warnings.simplefilter("ignore")
    found = {order: train(order, noise=0.0) for order in ("first", "last", "made first")}
    return {order: (parameters, spent.steps) for order, (parameters, spent) in found.items()}


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_in_either_order_are_one(tmp_path):
    wanted, spent = train("none", noise=0.0)
    for found in ranks(tmp_path, Path(__file__)):
        for order in ("first", "last", "made first"):
            parameters, steps = found[order]
            assert steps == spent.steps
            for p, q in zip(wanted, parameters, strict=True):
                torch.testing.assert_close(p, q, rtol=0, atol=1e-12)
