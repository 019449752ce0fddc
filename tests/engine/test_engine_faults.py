"""What would break the guarantee without a sound: failures half-way, checkpoints, infinities, batches of others."""

import collections
import copy
import dataclasses
import itertools
import warnings

import numpy as np
import pytest
import torch
from attached import attached, batch, cross_entropy, data, parameters, says, small
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from clipping import Automatic, Flat, GlobalBound, PerLayer, UnsupportedModel
from dpbench import AdamBC, Misuse, PrivacyWarning
from dpbench.engine import adjust
from dpbench.engine.sampling import Sizes
from dpbench.engine.settings import require_sensitivity


def make(model=None, **changes):
    """(model, optimizer, engine); the noise is the default one unless the changes say otherwise."""
    found = attached(model, **{"batch_size": 16, "epochs": 4} | changes)
    if found[2].backend == "bk_mixed":
        found[2]._recorder.backend.planner.timing = False  # sums of two engines are to have the same bits
    return found


def losses_of(model, count=16, seed=0):
    x, y = batch(count, seed)
    return cross_entropy(model(x), y)


@pytest.mark.parametrize("at", range(3))
def test_a_piece_that_fails_between_additions_can_be_tried_again(monkeypatch, at):
    def sums(fail):
        model, optimizer, engine = make()
        optimizer.virtual_step(loss=losses_of(model, seed=1))
        if fail:
            real, calls = Tensor.add_, []

            def add(self, other, **options):
                calls.append(self)
                if len(calls) == at + 1:
                    raise torch.OutOfMemoryError("out of memory, as it seems")
                return real(self, other, **options)

            losses = losses_of(model, seed=2)
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(Tensor, "add_", add)
                optimizer.virtual_step(loss=losses)
        optimizer.virtual_step(loss=losses_of(model, seed=2))
        assert engine._size == 32
        return engine._sums

    wanted, found = sums(False), sums(True)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_record_that_is_not_a_number_is_named_and_the_model_is_not_blamed():
    model, optimizer, engine = make()
    losses = losses_of(model)
    weights = torch.ones(16)
    weights[[3, 7]] = torch.tensor([float("nan"), float("inf")])
    with pytest.raises(FloatingPointError, match="got NaN or inf for samples 3, 7 of the batch of 16"):
        optimizer.step(loss=losses * weights)
    optimizer.step(loss=losses_of(model))
    assert engine.steps == 1


def states(*parts):
    return copy.deepcopy([part.state_dict() for part in parts])


def load(state, *parts):
    for part, own in zip(parts, state, strict=True):
        part.load_state_dict(own)


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_a_loader_made_before_the_checkpoint_was_loaded_goes_on_with_its_key(sampling):
    def used(model, optimizer, loader, most):
        found = []
        for x, y in itertools.islice(loader, most):
            optimizer.step(loss=cross_entropy(model(x), y))
            found.append(x)
        return torch.cat(found)

    model, optimizer, engine = first = make(sampling=sampling)
    used(model, optimizer, engine.data_loader(data()), 2)
    saved = states(*first)
    wanted = used(model, optimizer, engine.data_loader(data()), None)
    model, optimizer, engine = second = make(sampling=sampling)
    loader = engine.data_loader(data())
    load(saved, *second)
    assert torch.equal(used(model, optimizer, loader, None), wanted)


def test_to_go_back_does_not_lower_epsilon():
    model, optimizer, engine = make()
    for _ in range(2):
        optimizer.step(loss=losses_of(model))
    saved = states(model, optimizer, engine)
    for _ in range(3):
        optimizer.step(loss=losses_of(model))
    before = engine.privacy_spent()
    for again in range(3):
        load(saved, model, optimizer, engine)
        assert engine.steps == 2
        assert engine.privacy_spent().steps == before.steps + again == 5 + again
        optimizer.step(loss=losses_of(model))
    assert engine.privacy_spent().epsilon > before.epsilon
    # of a new process all that was counted is counted
    later = states(model, optimizer, engine)
    other = make()
    load(later, *other)
    assert other[2].steps == 3 and other[2].privacy_spent() == engine.privacy_spent()
    # and of another training beside it, both
    load(states(*make()), model, optimizer, engine)
    assert engine.privacy_spent().steps == other[2].privacy_spent().steps


def test_the_steps_of_an_engine_that_was_on_the_model_before_are_told_of():
    model, optimizer, engine = make()
    for _ in range(3):
        optimizer.step(loss=losses_of(model))
    saved = copy.deepcopy(engine.state_dict())
    engine.detach()
    _, _, other = make(model, attach=False)
    with pytest.warns(PrivacyWarning, match="3 steps of another engine on this model are not counted"):
        other.attach(optimizer)
    said = "3 steps of another engine on this model are not counted"
    assert said in other.privacy_spent().caveats
    other.load_state_dict(saved)  # from where they are counted
    assert said not in other.privacy_spent().caveats and other.privacy_spent().steps == 3
    other.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.attach(optimizer)  # its own are counted
        make()


def test_steps_on_a_part_of_the_model_or_under_another_wrapper_are_told_of():
    body, head = torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)
    for parts, told in (([head], 0), ([body, head], 1), ([body, head], 2), ([body], 2), ([torch.nn.Linear(5, 3)], 0)):
        model, optimizer, engine = make(torch.nn.Sequential(*parts), attach=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.attach(optimizer)
        optimizer.step(loss=model(torch.randn(6, parts[0].in_features)).square().sum(1))
        said = [caveat for caveat in engine.privacy_spent().caveats if "of another engine" in caveat]
        assert said == ([f"{told} steps of another engine on this model are not counted"] if told else [])
        engine.detach()


def test_the_steps_after_a_checkpoint_that_another_engine_goes_on_from_are_told_of():
    model, optimizer, engine = make()
    for step in range(3):
        if step == 1:
            saved = copy.deepcopy(engine.state_dict())
        optimizer.step(loss=losses_of(model))
    engine.detach()
    _, _, other = make(model, attach=False)
    other.load_state_dict(saved)
    with pytest.warns(PrivacyWarning, match="2 steps of another engine on this model are not counted"):
        other.attach(optimizer)


def test_sizes_that_no_poisson_sampling_has_are_not_believed():
    def verdict(sizes, sample_size, batch_size):
        seen = Sizes(sample_size, batch_size)
        return next(filter(None, map(seen.add, sizes)), None)

    shuffled = [128] * 7 + [104]
    assert "128 samples" in verdict(shuffled * 3, 1000, 128)
    assert "128 samples on average where 64 are expected" in verdict([128] * 100, 10_000, 64)
    assert "exactly 64 samples" in verdict([64] * 100, 10_000, 60)
    numbers = np.random.default_rng(0)
    assert "on average where 64 are expected" in verdict(numbers.binomial(10_000, 0.0128, 50).tolist(), 10_000, 64)
    assert verdict([1000] * 100, 1000, 1000) is None  # every batch is the whole of the data


@pytest.mark.parametrize(("sample_size", "batch_size"), [(20, 1), (64, 16), (1000, 128), (60_000, 256), (100, 99)])
def test_poisson_sizes_are_believed(sample_size, batch_size):
    numbers = np.random.default_rng(sample_size)
    for _ in range(20):
        seen = Sizes(sample_size, batch_size)
        sizes = numbers.binomial(sample_size, batch_size / sample_size, 300)
        assert not any(map(seen.add, sizes.tolist()))


def test_a_gradient_left_on_a_frozen_parameter_is_not_applied():
    model = small()
    losses_of(model).mean().backward()  # of private data, and never stepped
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    model, optimizer, _ = make(model)
    optimizer.step(loss=losses_of(model))
    assert torch.equal(model[0].weight, frozen) and model[0].weight.grad is None


class Longer(Flat):
    """Says C and leaves gradients as they are."""

    def factors(self, norms):
        return torch.ones_like(norms)


class Apart(Flat):
    """Says C and gives each layer all of it."""

    per_layer = True


@pytest.mark.parametrize("kind", [Longer, Apart])
def test_a_clipping_function_that_does_not_keep_to_its_sensitivity_is_refused(kind):
    with pytest.raises(ValueError, match="to keep to its sensitivity 1, got a clipped gradient of norm"):
        make(clip=kind(max_grad_norm=1.0))


def test_those_of_ours_keep_to_theirs():
    for bound in [1e-3, 1.0, 1e4]:
        for stabiliser in [0.0, 0.01]:
            for kind in [Flat, Automatic, PerLayer]:
                require_sensitivity(kind(max_grad_norm=bound, stabiliser=stabiliser))
                require_sensitivity(GlobalBound(max_grad_norm=bound, bound=3 * bound))
                require_sensitivity(Flat(max_grad_norm=0.0))


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor


Named = collections.namedtuple("Named", "x y")
CONTAINERS = {
    "UserDict": (lambda x, y: collections.UserDict(x=x, y=y), lambda batch: (batch["x"], batch["y"])),
    "dataclass": (Batch, lambda batch: (batch.x, batch.y)),
    "namedtuple": (Named, lambda batch: (batch.x, batch.y)),
    "nested": (lambda x, y: {"inner": [{"x": x, "words": "kept"}], "y": y}, lambda b: (b["inner"][0]["x"], b["y"])),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_batch_of_no_records_is_of_the_kind_of_the_others(container):
    pack, unpack = CONTAINERS[container]
    model, optimizer, engine = make(batch_size=1)
    empty = 0
    for each in engine.data_loader(data(), collate_fn=lambda rows: pack(*default_collate(rows))):
        x, y = unpack(each)
        empty += len(x) == len(y) == 0
        optimizer.step(loss=cross_entropy(model(x), y))
    assert empty and engine.steps == 64


@pytest.mark.parametrize("sampling", ["one_pass", "shuffled"])
def test_fixed_batches_are_not_said_to_be_proved_for_a_record_that_is_removed(sampling):
    _, _, engine = make(sampling=sampling)
    said = str(engine.privacy_spent())
    assert "making one record's gradient zero" in said and engine.privacy_spent().adjacency == "zero_out"
    assert "adding or removing" not in said
    spent = make()[2].privacy_spent()
    assert "adding or removing one record" in str(spent)
    assert str(dataclasses.replace(spent, epsilon=1.00001)).startswith("ε = 1.001 at")  # a bound is rounded up


@pytest.mark.parametrize("sampling", ["one_pass", "shuffled", "balls_and_bins"])
def test_more_noise_later_is_not_that_of_batches_skipped_before(sampling):
    """ε never falls: passes whose other batches were skipped have the noise of their steps."""
    model, optimizer, engine = make(sampling=sampling)
    for _ in range(3):
        for x, y in itertools.islice(engine.data_loader(data()), 0, None, 5):
            optimizer.step(loss=cross_entropy(model(x), y))
    before, steps = engine.privacy_spent().epsilon, engine.steps
    adjust.set_noise_multiplier(engine, 100.0)
    for x, y in itertools.islice(engine.data_loader(data()), 1):
        optimizer.step(loss=cross_entropy(model(x), y))
    assert engine.steps == steps + 1 and before <= engine.privacy_spent().epsilon


def test_parts_of_a_batch_whose_step_failed_are_not_in_the_next():
    """A record of both would move the sum by 2C, where the noise covers C."""
    ends = []
    for failing in (True, False):
        model, optimizer, engine = make(noise_multiplier=0.0)
        if failing:
            optimizer.virtual_step(loss=losses_of(model, seed=1))
            with says(Misuse, "got a scalar"):
                optimizer.step(loss=losses_of(model, seed=2).mean())
            assert engine.steps == 0
        optimizer.step(loss=losses_of(model, seed=3))
        assert engine.steps == 1
        ends.append(parameters(model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)  # the one left out shows in the order of operations alone


def test_noise_that_fails_leaves_no_sum_behind(monkeypatch):
    model, optimizer, engine = make()
    add = engine.noise.add_to_flat

    def failing(*given, **others):
        add(*given, **others)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.noise, "add_to_flat", failing)
    before = parameters(model)
    optimizer.virtual_step(loss=losses_of(model, seed=1))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(loss=losses_of(model))
    assert torch.equal(before, parameters(model))
    assert engine.steps == 1 and not engine._sums  # its places are taken: the noise may have been seen
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("backend", "value"), [("bk_mixed", float("inf")), ("microbatch", float("nan"))])
def test_a_gradient_that_is_not_finite_is_not_released(backend, value):
    """The same record would make every parameter NaN, whatever the noise: its presence is plain to see."""
    model, optimizer, engine = make(backend=backend)
    optimizer.step(loss=losses_of(model))
    before = parameters(model)
    optimizer.virtual_step(loss=losses_of(model, seed=5))
    x = torch.randn(3, 5)
    x[1] = value
    with says(FloatingPointError, r"expected finite gradients, got NaN or inf in '[02]\.(weight|bias)'"):
        optimizer.step(loss=model(x).square().sum(1))
    assert torch.equal(before, parameters(model)) and engine.steps == 1
    optimizer.step(loss=losses_of(model, seed=6))
    assert torch.isfinite(parameters(model)).all() and engine.steps == 2


@pytest.mark.parametrize("kind", [torch.optim.Adam, AdamBC])
def test_torch_distributed_checkpoint_loads_into_an_attached_optimizer(kind):
    """It steps an optimizer without a state, on gradients of zero; whole states need the same keys in its groups."""

    def fresh():
        model, _, engine = make(attach=False)
        optimizer = kind(model.parameters(), lr=0.1)
        engine.attach(optimizer)
        return model, optimizer, engine

    whole = StateDictOptions(full_state_dict=True)
    model, optimizer, engine = fresh()
    start = [p.detach().clone() for p in model.parameters()]
    get_state_dict(model, optimizer, options=whole)
    assert engine.steps == 0 and all(map(torch.equal, start, model.parameters()))
    optimizer.step(loss=losses_of(model))
    saved = copy.deepcopy([*get_state_dict(model, optimizer, options=whole), engine.state_dict()])
    other = fresh()
    set_state_dict(*other[:2], model_state_dict=saved[0], optim_state_dict=saved[1], options=whole)
    other[2].load_state_dict(saved[2], replay=True)
    engine.load_state_dict(saved[2], replay=True)
    for each, steps in ((model, optimizer), other[:2]):
        steps.step(loss=losses_of(each))
    assert all(map(torch.equal, model.parameters(), other[0].parameters()))


def test_training_resumed_without_the_engine_s_state_is_refused():
    model, optimizer, engine = make(kind=torch.optim.Adam)
    for seed in range(3):
        optimizer.step(loss=losses_of(model, seed=seed))
    saved = states(model, optimizer, engine)
    spent = engine.privacy_spent().epsilon
    model, optimizer, engine = make(kind=torch.optim.Adam)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    message = "expected engine and optimizer of one checkpoint, got the optimizer of step 3 where the engine counts 0"
    for refused in (lambda: optimizer.step(loss=losses_of(model)), engine.privacy_spent, engine.empty_step):
        with says(Misuse, message):
            refused()
    engine.load_state_dict(saved[2])
    optimizer.step(loss=losses_of(model))
    assert engine.steps == 4 and engine.privacy_spent().epsilon > spent
    engine.detach()
    assert "privacy_steps" not in optimizer.param_groups[0]


def test_half_a_logical_batch_of_another_process_is_refused():
    model, optimizer, engine = make()
    optimizer.virtual_step(loss=losses_of(model))
    state = engine.state_dict()
    assert state["place"] == [0, 1]
    with says(ValueError, "of process 0 of 1 in the middle of a logical batch, got that of 1 of 2"):
        engine.load_state_dict(state | {"place": [1, 2]})
    engine.load_state_dict(state)
    optimizer.step(loss=losses_of(model))
    engine.load_state_dict(engine.state_dict() | {"place": [1, 2]})  # of nothing, any process's will do


def test_half_a_logical_batch_of_another_model_is_refused():
    model, optimizer, engine = make()
    optimizer.virtual_step(loss=losses_of(model))
    state = engine.state_dict()
    for other, said in (([5, 9, 3], r"'0.weight' of shape \[8, 5\] for \[9, 5\]"), ([5, 8], "'2.weight' .*no such")):
        layers = [layer for sizes in itertools.pairwise(other) for layer in (nn.Linear(*sizes), nn.Tanh())]
        with says(ValueError, f"a checkpoint of this model in the middle of a logical batch, got one with {said}"):
            make(nn.Sequential(*layers))[2].load_state_dict(state)


class Scheduled:
    """Clips to a norm that may be changed."""

    per_layer, rate = False, 1.0

    def __init__(self, norm):
        self.sensitivity = norm

    def factors(self, norms):
        factors = (self.sensitivity / norms).clamp(max=1)
        self.sensitivity *= self.rate
        return factors


def test_a_clipping_norm_that_changes_within_a_logical_batch_is_refused():
    """The noise is scaled to one sensitivity, so that a sum clipped to a larger one would have too little."""
    clip = Scheduled(1.0)
    model, optimizer, engine = make(clip=clip, noise_multiplier=0.5)
    optimizer.virtual_step(loss=losses_of(model))
    clip.sensitivity = 0.1
    message = "expected a clipping function of one sensitivity in all of a logical batch, got {} after 1:"
    for call in (lambda: optimizer.virtual_step(loss=losses_of(model, seed=1)), engine.state_dict, engine.empty_step):
        with says(Misuse, message.format(0.1)):
            call()
    optimizer.step(loss=losses_of(model))  # of a logical batch of its own
    clip.sensitivity, clip.rate = 1.0, 0.5
    with says(Misuse, message.format(".*")):
        optimizer.step(loss=losses_of(model))
    assert engine.steps == 1
    with pytest.raises(AttributeError):  # would not be the backend's
        engine.clip = Flat(max_grad_norm=0.1)


def test_running_statistics_of_an_instance_norm_are_refused():
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True))
    with says(UnsupportedModel, "1: InstanceNorm with running statistics.*track_running_stats=False"):
        make(model)
    make(model.eval())  # frozen
    make(nn.Sequential(nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, affine=True)))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_grad_scaler_is_refused(kind):
    model, optimizer, engine = make(kind=kind)
    own = sorted(vars(optimizer))
    scaler = torch.amp.GradScaler("cpu")
    losses = scaler.scale(losses_of(model))
    with says(Misuse, "expected no GradScaler.*bfloat16 needs no scaling"):
        scaler.step(optimizer, loss=losses)
    assert own == sorted(vars(optimizer)) and engine.steps == 0
    optimizer.step(loss=losses_of(model))
    engine.detach()
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


class Sharpness(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "it requires a closure"


class Extragradient(torch.optim.SGD):
    def step(self, closure=None):
        closure()


class Wrong(torch.optim.SGD):
    def step(self, closure=None):
        raise ValueError("of its own")


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness, Extragradient])
def test_an_optimizer_of_several_gradients_a_step_is_refused(kind):
    """When it is attached, if `step` has no default; else by its error in the first step."""
    model = nn.Linear(5, 3)
    _, _, engine = make(model, attach=False)
    optimizer = kind(model.parameters())
    with says(Misuse, f"expected an optimizer of one gradient a step, got {kind.__name__}, .* several by a closure"):
        engine.attach(optimizer)
        optimizer.step(loss=losses_of(model))
    engine.detach()


def test_another_error_of_an_optimizer_is_its_own():
    model, optimizer, engine = make(kind=Wrong)
    with pytest.raises(ValueError, match="of its own"):
        optimizer.step(loss=losses_of(model))
    engine.detach()


class Counts(nn.Linear):
    def __init__(self, name):
        super().__init__(5, 3)
        self.name = name
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("rebound", torch.zeros(5))

    def forward(self, x):
        if self.name:
            self.seen.lerp_(x.mean(0), 0.1) if self.name == "seen" else setattr(self, self.name, x.mean(0))
        return super().forward(x)


@pytest.mark.parametrize("name", ["seen", "rebound", ""])
def test_a_sharded_model_that_writes_to_a_buffer_is_told_once(name, tmp_path, recwarn):
    """No look can rerun its steps: the processes would wait for each other."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Counts(name)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        model, optimizer, _ = make(model)
        for _ in range(2):
            optimizer.step(loss=losses_of(model))
    finally:
        dist.destroy_process_group()
    told = [str(each.message) for each in recwarn if issubclass(each.category, PrivacyWarning)]
    assert sum(f"buffer {name!r} changed in the forward pass" in each for each in told) == bool(name)
