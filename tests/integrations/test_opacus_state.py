"""What goes on between steps: schedulers of Opacus' classes, accountants, checkpoints, pieces of batches, hooks."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from opacus.schedulers import ExponentialNoise, LambdaGradClip, StepNoise
from opacus_made import ADAPTIVE, Made, digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accounting import SubsampledGaussian, load_accountant
from dpbench import AdamBC, Misuse, PrivacyWarning
from dpbench.integrations.opacus import DPOptimizer, GradSampleHooks, PrivacyEngine
from dpbench.integrations.opacus.outputs import Cut, _running

FIXED: dict[str, Any] = {"noise_multiplier": 0.0, "poisson_sampling": False}
DATA = TensorDataset(*(tensor[:600] for tensor in digits()))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def private(accountant: str = "prv", secure: bool = False, **others: Any) -> Made:
    """A linear model of the digits, made private."""
    return Made(
        linear(), DATA, batch_size=50, engine=PrivacyEngine(accountant=accountant, secure_mode=secure), **others
    )


def noise_of(made: Made) -> list[float]:
    """The deviation of the gradients of each step to come."""
    found: list[float] = []
    made.optimizer.attach_step_hook(lambda optimizer: found.append(float(made.gradients.std())))
    return found


def test_what_is_returned_has_opacus_names():
    made = private()
    assert isinstance(made.optimizer, torch.optim.Optimizer) and isinstance(made.loader, DataLoader)
    assert (
        isinstance(made.model, nn.Module) and made.model._module is made.net and getattr(made.model, "1") is made.net[1]
    )
    theirs = opacus.GradSampleModule(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    assert list(made.model.state_dict()) == list(theirs.state_dict())
    assert len(made.loader) == 12 and made.loader.dataset is DATA and made.loader.sample_rate == 1 / 12
    with pytest.raises(AttributeError, match="no setter"):
        made.optimizer.expected_batch_size = 100  # it would divide nothing
    made.model.set_grad_sample_to_none()
    assert made.optimizer.expected_batch_size == 50 and made.optimizer.accumulated_iterations == 1
    assert made.optimizer.original_optimizer.param_groups is made.optimizer.param_groups
    normed = nn.Sequential(nn.BatchNorm1d(4))
    assert made.engine.is_compatible(module=made.net) and not made.engine.is_compatible(module=normed)
    assert not any(isinstance(each, nn.BatchNorm1d) for each in PrivacyEngine.get_compatible_module(normed))


def test_a_model_that_is_not_wrapped_is_used_as_it_is_and_cleaned_up():
    made = private(wrap_model=False)
    made.train(batches=3)
    assert isinstance(made.model, GradSampleHooks) and made.steps == 3
    made.model.cleanup()
    made.model.cleanup()
    assert not made.net._forward_hooks and not made.net._forward_pre_hooks
    x, y = DATA[:4]
    nn.functional.cross_entropy(made.net(x), y).backward()
    made.optimizer.original_optimizer.step()
    assert made.steps == 3


def test_to_standard_module_leaves_an_ordinary_model():
    made = private().train(batches=2)
    assert made.model.to_standard_module() is made.net and not made.net._forward_hooks
    Made(made.net, DATA, batch_size=50)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.filterwarnings("ignore::dpbench.PrivacyWarning")
def test_a_batch_in_pieces_gives_the_same_step(mode, poisson):
    def made() -> Made:
        generator = torch.Generator().manual_seed(7)
        return private(noise_multiplier=0.5, poisson_sampling=poisson, grad_sample_mode=mode, noise_generator=generator)

    whole, split, sizes = made().train(), made(), []
    with split.pieces(16) as pieces:
        assert len(list(zip(range(3), pieces, strict=False))) == 3
        split.train(loader=((sizes.append(len(x)) or x, y) for x, y in pieces))
    assert max(sizes) == 16 and len(sizes) > 30
    assert whole.steps == split.steps == 12
    assert whole.engine.accountant.history == split.engine.accountant.history
    assert torch.allclose(whole.weights, split.weights, atol=1e-6)


def test_half_a_batch_that_is_left_out_is_in_no_other_sum():
    made = private(**FIXED, max_grad_norm=1e-3)
    with made.pieces(30) as pieces:
        made.train(loader=pieces, batches=1)
        assert made.engine.engine._sums
        before = made.weights
        made.train(loader=pieces, batches=2)
    assert made.steps == 1
    moved = (made.weights - before).norm() / 0.1 * 50
    assert float(moved) <= 50 * 1e-3 * 1.001


def test_noise_of_a_scheduler_is_the_noise_that_is_drawn_and_accounted():
    made = private()
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
    made = private(max_grad_norm=1e-6)
    deviations, scheduler = noise_of(made), StepNoise(made.optimizer, step_size=1, gamma=100.0)
    for _ in range(2):
        made.train(batches=1)
        scheduler.step()
    assert deviations == pytest.approx([1e-6 / 50, 1e-4 / 50], rel=0.2)


def test_the_norm_of_a_scheduler_clips_and_scales_the_noise():
    made = private(noise_multiplier=0.0)
    scheduler = LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 1e-3**epoch)
    scheduler.step()
    before = made.weights
    made.train(batches=1)
    assert float((made.weights - before).norm()) <= 0.1 * 100 / 50 * 1e-3
    assert made.optimizer.max_grad_norm == pytest.approx(1e-3)
    assert made.engine.engine.sensitivity.bound == pytest.approx(1e-3, rel=1e-2)
    assert made.engine.accountant.history == [(0.0, 1 / 12, 1)]


def test_noise_that_changes_has_no_ε_by_an_estimate():
    made = private(accountant="gdp")
    with pytest.raises(ValueError, match="expected one noise_multiplier throughout with accountant='gdp'"):
        made.optimizer.noise_multiplier = 0.5


def test_noise_that_changes_between_the_pieces_of_a_batch_is_that_of_its_release():
    made = private(max_grad_norm=1e-6)
    deviations = noise_of(made)

    def louder(pieces: Any) -> Any:
        for piece in pieces:
            yield piece
            made.optimizer.noise_multiplier = 100.0

    with made.pieces(10) as pieces:
        made.train(loader=louder(pieces), batches=12)
    assert deviations == pytest.approx([100 * 1e-6 / 50] * made.steps, rel=0.2)
    assert made.engine.accountant.history == [(100.0, 1 / 12, made.steps)] and made.steps


def test_a_norm_and_what_it_depends_on_cannot_change_between_the_pieces_of_a_batch():
    made = private(**ADAPTIVE)
    with made.pieces(10) as pieces:
        made.train(loader=pieces, batches=1)
    before = made.engine.engine.sensitivity.bound
    for name in ("max_grad_norm", "noise_multiplier"):
        with pytest.raises(Misuse, match="between logical batches"):
            setattr(made.optimizer, name, 2.0)
    assert made.optimizer.max_grad_norm == made.optimizer.noise_multiplier == 1.0
    assert made.engine.engine.sensitivity.bound == before


def test_a_step_hook_sees_the_noisy_gradients_and_takes_nothing_from_the_accounting():
    made = private()
    seen = []
    before = made.weights

    def hook(optimizer: DPOptimizer) -> None:
        assert torch.equal(made.weights, before)
        seen.append(float(optimizer.params[0].grad.norm()))

    made.optimizer.attach_step_hook(hook)
    made.train(batches=1)
    assert len(seen) == 1 and seen[0] > 0 and made.engine.accountant.history == [(1.0, 1 / 12, 1)]


def test_schedulers_of_the_learning_rate():
    made = private()
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.5)
    made.train(batches=1)
    scheduler.step()
    assert made.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.train(batches=1)
        scheduler.step()


def test_losses_that_are_summed_are_not_divided():
    mean, whole = private(**FIXED), private(**FIXED, loss_reduction="sum")
    before = mean.weights
    for made in (mean, whole):
        made.train(batches=1)
    assert torch.allclose(50 * (mean.weights - before), whole.weights - before, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clipping", [{}, {**ADAPTIVE, "unclipped_num_std": 80.0}], ids=["flat", "adaptive"])
def test_the_bias_correction_of_adam_knows_noise_and_thresholds_that_change(reduction, clipping):
    made = private(optimizer=partial(AdamBC, lr=0.1), loss_reduction=reduction, noise_multiplier=40.0, **clipping)
    schedulers = [ExponentialNoise(made.optimizer, gamma=0.8)]
    if not clipping:
        schedulers.append(LambdaGradClip(made.optimizer, scheduler_function=lambda epoch: 1 / (1 + epoch)))
    told = []
    made.optimizer.attach_step_hook(
        lambda optimizer: told.append((made.gradients.std(), optimizer.original_optimizer.noise))
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
    one = private()
    one.train()
    one.save(tmp_path / "a.pt", optimizer=one.optimizer, checkpoint_dict={"epoch": 3})
    two = private()
    held = two.load(tmp_path / "a.pt", optimizer=two.optimizer)
    assert held["epoch"] == 3 and torch.equal(one.weights, two.weights)
    assert two.engine.accountant.history == [(1.0, 1 / 12, 12)]
    two.train()
    one.train()
    assert two.engine.accountant.history == one.engine.accountant.history == [(1.0, 1 / 12, 24)]
    assert two.engine.get_epsilon(1e-5) == one.engine.get_epsilon(1e-5)
    assert not torch.equal(one.weights, two.weights)  # no noise is drawn twice
    with pytest.raises(ValueError, match="noise_multiplier"):
        private(noise_multiplier=2.0).engine.load_checkpoint(path=tmp_path / "a.pt", module=one.model)


def test_checkpoints_with_schedulers(tmp_path):
    one = private()
    noise = ExponentialNoise(one.optimizer, gamma=0.5)
    norm = LambdaGradClip(one.optimizer, scheduler_function=lambda epoch: 1 / (1 + epoch))
    for _ in range(2):
        one.train()
        noise.step(), norm.step()
    one.save(tmp_path / "a.pt", optimizer=one.optimizer, noise_scheduler=noise)

    def loaded(two: Made) -> Made:
        noise = ExponentialNoise(two.optimizer, gamma=0.5)
        two.load(tmp_path / "a.pt", optimizer=two.optimizer, noise_scheduler=noise)
        return two

    with pytest.raises(ValueError, match="sensitivity"):
        loaded(private())
    two = loaded(private(max_grad_norm=1 / 3))
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
    made = private()
    made.save(tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    torch.save({**state, "mine": Code(tmp_path / "ran")}, tmp_path / "bad.pt")
    with pytest.raises(
        ValueError, match=r"got other objects; a file that you trust .*\"weights_only\": False"
    ) as caught:
        made.load(tmp_path / "bad.pt")
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()
    made.load(tmp_path / "bad.pt", torch_load_kwargs={"weights_only": False})
    assert (tmp_path / "ran").exists()


def test_a_checkpoint_of_opacus_is_gone_on_from_and_its_steps_count(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = Made(linear(), DATA, batch_size=50, engine=opacus.PrivacyEngine()).train()
        theirs.save(tmp_path / "a.pt", optimizer=theirs.optimizer)
    made = private(noise_multiplier=1.5)
    made.load(tmp_path / "a.pt", optimizer=made.optimizer)
    assert torch.equal(made.weights, theirs.weights)
    made.train()
    assert made.engine.accountant.history == [(1.0, 1 / 12, 12), (1.5, 1 / 12, 12)]
    alone = load_accountant("prv").epsilon(SubsampledGaussian(1.0, 1 / 12), steps=12, delta=1e-5)
    assert made.engine.get_epsilon(1e-5) > alone
    with pytest.raises(Misuse, match="before the first"):
        made.load(tmp_path / "a.pt")


def test_the_accountant_by_its_own_state():
    made = private(accountant="rdp")
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


@pytest.mark.parametrize("poisson", [True, False])
def test_an_accountant_s_state_keeps_how_batches_were_drawn_and_passes_that_were_broken_off(poisson):
    """By steps alone, as Poisson samples, three passes that end after two batches would cost a tenth."""
    one = private(poisson_sampling=False)
    for _ in range(3):
        one.train(batches=2)
    two, state = PrivacyEngine(), one.engine.accountant.state_dict()
    two.accountant.load_state_dict(state)
    later = Made(linear(), DATA, batch_size=50, engine=two, poisson_sampling=poisson)
    assert later.engine.get_epsilon(1e-5) == one.engine.get_epsilon(1e-5)
    later.train(batches=1)
    assert later.engine.get_epsilon(1e-5) > one.engine.get_epsilon(1e-5)
    history, steps = two.accountant.history, later.steps
    two.accountant.load_state_dict(state)  # again
    assert (two.accountant.history, later.steps) == (history, steps)


def test_a_checkpoint_keeps_how_the_batches_of_an_earlier_training_were_drawn(tmp_path):
    one, two = private(poisson_sampling=False), PrivacyEngine()
    one.train()
    two.accountant.load_state_dict(one.engine.accountant.state_dict())
    then, last = Made(linear(), DATA, batch_size=50, engine=two), private()
    then.save(tmp_path / "a.pt")
    last.load(tmp_path / "a.pt")
    assert last.engine.get_epsilon(1e-5) == one.engine.get_epsilon(1e-5)
    last.engine.accountant.load_state_dict(torch.load(tmp_path / "a.pt")["privacy_accountant_state_dict"])
    assert last.engine.accountant.history == two.accountant.history


def test_two_equal_trainings_are_two():
    one, two = private(), private()
    one.train(), two.train()
    assert one.engine.accountant.history == two.engine.accountant.history
    with pytest.raises(Misuse, match="before the first"):
        two.engine.accountant.load_state_dict(one.engine.accountant.state_dict())


def test_steps_on_one_batch_are_passes():
    """In a pass of two batches of twelve a record is in three steps, in the next one in two."""
    made = private(poisson_sampling=False)
    for uses in ((3, 1), (1, 2)):
        for (x, y), steps in zip(made.loader, uses, strict=False):
            made.train(loader=[(x, y)] * steps)
    of_five = load_accountant("prv").epsilon(SubsampledGaussian(1.0, 1.0), steps=5, delta=1e-5)
    assert made.steps == 7 and made.engine.get_epsilon(1e-5) == pytest.approx(of_five)


def test_iterations_that_take_turns_may_use_a_record_each():
    made = private(poisson_sampling=False, data_loader=DataLoader(DATA, batch_size=50, shuffle=True))
    for batch, other in islice(zip(made.loader, made.loader, strict=True), 3):
        made.train(loader=[other if made.steps == 1 else batch])
    of_three = load_accountant("prv").epsilon(SubsampledGaussian(1.0, 1.0), steps=3, delta=1e-5)
    assert made.engine.get_epsilon(1e-5) == pytest.approx(of_three)


def test_noise_that_changes_keeps_the_passes_that_were_broken_off():
    made = private(poisson_sampling=False)
    for _ in range(3):
        made.train(batches=1)
    spent, made.optimizer.noise_multiplier = made.engine.get_epsilon(1e-5), 100.0
    made.train(batches=1)
    assert made.engine.get_epsilon(1e-5) > spent


def test_batches_that_are_not_sampled_are_accounted_as_what_they_are():
    """As Poisson samples they would cost less than half; a broken-off pass begins anew with the same records."""
    made = private(poisson_sampling=False)
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
    made = private(secure=secure)
    assert made.engine.engine.noise.private
    generator = torch.Generator().manual_seed(1)
    if secure:
        with pytest.raises(ValueError, match="secure or a generator"):
            private(secure=True, noise_generator=generator)
        return
    with pytest.warns(PrivacyWarning, match="can be repeated"):
        seeded = private(noise_generator=generator)
    seeded.train(batches=1)
    with pytest.warns(PrivacyWarning, match="NOT PRIVATE"):
        assert math.isfinite(seeded.engine.get_epsilon(1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seeded.engine.get_epsilon(1e-5)  # said once


def test_the_noise_for_an_epsilon_and_steps_beyond_those_that_it_was_found_for():
    target = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2}
    made = private(**target)
    sigma = opacus.accountants.utils.get_noise_multiplier(**target, sample_rate=1 / 12, accountant="prv")
    assert made.optimizer.noise_multiplier == pytest.approx(sigma, rel=0.01)
    made.train().train()
    assert made.steps == 24 and 2.95 < made.engine.get_epsilon(1e-5) <= 3.0
    with pytest.warns(PrivacyWarning, match="step 25 is beyond the 24"):
        made.train(batches=1)
    with pytest.raises(Misuse, match="has spent"):
        Made(linear(), DATA, batch_size=50, engine=made.engine, **target)


def test_a_wrapper_stands_for_its_model():
    made = private()
    made.model.eval()
    assert not made.net.training
    made.model.train()
    assert made.net.training and next(iter(made.model.parameters())) is made.net[1].weight


def test_a_backward_pass_is_known_in_another_thread():
    """On a GPU autograd calls hooks in a thread of its own."""
    cut, other, found = Cut(2, lambda nodes: None), Cut(2, lambda nodes: None), []
    with ThreadPoolExecutor(1) as pool:

        def arrived(gradient: torch.Tensor) -> None:
            found.extend(pool.submit(_running, each.anchors).result() for each in (cut, other))

        y = cut.take(torch.ones(2, 3, requires_grad=True))
        y.register_hook(arrived)
        y.exp().sum().backward()
    assert [name.partition("Backward")[0] for name in found[0][:2]] == ["Sum", "Exp"] and found[1] == ()
