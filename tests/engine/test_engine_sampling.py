"""The engine's data loader: what is sampled is what is accounted."""

import copy
import itertools

import numpy as np
import pytest
import torch
from attached import attached
from torch import nn
from torch.utils.data import TensorDataset

from accounting import load_accountant
from dpbench import Misuse
from dpbench.engine.sampling import Sampler
from dpbench.engine.settings import SCHEMES


def sampler_of(batch_size, sample_size, sampling="poisson", key=bytes(32), **options):
    settings = {"batch_size": batch_size, "sample_size": sample_size, "sampling": sampling} | options
    return Sampler(attached(attach=False, **settings)[2].settings, key)


def make(batch_size=4, sample_size=40, **changes):
    torch.manual_seed(0)
    settings = {"batch_size": batch_size, "sample_size": sample_size, "max_grad_norm": 0.5} | changes
    model, optimizer, engine = attached(nn.Linear(3, 2), lr=0.1, **settings)
    data = TensorDataset(torch.arange(sample_size), torch.randn(sample_size, 3))
    return engine, optimizer, data, lambda x: model(x).square().sum(1)


def test_poisson_sampling_is_a_coin_for_each_record_and_step():
    sampler, steps, n, q = sampler_of(30, 300), 800, 300, 0.1
    taken = np.zeros((steps, n))
    for step in range(steps):
        taken[step, sampler.batch(step)] = 1
    deviation = np.sqrt(q * (1 - q))
    assert abs(taken.mean() - q) < 4 * deviation / np.sqrt(taken.size)
    assert np.abs(taken.mean(0) - q).max() < 5 * deviation / np.sqrt(steps)  # no record is preferred
    sizes = taken.sum(1)
    assert sizes.std() == pytest.approx(deviation * np.sqrt(n), rel=0.1)
    centred = taken - q
    for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):  # of neighbours, and of steps
        assert abs((a * b).mean()) < 5 * deviation**2 / np.sqrt(a.size)
    assert (sampler.batch(3) == sampler_of(30, 300).batch(3)).all()  # of key and number alone
    assert sampler.batch(3).tolist() != sampler_of(30, 300, key=b"another".ljust(32)).batch(3).tolist()


def test_batches_of_the_other_schemes():
    shuffled = sampler_of(7, 30, "shuffled")
    epochs = [np.concatenate([shuffled.batch(4 * e + i) for i in range(4)]) for e in range(3)]
    assert all(len(set(epoch.tolist())) == 28 for epoch in epochs)  # no record twice, two left out
    assert epochs[0].tolist() != epochs[1].tolist()
    one_pass = sampler_of(7, 30, "one_pass")
    assert one_pass.batch(1).tolist() == one_pass.batch(5).tolist() == list(range(7, 14))
    anew = sampler_of(7, 30, "without_replacement")
    draws = np.array([anew.batch(step) for step in range(600)])
    assert draws.shape == (600, 7) and all(len(set(row)) == 7 for row in draws.tolist())
    assert np.abs(np.bincount(draws.ravel(), minlength=30) / 600 - 7 / 30).max() < 0.08
    cut, whole = sampler_of(7, 30, "truncated_poisson", max_batch_size=8), sampler_of(7, 30)
    for step in range(50):
        assert set(cut.batch(step).tolist()) <= set(whole.batch(step).tolist())
        assert len(cut.batch(step)) == min(8, len(whole.batch(step)))


def test_balls_and_bins_are_one_batch_an_epoch_drawn_for_each_record_alone():
    sampler, n, t, epochs = sampler_of(7, 30, "balls_and_bins"), 30, 4, 900
    placed = np.zeros((epochs, n), dtype=int)
    for epoch in range(epochs):
        batches = [sampler.batch(t * epoch + place) for place in range(t)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(n))
        for place, batch in enumerate(batches):
            placed[epoch, batch] = place
    counts = np.array([(placed == place).sum(0) for place in range(t)])
    assert np.abs(counts / epochs - 1 / t).max() < 5 * np.sqrt(0.25 * 0.75 / epochs)  # of every record
    sizes = (placed == 0).sum(1)
    assert sizes.var() == pytest.approx(n * 0.25 * 0.75, rel=0.2)  # binomial
    for a, b in ((placed[:, 1:], placed[:, :-1]), (placed[1:], placed[:-1])):  # of neighbours, and of epochs
        assert abs((a == b).mean() - 1 / t) < 5 * np.sqrt(0.25 * 0.75 / a.size)
    assert (sampler.batch(5) == sampler_of(7, 30, "balls_and_bins").batch(5)).all()


def test_empty_batches_move_the_parameters_and_count():
    engine, optimizer, data, loss = make(1, 40)
    model, sizes = engine.model, []
    for ids, x in engine.data_loader(data):
        assert x.shape[1:] == (3,) and x.dtype == torch.float32 and ids.dtype == torch.int64
        before = model.weight.clone()
        optimizer.step(loss=loss(x))
        assert not torch.equal(before, model.weight)
        sizes.append(len(x))
    assert 0 in sizes and engine.steps == len(sizes) == 40 and engine.privacy_spent().sampled_by == "engine"
    optimizer.step(loss=loss(torch.randn(3, 3)))  # a batch of the caller's own
    assert engine.privacy_spent().sampled_by == "assumed"


def test_an_iteration_goes_to_the_end_of_the_epoch_and_repeats_no_record():
    engine, optimizer, data, loss = make(6, 40, sampling="shuffled")
    loader = engine.data_loader(data)
    seen = []
    for ids, x in itertools.islice(loader, 2):
        optimizer.step(loss=loss(x))
        seen += ids.tolist()
    for i, (ids, x) in enumerate(loader):
        if i != 1:  # a batch that is skipped is spent all the same
            optimizer.step(loss=loss(x))
        seen += ids.tolist()
    assert len(seen) == len(set(seen)) == 36 and engine.steps == 5 and engine.drawn == 6
    more = next(iter(loader))[0].tolist()
    assert engine._sampler.batch(6).tolist() == more


def test_what_the_loader_hands_out_is_not_accumulated_by_hand():
    engine, optimizer, data, loss = make()
    for _, x in engine.data_loader(data):
        if len(x):
            with pytest.raises(Misuse, match=r"expected optimizer.step\(loss=losses\) with every batch of data_loader"):
                optimizer.virtual_step(loss=loss(x))
            break


@pytest.mark.parametrize("sampling", SCHEMES)
def test_the_scheme_that_is_sampled_is_accounted(sampling):
    most = 6 if sampling == "truncated_poisson" else None
    engine, optimizer, data, loss = make(4, 40, sampling=sampling, max_batch_size=most)
    for _ in range(2):
        for _, x in engine.data_loader(data):
            optimizer.step(loss=loss(x))
    spent = engine.privacy_spent()
    wanted = load_accountant("prv").guarantee(engine.settings.mechanism, steps=20, delta=1 / 80)
    assert (spent.epsilon, spent.sampling, spent.kind, spent.steps) == (wanted.epsilon, sampling, "upper_bound", 20)
    poisson = make(4, 40)[0]
    poisson.steps = 20
    if sampling == "poisson":
        assert spent.epsilon == poisson.privacy_spent().epsilon
    elif sampling == "balls_and_bins":  # in each epoch once
        assert 0.8 * poisson.privacy_spent().epsilon < spent.epsilon < poisson.privacy_spent().epsilon
    else:
        assert spent.epsilon > 1.2 * poisson.privacy_spent().epsilon  # whatever is less random is dearer


@pytest.mark.parametrize(("sampling", "epochs"), [("poisson", 2.5), ("shuffled", 1), ("balls_and_bins", 1)])
def test_the_target_is_met_at_the_end_of_the_loader_epochs(sampling, epochs):
    options = {"noise_multiplier": None, "target_epsilon": 2.0, "epochs": epochs, "sampling": sampling}
    engine, *_ = make(7, 400, **options)
    engine.steps = engine.settings.planned_steps
    assert engine.settings.planned_steps >= epochs * len(engine.data_loader(range(400)))
    assert 1.9 < engine.privacy_spent().epsilon <= 2.0


def test_a_loader_of_other_data_or_another_order_is_refused():
    engine, _, data, _ = make()
    with pytest.raises(ValueError, match="expected a dataset of sample_size=40, got 7 records"):
        engine.data_loader(range(7))
    with pytest.raises(ValueError, match="a length and records by index, got one that is only iterable"):
        engine.data_loader(iter(range(40)))
    with pytest.raises(ValueError, match="expected no shuffle: how batches are drawn is the engine's `sampling`"):
        engine.data_loader(data, shuffle=True)
    with pytest.raises(ValueError, match="expected no in_order"):  # the engine would take one batch for another
        engine.data_loader(data, num_workers=2, in_order=False)
    with pytest.raises(ValueError, match="max_physical_batch_size >= 1, got 0"):
        engine.data_loader(data, max_physical_batch_size=0)


@pytest.mark.parametrize("sampling", ["poisson", "without_replacement", "balls_and_bins", "shuffled"])
@pytest.mark.parametrize("replay", [False, True])
def test_who_goes_back_draws_other_batches_and_who_replays_the_same(sampling, replay):
    engine, optimizer, data, loss = make(4, 80, sampling=sampling, accountant="prv")

    def train(most):
        ids = []
        for mine, x in itertools.islice(engine.data_loader(data), most):
            optimizer.step(loss=loss(x))
            ids.append(mine.tolist())
        return ids

    train(3)
    state, stepped = engine.state_dict(), copy.deepcopy(optimizer.state_dict())
    engine.load_state_dict(state)
    assert engine._sampler.branch == 0  # nothing was released since
    before = train(5)
    optimizer.load_state_dict(stepped)
    engine.load_state_dict(state, replay=replay)
    assert (train(5) == before) == replay
    assert engine.privacy_spent(1e-5).steps == 13 and engine._abandoned.count == 5
    if sampling in ("shuffled", "balls_and_bins"):  # an epoch has 20 batches: this one, and one for each left behind
        six = load_accountant("prv").guarantee(engine.settings.mechanism, steps=6 * 20, delta=1e-5)
        assert engine.privacy_spent(1e-5).epsilon == pytest.approx(six.epsilon)


class Augmented(TensorDataset):
    """Records with random numbers, as augmentation draws them."""

    def __getitem__(self, i):
        return torch.rand(3), *super().__getitem__(i)


def test_workers_draw_other_numbers_in_each_iteration_and_training():
    """Also from a new loader, as each epoch or BatchMemoryManager makes one; a seeded engine repeats them."""
    drawn = []
    for seed in (None, None, 5, 5):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        engine, optimizer, data, losses = make(20, sampling="shuffled", generator=generator)
        for _ in range(2):
            epoch = list(engine.data_loader(Augmented(*data.tensors), num_workers=1))
            drawn.append(torch.cat([numbers for numbers, _, _ in epoch]))
            for _, _, x in epoch:
                optimizer.step(loss=losses(x))
    assert torch.equal(drawn[4], drawn[6]) and torch.equal(drawn[5], drawn[7])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn[:6], 2))
