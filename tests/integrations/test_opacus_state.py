"""What goes on between steps: schedulers of Opacus' classes, accountants, checkpoints, pieces of batches, hooks."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from opacus.schedulers import ExponentialNoise, LambdaGradClip, StepNoise
from opacus_loops import digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accounting import SubsampledGaussian, load_accountant
from dpbench import AdamBC, Misuse, PrivacyWarning
from dpbench.integrations.opacus import (
    BatchMemoryManager,
    DPOptimizer,
    GradSampleHooks,
    GradSampleModule,
    PrivacyEngine,
)

ADAPTIVE = {
    **dict(clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.3),
    **dict(max_clipbound=10.0, min_clipbound=0.01, unclipped_num_std=80.0),
}
SGD = partial(torch.optim.SGD, momentum=0.9)
DATA = TensorDataset(*(tensor[:600] for tensor in digits()))


class Made:
    """A linear model of the digits, made private."""

    def __init__(
        self,
        *,
        batch_size: int = 50,
        accountant: str = "prv",
        secure: bool = False,
        optimizer: Any = SGD,
        **private: Any,
    ) -> None:
        torch.manual_seed(0)
        self.original = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.engine = PrivacyEngine(accountant=accountant, secure_mode=secure)
        made = self.engine.make_private(
            module=self.original,
            optimizer=optimizer(self.original.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=batch_size),
            **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **private},
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()

    def train(self, loader: Any = None, batches: int = 10**9) -> None:
        for i, (x, y) in enumerate(self.loader if loader is None else loader):
            if i == batches:
                break
            self.optimizer.zero_grad()
            loss = self.criterion((self.original if isinstance(self.model, GradSampleHooks) else self.model)(x), y)
            loss.backward()
            self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.original.parameters()]).clone()


def test_what_is_returned_has_opacus_names():
    made = Made()
    assert isinstance(made.optimizer, torch.optim.Optimizer) and isinstance(made.loader, DataLoader)
    assert (
        isinstance(made.model, nn.Module)
        and made.model._module is made.original
        and getattr(made.model, "1") is made.original[1]
    )
    theirs = opacus.GradSampleModule(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    assert list(made.model.state_dict()) == list(theirs.state_dict())
    assert len(made.loader) == 12 and made.loader.dataset is DATA and made.loader.sample_rate == 1 / 12
    assert made.optimizer.expected_batch_size == 50 and made.optimizer.accumulated_iterations == 1
    assert made.optimizer.original_optimizer.param_groups is made.optimizer.param_groups
    assert made.engine.is_compatible(module=made.original) and not made.engine.is_compatible(
        module=nn.Sequential(nn.BatchNorm1d(4))
    )
    assert not any(isinstance(each, nn.BatchNorm1d) for each in PrivacyEngine.get_compatible_module(
        nn.Sequential(nn.BatchNorm1d(4))
    ))  # fmt: skip


def test_a_model_that_is_not_wrapped_is_used_as_it_is_and_cleaned_up():
    made = Made(wrap_model=False)
    made.train(batches=3)
    assert isinstance(made.model, GradSampleHooks) and made.engine.engine.steps == 3
    made.model.cleanup()
    made.model.cleanup()
    assert not made.original._forward_hooks and not made.original._forward_pre_hooks
    x, y = DATA[:4]
    nn.functional.cross_entropy(made.original(x), y).backward()
    made.optimizer.original_optimizer.step()
    assert made.engine.engine.steps == 3


def test_to_standard_module_leaves_an_ordinary_model():
    made = Made()
    made.train(batches=2)
    model = made.model.to_standard_module()
    assert model is made.original and not model._forward_hooks
    PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=50),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("poisson", [True, False])
def test_a_batch_in_pieces_gives_the_same_step(mode, poisson):
    def trained(most: int | None) -> Made:
        generator = torch.Generator().manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            made = Made(
                noise_multiplier=0.5, poisson_sampling=poisson, grad_sample_mode=mode, noise_generator=generator
            )
            if most is None:
                made.train()
                return made
            sizes = []
            with BatchMemoryManager(
                data_loader=made.loader, max_physical_batch_size=most, optimizer=made.optimizer
            ) as pieces:
                assert len(list(zip(range(3), pieces, strict=False))) == 3
                made.train(x_sizes(pieces, sizes))
            assert max(sizes) == most and len(sizes) > 30
            return made

    def x_sizes(pieces: Any, sizes: list[int]) -> Any:
        for x, y in pieces:
            sizes.append(len(x))
            yield x, y

    whole, pieces = trained(None), trained(16)
    assert whole.engine.engine.steps == pieces.engine.engine.steps == 12
    assert whole.engine.accountant.history == pieces.engine.accountant.history
    assert torch.allclose(whole.weights, pieces.weights, atol=1e-6)


def test_half_a_batch_that_is_left_out_is_in_no_other_sum():
    made = Made(noise_multiplier=0.0, poisson_sampling=False, max_grad_norm=1e-3)
    with BatchMemoryManager(data_loader=made.loader, max_physical_batch_size=30, optimizer=made.optimizer) as pieces:
        made.train(pieces, batches=1)
        assert made.engine.engine._sums
        before = made.weights
        made.train(pieces, batches=2)
    assert made.engine.engine.steps == 1
    moved = (made.weights - before).norm() / 0.1 * 50
    assert float(moved) <= 50 * 1e-3 * 1.001


def test_noise_of_a_scheduler_is_the_noise_that_is_drawn_and_accounted():
    made = Made()
    scheduler = ExponentialNoise(made.optimizer, gamma=0.8)
    for _ in range(3):
        made.train()
        scheduler.step()
    history = made.engine.accountant.history
    assert [steps for _, _, steps in history] == [12, 12, 12]
    assert [sigma for sigma, _, _ in history] == pytest.approx([1.0, 0.8, 0.64])
    assert made.optimizer.noise_multiplier == pytest.approx(0.512)
    theirs = opacus.accountants.RDPAccountant()
    theirs.history = history
    worst = load_accountant("prv").epsilon(SubsampledGaussian(0.64, 1 / 12), steps=36, delta=1e-5)
    best = load_accountant("prv").epsilon(SubsampledGaussian(0.64, 1 / 12), steps=12, delta=1e-5)
    found = made.engine.get_epsilon(1e-5)
    assert best < found < worst and found < 0.95 * theirs.get_epsilon(1e-5)
    composed = None
    for sigma, q, steps in history:
        one = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-3)
        composed = one.self_compose(steps) if composed is None else composed.compose(one.self_compose(steps))
    assert found == pytest.approx(composed.get_epsilon_for_delta(1e-5), rel=2e-3)


def test_noise_of_a_scheduler_is_in_the_gradients():
    """Clipped to almost nothing, they are the noise alone."""
    made = Made(max_grad_norm=1e-6)
    scheduler = StepNoise(made.optimizer, step_size=1, gamma=100.0)
    deviations = []
    made.optimizer.attach_step_hook(
        lambda optimizer: deviations.append(float(torch.cat([p.grad.flatten() for p in optimizer.params]).std()))
    )
    for _ in range(2):
        made.train(batches=1)
        scheduler.step()
    assert deviations[0] == pytest.approx(1e-6 / 50, rel=0.2)
    assert deviations[1] / deviations[0] == pytest.approx(100, rel=0.2)


def test_the_norm_of_a_scheduler_clips_and_scales_the_noise():
    made = Made(noise_multiplier=0.0)
    scheduler = LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 1e-3**epoch)
    scheduler.step()
    before = made.weights
    made.train(batches=1)
    assert float((made.weights - before).norm()) <= 0.1 * 100 / 50 * 1e-3
    assert made.optimizer.max_grad_norm == pytest.approx(1e-3)
    assert made.engine.engine.sensitivity.bound == pytest.approx(1e-3, rel=1e-2)
    assert made.engine.accountant.history == [(0.0, 1 / 12, 1)]


def test_noise_that_changes_has_no_ε_by_an_estimate():
    made = Made(accountant="gdp")
    with pytest.raises(ValueError, match="expected one noise_multiplier throughout with accountant='gdp'"):
        made.optimizer.noise_multiplier = 0.5


def test_a_norm_cannot_change_between_the_pieces_of_a_batch():
    made = Made(poisson_sampling=False)
    with BatchMemoryManager(data_loader=made.loader, max_physical_batch_size=30, optimizer=made.optimizer) as pieces:
        made.train(pieces, batches=1)
    with pytest.raises(Misuse, match="between logical batches"):
        made.optimizer.max_grad_norm = 2.0
    assert made.optimizer.max_grad_norm == 1.0


def test_a_step_hook_sees_the_noisy_gradients_and_takes_nothing_from_the_accounting():
    made = Made()
    seen = []
    before = made.weights

    def hook(optimizer: DPOptimizer) -> None:
        assert torch.equal(made.weights, before)
        seen.append(float(optimizer.params[0].grad.norm()))

    made.optimizer.attach_step_hook(hook)
    made.train(batches=1)
    assert len(seen) == 1 and seen[0] > 0 and made.engine.accountant.history == [(1.0, 1 / 12, 1)]


def test_schedulers_of_the_learning_rate():
    made = Made()
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.5)
    made.train(batches=1)
    scheduler.step()
    assert made.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.train(batches=1)
        scheduler.step()


def test_losses_that_are_summed_are_not_divided():
    torch.manual_seed(0)
    mean, whole = (
        Made(noise_multiplier=0.0, poisson_sampling=False),
        Made(noise_multiplier=0.0, poisson_sampling=False, loss_reduction="sum"),
    )
    whole.criterion = nn.CrossEntropyLoss(reduction="sum")
    before = mean.weights
    for made in (mean, whole):
        made.train(batches=1)
    assert torch.allclose(50 * (mean.weights - before), whole.weights - before, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clipping", [{}, ADAPTIVE], ids=["flat", "adaptive"])
def test_the_bias_correction_of_adam_knows_noise_and_thresholds_that_change(reduction, clipping):
    made = Made(optimizer=AdamBC, loss_reduction=reduction, noise_multiplier=40.0, **clipping)
    made.criterion = nn.CrossEntropyLoss(reduction=reduction)
    schedulers = [ExponentialNoise(made.optimizer, gamma=0.8)]
    if not clipping:
        schedulers.append(LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 1 / (1 + epoch)))
    told = []
    made.optimizer.attach_step_hook(
        lambda optimizer: told.append(
            (torch.cat([p.grad.flatten() for p in optimizer.params]).std(), made.optimizer.original_optimizer.noise)
        )
    )
    for _ in range(4):
        made.train(batches=1)
        for scheduler in schedulers:
            scheduler.step()
    for found, noise in told:  # of 650 entries; gradients are far smaller
        assert float(found) == pytest.approx(noise, rel=6 / 1300**0.5)
    assert len({round(noise, 6) for _, noise in told}) == 4
    assert told[0][1] == pytest.approx((1 if reduction == "mean" else 50) * 40.0 / 50, rel=0.05)


def test_checkpoints_go_on_and_epsilon_with_them(tmp_path):
    one = Made()
    one.train()
    one.engine.save_checkpoint(
        path=tmp_path / "a.pt", module=one.model, optimizer=one.optimizer, checkpoint_dict={"epoch": 3}
    )
    two = Made()
    held = two.engine.load_checkpoint(path=tmp_path / "a.pt", module=two.model, optimizer=two.optimizer)
    assert held["epoch"] == 3 and torch.equal(one.weights, two.weights)
    assert two.engine.accountant.history == [(1.0, 1 / 12, 12)]
    two.train()
    one.train()
    assert two.engine.accountant.history == one.engine.accountant.history == [(1.0, 1 / 12, 24)]
    assert two.engine.get_epsilon(1e-5) == one.engine.get_epsilon(1e-5)
    assert not torch.equal(one.weights, two.weights)  # no noise is drawn twice
    with pytest.raises(ValueError, match="noise_multiplier"):
        Made(noise_multiplier=2.0).engine.load_checkpoint(path=tmp_path / "a.pt", module=one.model)


def test_checkpoints_with_schedulers(tmp_path):
    one = Made()
    noise, norm = (
        ExponentialNoise(one.optimizer, gamma=0.5),
        LambdaGradClip(one.optimizer, scheduler_function=lambda epoch: 1 / (1 + epoch)),
    )
    for _ in range(2):
        one.train()
        noise.step(), norm.step()
    parts = dict(optimizer=one.optimizer, noise_scheduler=noise)
    one.engine.save_checkpoint(path=tmp_path / "a.pt", module=one.model, **parts)
    two = Made()
    parts = dict(optimizer=two.optimizer, noise_scheduler=ExponentialNoise(two.optimizer, gamma=0.5))
    with pytest.raises(ValueError, match="sensitivity"):
        two.engine.load_checkpoint(path=tmp_path / "a.pt", module=two.model, **parts)
    two = Made(max_grad_norm=1 / 3)
    parts = dict(optimizer=two.optimizer, noise_scheduler=ExponentialNoise(two.optimizer, gamma=0.5))
    two.engine.load_checkpoint(path=tmp_path / "a.pt", module=two.model, **parts)
    assert two.engine.accountant.history == one.engine.accountant.history
    assert two.optimizer.noise_multiplier == one.optimizer.noise_multiplier == 0.25
    for made in (one, two):
        made.train(batches=2)
    assert [steps for _, _, steps in two.engine.accountant.history] == [12, 12, 2]
    assert two.engine.get_epsilon(1e-5) == one.engine.get_epsilon(1e-5) > 0


class Code:
    """What runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_checkpoint_runs_no_code_unless_the_caller_says_so(tmp_path):
    made = Made()
    made.engine.save_checkpoint(path=tmp_path / "c.pt", module=made.model)
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    torch.save({**state, "mine": Code(tmp_path / "ran")}, tmp_path / "bad.pt")
    with pytest.raises(
        ValueError, match=r"got other objects; a file that you trust .*\"weights_only\": False"
    ) as caught:
        made.engine.load_checkpoint(path=tmp_path / "bad.pt", module=made.model)
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()
    trusted = {"weights_only": False}
    made.engine.load_checkpoint(path=tmp_path / "bad.pt", module=made.model, torch_load_kwargs=trusted)
    assert (tmp_path / "ran").exists()


def test_a_checkpoint_of_opacus_is_gone_on_from_and_its_steps_count(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = opacus.PrivacyEngine()
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        model, optimizer, loader = theirs.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(DATA, batch_size=50),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        theirs.save_checkpoint(path=tmp_path / "a.pt", module=model, optimizer=optimizer)
    made = Made(noise_multiplier=1.5)
    made.engine.load_checkpoint(path=tmp_path / "a.pt", module=made.model, optimizer=made.optimizer)
    assert torch.equal(made.weights, torch.cat([p.detach().flatten() for p in model.parameters()]))
    made.train()
    assert made.engine.accountant.history == [(1.0, 1 / 12, 12), (1.5, 1 / 12, 12)]
    alone = load_accountant("prv").epsilon(SubsampledGaussian(1.0, 1 / 12), steps=12, delta=1e-5)
    assert made.engine.get_epsilon(1e-5) > alone
    with pytest.raises(Misuse, match="before the first"):
        made.engine.load_checkpoint(path=tmp_path / "a.pt", module=made.model)


def test_the_accountant_by_its_own_state():
    made = Made(accountant="rdp")
    made.train(batches=5)
    state = made.engine.accountant.state_dict()
    assert state["mechanism"] == "rdp" and state["history"] == [(1.0, 1 / 12, 5)] and len(made.engine.accountant) == 1
    epsilon, order = made.engine.accountant.get_privacy_spent(delta=1e-5)
    assert epsilon == made.engine.get_epsilon(1e-5) and order > 1
    later = PrivacyEngine(accountant="rdp")
    assert later.get_epsilon(1e-5) == 0 and later.accountant.history == []
    later.accountant.load_state_dict(state)
    assert later.accountant.history == [(1.0, 1 / 12, 5)]
    with pytest.raises(ValueError, match="accountant='prv', got one of 'rdp'"):
        PrivacyEngine().accountant.load_state_dict(state)
    with pytest.raises(ValueError, match="expected accountant to be "):
        PrivacyEngine(accountant="rpd")


def test_batches_that_are_not_sampled_are_accounted_as_what_they_are():
    """As Poisson samples they would cost less than half; a broken-off pass begins anew with the same records."""
    made = Made(poisson_sampling=False)
    for _ in range(3):
        made.train(batches=2)
    spent = made.engine.engine.privacy_spent(1e-5)
    assert (spent.sampling, spent.adjacency, spent.steps) == ("one_pass", "zero_out", 6)
    of_three = load_accountant("prv").epsilon(SubsampledGaussian(1.0, 1.0), steps=3, delta=1e-5)
    assert made.engine.get_epsilon(1e-5) == pytest.approx(of_three)
    assert made.engine.get_epsilon(1e-5) > 2 * load_accountant("prv").epsilon(
        SubsampledGaussian(1.0, 1 / 12), steps=6, delta=1e-5
    )


@pytest.mark.parametrize("secure", [True, False])
def test_noise_of_the_operating_system_or_of_a_generator(secure):
    made = Made(secure=secure)
    assert made.engine.engine.noise.private
    generator = torch.Generator().manual_seed(1)
    if secure:
        with pytest.raises(ValueError, match="secure or a generator"):
            Made(secure=True, noise_generator=generator)
        return
    with pytest.warns(PrivacyWarning, match="can be repeated"):
        seeded = Made(noise_generator=generator)
    seeded.train(batches=1)
    with pytest.warns(PrivacyWarning, match="NOT PRIVATE"):
        assert math.isfinite(seeded.engine.get_epsilon(1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seeded.engine.get_epsilon(1e-5)  # said once


def test_steps_beyond_those_that_the_noise_was_found_for_are_warned_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=300),
        target_epsilon=1.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
    )
    with pytest.warns(PrivacyWarning, match="step 3 is beyond the 2"):
        for _ in range(2):
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    with pytest.raises(Misuse, match="has spent"):
        engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=1.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
        )


def test_a_wrapper_stands_for_its_model():
    made = Made()
    assert isinstance(made.model, GradSampleModule)
    made.model.eval()
    assert not made.original.training
    made.model.train()
    assert made.original.training and next(iter(made.model.parameters())) is made.original[1].weight
