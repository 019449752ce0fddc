"""Physical batches of a few sizes: what fills them up is not in the sum, whatever it is."""

import math

import pytest
import torch
from attached import attached, cross_entropy, data, parameters, small
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import TensorDataset

from dpbench import Misuse
from dpbench.engine.loader import is_on_gpu


def make(sample_size=40, **changes):
    settings = {"batch_size": 9, "max_grad_norm": 0.5, "generator": torch.Generator().manual_seed(1)} | changes
    _, optimizer, engine = attached(small().double(), lr=0.3, sample_size=sample_size, **settings)
    x, y = data(sample_size).tensors
    return engine, optimizer, TensorDataset(x.double(), y)


def train(engine, optimizer, data, shapes=None, epochs=2, **loading):
    for _ in range(epochs):
        for x, y in engine.data_loader(data, **loading):
            if shapes is not None:
                shapes.append((len(x), int(engine.mask.sum())))
            optimizer.step(loss=cross_entropy(engine.model(x), y))
    return parameters(engine.model)


@pytest.mark.parametrize("clip", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("backend", ["bk_mixed", "mixed_ghost", "microbatch"])
def test_padded_training_is_the_unpadded(backend, clip):
    shapes = []
    wanted = train(*make(backend=backend, clip=clip), max_physical_batch_size=4)
    found = train(*make(backend=backend, clip=clip), shapes, max_physical_batch_size=4, pad=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    assert {size for size, _ in shapes} == {2, 4} and {1, 3} & {real for _, real in shapes}


def test_empty_batches_are_padded_too():
    shapes = []
    wanted = train(*make(batch_size=1))
    found = train(*make(batch_size=1), shapes, max_physical_batch_size=4, pad=True)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)  # noise covers a little more before shapes are seen
    assert (2, 0) in shapes and len(shapes) == 80


@pytest.mark.parametrize(("expected", "most"), [(64, None), (256, None), (256, 64)])
def test_sizes_are_few_and_cost_little(expected, most):
    """Nine within four deviations, and on average half of √b samples of padding a logical batch."""
    engine, _, records = make(batch_size=expected, sample_size=100 * expected)
    pieces = engine.data_loader(records, max_physical_batch_size=most, pad=True)._pieces
    assert [len(piece) for piece in pieces] == [handed for *_, handed in pieces.drawn]
    real, handed = (sum(drawn[i] for drawn in pieces.drawn) for i in (2, 3))
    assert len({drawn[3] for drawn in pieces.drawn}) <= 10
    assert real < handed <= real * (1 + 0.75 / math.sqrt(expected))


def test_the_first_batch_is_verified_on_samples_of_the_data():
    """Not on padding, of which every gradient is right: a loss that mixes samples is found all the same."""
    from clipping import UnsupportedModel

    engine, optimizer, records = make(batch_size=1)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for x, y in engine.data_loader(records, max_physical_batch_size=4, pad=True):
            losses = cross_entropy(engine.model(x), y)
            optimizer.step(loss=losses * losses.sum() if engine.mask.sum() > 1 else losses)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_on_a_gpu_batches_are_padded_unless_it_is_said_otherwise(on_gpu, monkeypatch):
    monkeypatch.setattr("dpbench.engine.loader.is_on_gpu", lambda model: on_gpu)
    for pad, size, padded in ((None, 4, on_gpu), (None, None, False), (True, 4, True), (False, 4, False)):
        shapes = []
        train(*make(), shapes, epochs=1, max_physical_batch_size=size, **({} if pad is None else {"pad": pad}))
        assert ({found for found, _ in shapes} == {2, 4}) == padded


@pytest.mark.parametrize("earlier", [False, True])
def test_on_a_gpu_whole_batches_are_padded_if_steps_are_programs(earlier, monkeypatch):
    """Also by a loader that was made before the step: unpadded samples have more sizes than there are programs."""
    on_gpu, sizes = True, set()
    monkeypatch.setattr("dpbench.engine.loader.is_on_gpu", lambda model: on_gpu)
    engine, _, records = make(sample_size=600, batch_size=49)
    loader = engine.data_loader(records) if earlier else None
    step = engine.make_step(cross_entropy, compile="auto")
    loader = loader or engine.data_loader(records)
    for x, y in loader:
        losses = step(x, y)
        assert not losses[int(engine.mask.sum()) :].any()
        sizes.add(len(x))
    assert {size % 7 for size in sizes} == {0} and len(sizes) <= 9
    on_gpu = False
    assert any(len(x) % 7 for x, _ in loader)
    on_gpu, _ = True, engine.make_step(cross_entropy, compile=False)
    assert any(len(x) % 7 for x, _ in loader)
    assert all(engine.mask.all() for _ in engine.data_loader(records, pad=False))


def test_on_a_gpu_batches_of_one_size_are_not_padded(monkeypatch):
    monkeypatch.setattr("dpbench.engine.loader.is_on_gpu", lambda model: True)
    engine, _, records = make(sampling="shuffled")
    engine.make_step(cross_entropy, compile="auto")
    assert all(engine.mask.all() for _ in engine.data_loader(records))


def test_a_model_with_a_parameter_on_a_gpu_is_on_one():
    with FakeTensorMode():
        assert is_on_gpu(nn.Linear(2, 2, device="cuda")) and not is_on_gpu(nn.Linear(2, 2))


def test_two_views_of_a_record_are_not_two_records():
    """Each view would be clipped for itself, and the record move the sum by twice what the noise covers."""
    engine, optimizer, records = make()
    before = engine.model[0].weight.detach().clone()
    with pytest.raises(Misuse, match="several views of a record are one record, so average their losses"):
        for x, y in engine.data_loader(records):
            views = torch.cat([x, x.flip(-1)])
            optimizer.step(loss=cross_entropy(engine.model(views), y.repeat(2)))
    assert engine.steps == 0 and torch.equal(before, engine.model[0].weight)


def shortest_first(records):
    x, y = torch.utils.data.default_collate(sorted(records, key=lambda record: float(record[0][0])))
    return x + 0 * torch.rand(x.shape), y


def shuffled(records):
    return torch.utils.data.default_collate([records[i] for i in torch.randperm(len(records)).tolist()])


@pytest.mark.parametrize("collate", [shortest_first, shuffled])
def test_padding_that_a_collator_moves_is_refused(collate):
    """A record would have weight 0, and the first one several."""
    engine, _, records = make()
    assert all(engine.mask.all() for _ in engine.data_loader(records, pad=False, collate_fn=collate))
    with pytest.raises(Misuse, match="expected a collate_fn that keeps the order of the records"):
        for _ in engine.data_loader(records, pad=True, collate_fn=collate):
            pass


@pytest.mark.parametrize("collate", [list, lambda records: nn.utils.rnn.pad_sequence([torch.rand(4), records[0][0]])])
def test_padding_that_a_collator_leaves_last_is_taken(collate):
    engine, _, records = make()
    records = [(x[:3], y) for x, y in records]
    assert sum(not engine.mask.all() for _ in engine.data_loader(records, pad=True, collate_fn=collate))
