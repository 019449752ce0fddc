"""What led the engine astray in loops as people have them: failures half-way, checkpoints, batches that others draw."""

from __future__ import annotations

import collections
import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from clipping import Automatic, Flat, GlobalBound, PerLayer
from dpbench import PrivacyEngine
from dpbench.engine import PrivacyWarning
from dpbench.engine.sampling import Sizes
from dpbench.engine.settings import require_sensitivity


def make(model=None, attach=True, **changes):
    """(model, optimizer, engine); the noise is the default one unless the changes say otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"batch_size": 16, "sample_size": 64, "max_grad_norm": 1.0, "noise_multiplier": 1.0, "epochs": 4}
    engine = PrivacyEngine(model, **settings | changes)
    if engine.backend == "bk_mixed":
        engine._recorder.backend.planner.timing = False  # sums of two engines are to have the same bits
    if attach:
        engine.attach(optimizer)
    return model, optimizer, engine


def losses_of(model, count=16, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 5, generator=numbers), torch.randint(0, 3, (count,), generator=numbers)
    return F.cross_entropy(model(x), y, reduction="none")


def data(count=64):
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 5, generator=numbers), torch.randint(0, 3, (count,), generator=numbers))


# a failure half-way


@pytest.mark.parametrize("at", range(4))
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


def test_a_piece_of_the_loader_that_failed_is_still_that_piece(monkeypatch):
    """Tried again it is added, and releases nothing before the last one."""
    model, optimizer, engine = make(noise_multiplier=0.0)
    tried = False
    for x, y in engine.data_loader(data(), max_physical_batch_size=4):
        steps, last = engine.steps, engine._tickets.first().is_last
        if last is False and not tried:
            tried = True
            losses = F.cross_entropy(model(x), y, reduction="none")
            with pytest.raises(FloatingPointError):
                optimizer.step(loss=losses * float("nan"))
            assert engine._tickets.first().is_last is False and engine.steps == steps
        optimizer.step(loss=F.cross_entropy(model(x), y, reduction="none"))
        assert engine.stepped is last and engine.steps == steps + last
    assert tried and engine.privacy_spent().sampled_by == "engine"


def test_a_record_that_is_not_a_number_is_named_and_the_model_is_not_blamed():
    model, optimizer, engine = make()
    losses = losses_of(model)
    weights = torch.ones(16)
    weights[[3, 7]] = torch.tensor([float("nan"), float("inf")])
    with pytest.raises(FloatingPointError, match="got NaN or inf for samples 3, 7 of the batch of 16"):
        optimizer.step(loss=losses * weights)
    optimizer.step(loss=losses_of(model))
    assert engine.steps == 1


# checkpoints


def states(*parts):
    return copy.deepcopy([part.state_dict() for part in parts])


def load(state, *parts):
    for part, own in zip(parts, state, strict=True):
        part.load_state_dict(own)


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_a_loader_made_before_the_checkpoint_was_loaded_goes_on_with_its_key(sampling):
    numbered = TensorDataset(*data().tensors, torch.arange(64))

    def used(model, optimizer, loader, most):
        found = []
        for number, (x, y, i) in enumerate(loader):
            optimizer.step(loss=F.cross_entropy(model(x), y, reduction="none"))
            found += i.tolist()
            if number + 1 == most:
                break
        return found

    first = make(sampling=sampling)
    seen = used(*first[:2], first[2].data_loader(numbered), 2)
    saved = states(*first)
    wanted = used(*first[:2], first[2].data_loader(numbered), None)
    second = make(sampling=sampling)
    loader = second[2].data_loader(numbered)
    load(saved, *second)
    found = used(*second[:2], loader, None)
    assert found == wanted
    if sampling == "shuffled":
        assert sorted(seen + found) == list(range(64))


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
    other = PrivacyEngine(model, batch_size=16, sample_size=64, max_grad_norm=1.0, noise_multiplier=1.0, epochs=4)
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


# batches of one's own


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


def test_a_shuffled_loader_is_said_to_be_none_of_poisson():
    model, optimizer, engine = make(sample_size=1000, batch_size=128, epochs=20)
    with pytest.warns(PrivacyWarning, match="exactly 128 samples: not Poisson samples"):
        for _ in range(4):
            for x, y in DataLoader(data(1000), 128, shuffle=True):
                optimizer.step(loss=F.cross_entropy(model(x), y, reduction="none"))
    spent = engine.privacy_spent()
    assert not spent.private and "NOT PRIVATE" in str(spent) and "Poisson sampling assumed" in str(spent)


def test_the_words_say_who_drew():
    model, optimizer, engine = make()
    for x, y in engine.data_loader(data()):
        optimizer.step(loss=F.cross_entropy(model(x), y, reduction="none"))
    assert "Poisson sampling," in str(engine.privacy_spent())


# what the optimizer holds


def test_a_gradient_left_on_a_frozen_parameter_is_not_applied():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    losses_of(model).mean().backward()  # of private data, and never stepped
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    model, optimizer, _ = make(model)
    optimizer.step(loss=losses_of(model))
    assert torch.equal(model[0].weight, frozen) and model[0].weight.grad is None


# arguments


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


@pytest.mark.parametrize("name", ["target_epsilon", "noise_multiplier", "epochs", "batch_size", "target_delta"])
def test_true_is_no_number(name):
    other = {"noise_multiplier": None} if name == "target_epsilon" else {}
    with pytest.raises(ValueError, match=f"expected {name} to be a .*, got True"):
        make(**{name: True} | other)


def test_numbers_of_numpy_are_taken():
    numbers = {"batch_size": np.int64(16), "sample_size": np.int32(64), "noise_multiplier": np.float32(1.5)}
    _, _, engine = make(**numbers, epochs=np.float64(2), target_delta=np.float64(1e-5))
    state = engine.settings.as_state()
    assert (state["batch_size"], state["noise_multiplier"], type(state["noise_multiplier"])) == (16, 1.5, float)


# batches of no records, in whatever a collate_fn makes


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor


Named = collections.namedtuple("Named", "x y")
CONTAINERS = {
    "UserDict": lambda x, y: collections.UserDict(x=x, y=y),
    "dataclass": Batch,
    "namedtuple": Named,
    "nested": lambda x, y: {"inner": [{"x": x, "words": "as they are"}], "y": y},
}


@pytest.mark.parametrize("container", [*CONTAINERS, "BatchEncoding"])
def test_a_batch_of_no_records_is_of_the_kind_of_the_others(container):
    if container == "BatchEncoding":
        kind = pytest.importorskip("transformers").BatchEncoding
        make_batch = lambda x, y: kind({"x": x, "y": y})  # noqa: E731
    else:
        make_batch = CONTAINERS[container]
    model, optimizer, engine = make(batch_size=1)
    empty = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in engine.data_loader(data(), collate_fn=lambda rows: make_batch(*default_collate(rows))):
            inner = batch["inner"][0] if container == "nested" else batch
            x = inner["x"] if hasattr(inner, "keys") else inner.x
            y = batch["y"] if hasattr(batch, "keys") else batch.y
            empty += len(x) == len(y) == 0
            optimizer.step(loss=F.cross_entropy(model(x), y, reduction="none"))
    assert empty and engine.steps == 64


@pytest.mark.parametrize("sampling", ["one_pass", "shuffled"])
def test_fixed_batches_are_not_said_to_be_proved_for_a_record_that_is_removed(sampling):
    _, _, engine = make(sampling=sampling)
    said = str(engine.privacy_spent())
    assert "making one record's gradient zero" in said and engine.privacy_spent().adjacency == "zero_out"
    assert "adding or removing" not in said
    assert "adding or removing one record" in str(make()[2].privacy_spent())
