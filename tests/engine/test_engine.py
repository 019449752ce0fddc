"""The privacy engine: the step, the accumulated one, the noise, checkpoints, and that backends agree."""

import copy
import io
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from attached import attached, cross_entropy, parameters
from torch import nn

from clipping import Flat, load_backend
from dpbench.conformance.modules import Net
from dpbench.engine.release import release_gradients
from dpbench.engine.trace import Trace

BACKENDS = ["microbatch", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed", "bk_mixed:paper"]


def small_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10)
    )


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def loss_of(model, x, y):
    return cross_entropy(model(x), y)


def made(model=None, **changes):
    given = {"sample_size": 1000, "max_grad_norm": 0.5, "noise_multiplier": 0.0} | changes
    return attached(small_cnn() if model is None else model, **given)


def engine_of(model, **changes):
    return made(model, attach=False, **changes)[2]


@pytest.mark.parametrize(
    ("backend", "clip"), [*product(BACKENDS, ["flat"]), *product(["ghost", "bk_mixed"], ["automatic", "per_layer"])]
)
def test_without_noise_a_step_is_the_clipped_sum_over_the_expected_batch_size(backend, clip):
    model, (x, y) = small_cnn(), images(5)
    before = parameters(model)
    engine = engine_of(model, backend=backend, clip=clip)
    reference = load_backend("microbatch")(model, cross_entropy, clip=engine.clip)
    wanted = torch.cat([g.flatten() for g in reference(x, y).grads.values()]) / 8  # b, though 5 samples came
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    engine.attach(optimizer)
    optimizer.step(loss=loss_of(model, x, y))
    torch.testing.assert_close(before - parameters(model), 2 * wanted, rtol=1e-4, atol=1e-6)
    assert engine.steps == 1 and engine.stepped


def test_accumulated_parts_are_the_large_batch():
    ends = []
    for parts in ([8], [3, 1, 4], [0, 7, 1]):
        model, optimizer, engine = made(noise_multiplier=1.0, generator=torch.Generator().manual_seed(3))
        x, y = images(8)
        for i, (xs, ys) in enumerate(zip(x.split(parts), y.split(parts), strict=True)):
            take = optimizer.step if i == len(parts) - 1 else optimizer.virtual_step
            take(loss=loss_of(model, xs, ys))
            optimizer.zero_grad()  # what is accumulated is not in .grad
        assert engine.steps == 1
        ends.append(parameters(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-5, atol=1e-6)


def test_noise_has_the_deviation_that_is_accounted():
    """σ·C/b within 1 %, and it looks normal; the batch has no samples, and still moves the parameters and counts."""
    given = {"batch_size": 16, "max_grad_norm": 0.7, "noise_multiplier": 1.3}
    model, optimizer, engine = made(nn.Linear(400, 500, bias=False), **given)
    before = parameters(model)
    optimizer.step(loss=model(torch.zeros(0, 400)).sum(1))
    moved = (before - parameters(model)).double() / (1.3 * 0.7 / 16)
    assert moved.std().item() == pytest.approx(1, rel=0.01)
    assert abs(moved.mean().item()) < 4 / math.sqrt(moved.numel())
    assert (moved**4).mean().item() == pytest.approx(3, rel=0.05)
    assert (moved[1:] * moved[:-1]).mean().abs().item() < 4 / math.sqrt(moved.numel())
    assert engine.steps == 1 and engine.privacy_spent().epsilon > 0
    engine.empty_step()
    assert engine.steps == 2


@pytest.mark.parametrize(
    ("switches", "backend"), [((True, True), "mixed_ghost"), ((True, False), "ghost"), ((False, None), "fastgradclip")]
)
def test_a_loop_of_private_cnn_s_readme(switches, backend):
    """Its arguments, its Adam, and its accumulation, which steps at the first batch."""
    switches = dict(zip(("ghost_clipping", "mixed"), switches, strict=True))
    given = {"batch_size": 256, "sample_size": 50000, "epochs": 3, "noise_multiplier": None, "target_epsilon": 3}
    model, optimizer, engine = made(kind=torch.optim.Adam, lr=1e-4, **given, **switches)
    assert engine.backend == backend
    before, steps = parameters(model), []
    for i in range(3):
        loss = loss_of(model, *images(2))
        if i % 2 == 0:
            optimizer.step(loss=loss)
            optimizer.zero_grad()
        else:
            optimizer.virtual_step(loss=loss)
        steps.append(engine.steps)
    assert steps == [1, 1, 2] and not torch.equal(before, parameters(model))
    spent = engine.privacy_spent()
    assert 0 < spent.epsilon < 3 and (spent.steps, spent.sample_rate, spent.delta) == (2, 256 / 50000, 1e-5)


def run(steps, model, optimizer, engine, data):
    while engine.steps < steps:
        for x, y in engine.data_loader(data, max_physical_batch_size=6):
            optimizer.step(loss=loss_of(model, x, y))
            if engine.steps == steps and engine.stepped:
                break


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_resumed_training_is_the_uninterrupted_bit_for_bit(sampling, seeded):
    data = torch.utils.data.TensorDataset(*images(50))

    def fresh():
        generator = torch.Generator().manual_seed(5) if seeded else None
        settings = {"sample_size": 50, "noise_multiplier": 1.0, "sampling": sampling, "generator": generator}
        return made(kind=torch.optim.Adam, lr=1e-2, **settings)

    model, optimizer, engine = fresh()
    run(9, model, optimizer, engine, data)  # in the middle of an epoch of 7, or of 6
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), engine.state_dict()], file)
    run(17, model, optimizer, engine, data)
    file.seek(0)
    again, optimizer_again, engine_again = fresh()
    states = torch.load(file)
    for part, state in zip((again, optimizer_again), states[:2], strict=True):
        part.load_state_dict(state)
    engine_again.load_state_dict(states[2], replay=not seeded)
    run(17, again, optimizer_again, engine_again, data)
    assert torch.equal(parameters(again), parameters(model))
    assert engine_again.privacy_spent() == engine.privacy_spent() and engine.privacy_spent().steps == 17


def test_a_checkpoint_of_other_settings_is_refused():
    state = engine_of(small_cnn(), noise_multiplier=1.0).state_dict()
    with pytest.raises(ValueError, match=r"expected noise_multiplier=1.0 as in the checkpoint, got 0.5"):
        engine_of(small_cnn(), noise_multiplier=0.5).load_state_dict(state)
    target = {"noise_multiplier": None, "target_epsilon": 3.0, "epochs": 2}
    with pytest.raises(ValueError, match=r"noise_multiplier=1\.0 .*: give it in place of target_epsilon, whose noise"):
        engine_of(small_cnn(), **target).load_state_dict(state)
    for sizes in ((1, 2), (2, 1)):
        saved, mine = (engine_of(small_cnn(), group_size=size) for size in sizes)
        with pytest.raises(ValueError, match="expected group_size={} as in the checkpoint, got {}".format(*sizes)):
            mine.load_state_dict(saved.state_dict())
    del state["settings"]["group_size"], state["settings"]["bands"]  # an earlier version's
    engine_of(small_cnn(), noise_multiplier=1.0).load_state_dict(state)
    with pytest.raises(ValueError, match="same kind of noise"):
        engine_of(small_cnn(), noise_multiplier=1.0, generator=torch.Generator()).load_state_dict(state)


def test_a_scheduler_after_attaching_and_an_ordinary_step_after_detaching():
    (model, optimizer, engine), (x, y) = made(), images(4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        optimizer.step(loss=loss_of(model, x, y))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25 and engine.steps == 2
    engine.detach()
    loss_of(model, x, y).mean().backward()
    now = parameters(model)
    optimizer.step()
    assert not torch.equal(now, parameters(model)) and engine.steps == 2


def test_detaching_leaves_nothing():
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = engine_of(model)
    was = sorted(vars(optimizer)), sorted(vars(model)), [sorted(vars(p)) for p in model.parameters()]
    engine.attach(optimizer)
    x, y = images(4)
    optimizer.step(loss=loss_of(model, x, y))
    loss_of(model, x, y)
    assert not hasattr(x, "_depends_on_data")
    engine.detach()
    engine.detach()
    assert was == (sorted(vars(optimizer)), sorted(vars(model)), [sorted(vars(p)) for p in model.parameters()])
    assert not model._forward_hooks and not model._forward_pre_hooks
    engine.attach(optimizer)
    optimizer.step(loss=loss_of(model, x, y))
    assert engine.steps == 2


def test_evaluation_copies_and_failed_forward_passes_do_not_count():
    (x, y), ends = images(4), []
    for disturbed in (False, True):
        model, optimizer, _ = made()
        for _ in range(2):
            if disturbed:
                with pytest.raises(RuntimeError):
                    model(torch.randn(4, 3, 8, 8))
            losses = loss_of(model, x, y)
            if disturbed:
                with torch.no_grad():
                    model(x[:2])
                model.eval()
                model(x[:3])
                model.train()
                copy.deepcopy(model)(x[:1]).sum().backward()  # an average of the weights, say
                pickle.loads(pickle.dumps(model))(x[:1]).sum().backward()
            optimizer.step(loss=losses)
        ends.append(parameters(model))
    torch.testing.assert_close(ends[1], ends[0])


class Waits(nn.Module):
    """Evaluates itself in another thread in the middle of a forward pass."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, x):
        if torch.is_grad_enabled():
            with ThreadPoolExecutor(1) as other:
                other.submit(self.evaluated, x).result()
        return x

    def evaluated(self, x):
        with torch.no_grad():
            self.whole[0](x)


def test_an_evaluation_in_another_thread_does_not_count():
    ends, whole = [], []
    for kind in (nn.Identity, lambda: Waits(whole)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), kind(), nn.Linear(5, 3))
        whole[:] = [model]
        _, optimizer, _ = made(model)
        for _ in range(2):
            optimizer.step(loss=model(torch.ones(4, 5)).square().sum(1))
        ends.append(parameters(model))
    torch.testing.assert_close(*ends)


def test_a_loss_of_two_views_of_each_sample():
    model, (x, y) = small_cnn(), images(4)
    engine = engine_of(model, backend="bk_mixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss_fn(outputs, targets):
        return sum(cross_entropy(each, targets) for each in outputs)

    twice = Net(lambda net, x: (net.inner(x), net.inner(x.flip(-1))), inner=model)
    wanted = load_backend("microbatch")(twice, loss_fn, clip=Flat(0.5))(x, y).grads.values()
    before = parameters(model)
    engine.attach(optimizer)
    optimizer.step(loss=loss_of(model, x, y) + loss_of(model, x.flip(-1), y))
    wanted = torch.cat([g.flatten() for g in wanted]) / 8
    torch.testing.assert_close(before - parameters(model), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("again", [True, False])
def test_an_interrupted_forward_pass_leaves_nothing_behind(again):
    class Interrupted(nn.Module):
        on = False

        def forward(self, x):
            if self.on:
                raise KeyboardInterrupt
            return x

    interrupted = Interrupted()
    (model, optimizer, _), (x, y) = made(nn.Sequential(*small_cnn(), interrupted)), images(4)
    before = parameters(model)
    optimizer.step(loss=loss_of(model, x, y))
    wanted = parameters(model) - before
    torch.nn.utils.vector_to_parameters(before.clone(), model.parameters())
    interrupted.on = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    interrupted.on = False
    if not again:
        with pytest.raises(RuntimeError, match="none was run since the last step"):
            optimizer.step(loss=torch.zeros(4))
    optimizer.step(loss=loss_of(model, x, y))
    torch.testing.assert_close(parameters(model) - before, wanted)
    assert torch._C._len_torch_function_stack() == 0


def test_a_first_step_that_is_interrupted_as_it_is_recorded_may_be_taken_again(monkeypatch):
    def interrupted(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    (model, optimizer, engine), (x, y) = made(), images(4)
    monkeypatch.setattr(Trace, "passed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    optimizer.step(loss=loss_of(model, x, y))
    assert engine.steps == 1


def test_a_step_interrupted_between_noise_and_optimizer_counts_and_training_goes_on(monkeypatch):
    def interrupted(*given):
        monkeypatch.undo()
        release_gradients(*given)
        raise KeyboardInterrupt

    (model, optimizer, engine), (x, y) = made(), images(4)
    before = parameters(model)
    monkeypatch.setattr("dpbench.engine.engine.release_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(loss=loss_of(model, x, y))
    assert torch.equal(parameters(model), before) and engine.steps == 1
    optimizer.step(loss=loss_of(model, x, y))
    assert engine.steps == 2


@pytest.mark.parametrize("clip", ["flat", "automatic", "per_layer"])
def test_one_record_more_moves_the_sum_by_the_sensitivity_at_most(clip):
    """What the noise is scaled by; a mean over the realised batch, or clipping part by part, would not pass."""
    moved = []
    for samples in (slice(0, 6), slice(0, 7)):
        (model, optimizer, _), (x, y) = made(clip=clip, max_grad_norm=0.3), images(7)
        x[6] *= 50
        before = parameters(model)
        for xs, ys in zip(x[samples].split(2), y[samples].split(2), strict=True):
            optimizer.virtual_step(loss=1000 * loss_of(model, xs, ys))  # every gradient is above the threshold
        optimizer.step(loss=torch.zeros(0))
        moved.append(8 * (parameters(model) - before))
    difference = torch.linalg.vector_norm(moved[1] - moved[0]).item()
    assert 0.25 < difference <= 0.3 * (1 + 1e-5)
