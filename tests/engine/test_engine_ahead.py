"""Batches that are read ahead of the step: the same releases as without, whatever becomes of the tensors on the way."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpbench import Misuse, PrivacyEngine
from dpbench.engine.batch_identity import Ticket, Tickets

RECORDS, EXPECTED = 48, 12


def make(dtype=torch.float64):
    """A record's gradient is its row of the identity: what is released says how often each is in the sum."""
    torch.manual_seed(0)
    model = nn.Linear(RECORDS, 1, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine(
        model,
        batch_size=EXPECTED,
        sample_size=RECORDS,
        epochs=2,
        max_grad_norm=1.0,
        noise_multiplier=0.0,
        generator=torch.Generator().manual_seed(5),
    )
    with pytest.warns(UserWarning, match="not private"):
        engine.attach(optimizer)
    return model, optimizer, engine


def ahead(loader, depth):
    """Yield what the loader yields, `depth` batches later: accelerate, timm and transformers do so."""
    waiting = deque()
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > depth:
            yield waiting.popleft()
    yield from waiting


def releases(wrap, moved=lambda x: x, dtype=torch.float64, **loading):
    """How often each record is in the sum of each step: [steps, RECORDS]."""
    model, optimizer, engine = make(dtype)
    x = torch.eye(RECORDS, dtype=dtype)
    found = []
    for _ in range(2):
        loader = engine.data_loader(TensorDataset(x, torch.arange(RECORDS)), **loading)
        promised, number = len(loader), 0
        for number, (rows, _) in enumerate(wrap(loader), start=1):  # noqa: B007
            optimizer.step(loss=model(moved(rows))[:, 0])
            if engine.stepped:
                found.append((model.weight.grad[0] * EXPECTED).clone())
        assert number == promised
    assert engine.steps == engine.drawn == len(found) == 8
    assert engine.privacy_spent().sampled_by == "engine"
    return torch.stack(found), engine


LOADING = {
    "whole": {},
    "pieces": {"max_physical_batch_size": 4},
    "padded": {"max_physical_batch_size": RECORDS, "pad": True},
    "padded pieces": {"max_physical_batch_size": 4, "pad": True},
}


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("loading", LOADING)
def test_what_is_read_ahead_is_released_as_it_was_drawn(loading, depth):
    found, engine = releases(lambda loader: ahead(loader, depth), **LOADING[loading])
    truth = torch.zeros_like(found)
    for step in range(8):
        truth[step, engine._sampler.batch(step)] = 1
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_ahead_too(workers):
    found, engine = releases(lambda loader: ahead(loader, 1), num_workers=workers, max_physical_batch_size=5, pad=True)
    truth = torch.zeros_like(found)
    for step in range(8):
        truth[step, engine._sampler.batch(step)] = 1
    torch.testing.assert_close(found, truth)


MOVED = {
    "a view": lambda x: x.view(x.shape[0], -1),
    "a copy": lambda x: x.clone(),
    "wider": lambda x: x.float().double(),
    "normalised": lambda x: (x - 0.3) / 0.2,
}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", MOVED)
def test_a_batch_is_known_by_its_tensors_and_by_copies_of_them(kind, depth):
    wrap = lambda loader: ahead(loader, depth)  # noqa: E731
    plain, _ = releases(iter, moved=MOVED[kind], **LOADING["padded"])
    found, _ = releases(wrap, moved=MOVED[kind], **LOADING["padded"])
    torch.testing.assert_close(found, plain)


def test_a_batch_that_is_left_out_is_in_no_other(loading="pieces"):
    """Also where two are read ahead: the ones before what is stepped were left out."""
    model, optimizer, engine = make()
    x = torch.eye(RECORDS, dtype=torch.float64)
    stepped = []
    for number, (rows, ids) in enumerate(ahead(engine.data_loader(TensorDataset(x, torch.arange(RECORDS))), 2)):
        if number == 1:
            continue
        optimizer.step(loss=model(rows)[:, 0])
        stepped.append(engine.drawn - 1)
        assert set((model.weight.grad[0] * EXPECTED).nonzero().flatten().tolist()) == set(ids.tolist())
    assert stepped == [0, 2, 3] and engine.steps == 3


def test_what_is_not_known_is_refused_by_name():
    model, optimizer, engine = make()
    data = TensorDataset(torch.eye(RECORDS, dtype=torch.float64))
    with pytest.raises(Misuse, match=r"of the 2 batches that data_loader has handed out .* that are none of these"):
        for (rows,) in ahead(engine.data_loader(data, max_physical_batch_size=RECORDS, pad=True), 1):
            optimizer.step(loss=model(torch.randn_like(rows))[:, 0])
    assert engine.steps == 0


def test_one_batch_after_the_other_may_be_changed_at_will():
    model, optimizer, engine = make()
    data = TensorDataset(torch.eye(RECORDS, dtype=torch.float64))
    for (rows,) in engine.data_loader(data, max_physical_batch_size=RECORDS, pad=True):
        optimizer.step(loss=model(torch.randn_like(rows))[:, 0])
    assert engine.steps == 4 and engine.privacy_spent().sampled_by == "engine"


def test_a_checkpoint_does_not_count_what_was_read_ahead_as_done():
    model, optimizer, engine = make()
    data = TensorDataset(torch.eye(RECORDS, dtype=torch.float64), torch.arange(RECORDS))
    for rows, _ in ahead(engine.data_loader(data), 2):
        optimizer.step(loss=model(rows)[:, 0])
        if engine.steps == 2:
            break
    assert engine.drawn == engine.state_dict()["drawn"] == 2
    assert next(iter(engine.data_loader(data)))[1].tolist() == engine._sampler.batch(2).tolist()


def test_parts_of_one_tensor_are_told_apart():
    """As a data set in memory hands them out: one storage holds all batches."""
    whole = torch.randn(12, 5)
    tickets = Tickets()
    batches = whole.split(4)  # which whoever reads ahead keeps
    handed = [Ticket(step, True, 4, 4, batch) for step, batch in enumerate(batches)]
    for ticket in handed:
        tickets.hand_out(ticket)
    tickets.read(batches[1].view(4, 5), 4, False)
    assert tickets.take(0) is handed[1] and len(tickets) == 1


class Words:
    """Of somebody's own, with no tensor that is found in it; and it holds itself."""

    def __init__(self, *words):
        self.words, self.itself = words, self


def test_a_batch_without_tensors_is_not_recognised_and_nothing_worse():
    tickets = Tickets()
    for step in range(2):
        tickets.hand_out(Ticket(step, True, 2, 2, [Words("a", "b"), {"kind": dict}]))
    with pytest.raises(Misuse, match="that are none of these"):
        tickets.read({"x": torch.randn(2, 3), "words": Words(), "kind": dict}, 2, False)


def test_a_batch_whose_step_has_raised_is_tried_again_as_itself():
    """With one more read ahead, which was taken for it: its padding and its pieces are another batch's."""
    for loading in LOADING.values():
        model, optimizer, engine = make()
        loader = engine.data_loader(TensorDataset(torch.eye(RECORDS, dtype=torch.float64)), **loading)
        expected, _ = releases(lambda loader: ahead(loader, 1), **loading)
        found, failed = [], False
        for (rows,) in ahead(loader, 1):
            losses = model(rows)[:, 0]
            if engine.steps == 1 and not failed and engine._tickets.current.is_last and len(engine._sums) == 0:
                failed = True
                with pytest.raises(Misuse, match="shape"):
                    optimizer.step(loss=losses.sum())
                losses = model(rows)[:, 0]
            optimizer.step(loss=losses)
            if engine.stepped:
                found.append((model.weight.grad[0] * EXPECTED).clone())
        assert len(found) == 4
        torch.testing.assert_close(torch.stack(found), expected[:4], rtol=0, atol=1e-12)
        assert engine.privacy_spent().sampled_by == "engine"


def test_a_batch_of_which_something_was_released_is_not_released_again():
    model, optimizer, engine = make()
    inner, failing = engine._patch._inner, [True]

    def step():
        inner()
        if failing.pop() if failing else False:
            raise RuntimeError("of a scheduler, say")

    engine._patch._inner = step
    batches = iter(engine.data_loader(TensorDataset(torch.eye(RECORDS, dtype=torch.float64))))
    (rows,) = next(batches)
    with pytest.raises(RuntimeError, match="of a scheduler"):
        optimizer.step(loss=model(rows)[:, 0])
    with pytest.raises(Misuse, match="a second release of the same sample"):
        model(rows)
    (rows,) = next(batches)
    optimizer.step(loss=model(rows)[:, 0])
    assert engine.steps == 2


def test_what_is_unknown_after_a_failure_is_refused():
    model, optimizer, engine = make()
    batches = iter(engine.data_loader(TensorDataset(torch.eye(RECORDS, dtype=torch.float64))))
    (rows,) = next(batches)
    with pytest.raises(Misuse, match="shape"):
        optimizer.step(loss=model(rows).sum())
    with pytest.raises(Misuse, match="begin to iterate anew"):
        model(torch.rand(rows.shape, dtype=rows.dtype))
    (rows,) = next(iter(engine.data_loader(TensorDataset(torch.eye(RECORDS, dtype=torch.float64)))))
    optimizer.step(loss=model(rows)[:, 0])


class Rows(torch.utils.data.Dataset):
    """Of the identity, with something beside each."""

    def __init__(self, beside):
        self.beside = beside

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        return torch.eye(RECORDS, dtype=torch.float64)[i], self.beside(i)


BESIDE = {
    "a mask without padding": lambda i: torch.ones(5, dtype=torch.bool),
    "a mask with padding": lambda i: torch.arange(5) <= i % 5,
    "a causal mask": lambda i: torch.ones(5, 5, dtype=torch.bool).tril(),
    "True": lambda i: True,
    "uint16": lambda i: torch.ones(5, dtype=torch.uint16),
    "complex": lambda i: torch.full((5,), 1j),
    "float8": lambda i: torch.ones(5).to(torch.float8_e4m3fn),
    "not a number": lambda i: torch.full((5,), float("nan")),
}


def collated(samples):
    return torch.utils.data.default_collate(samples)


def sparse(samples):
    rows, beside = collated(samples)
    return rows, beside.to_sparse()


def steps_of(beside, collate=collated):
    model, optimizer, engine = make()
    for rows, _ in engine.data_loader(Rows(beside), collate_fn=collate):
        optimizer.step(loss=model(rows)[:, 0])
    return engine.steps


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_whatever_torch_collates_is_loaded(beside):
    assert steps_of(beside) == 4


def test_sparse_batches_are_loaded():
    assert steps_of(lambda i: torch.eye(5)[i % 5], sparse) == 4


class Plain:
    def __init__(self, samples):
        self.rows, self.beside = collated(samples)


def nested(samples):
    rows, beside = collated(samples)
    return rows, torch.nested.nested_tensor(list(beside), layout=torch.jagged)


@pytest.mark.parametrize(("collate", "came"), [(Plain, "got Plain"), (nested, "got one that is nested")])
def test_what_cannot_be_empty_is_refused_when_the_loader_is_made(collate, came):
    _, _, engine = make()
    with pytest.raises(ValueError, match=f"{came}: a Poisson sample may be empty"):
        engine.data_loader(Rows(lambda i: torch.ones(5)), collate_fn=collate)
    engine.data_loader(Rows(lambda i: torch.ones(5)), collate_fn=collate, max_physical_batch_size=4, pad=True)


def test_a_loader_is_no_dataset():
    _, _, engine = make()
    loader = torch.utils.data.DataLoader(Rows(lambda i: 0), batch_size=1)
    with pytest.raises(ValueError, match="expected a dataset, got a DataLoader: hand its dataset"):
        engine.data_loader(loader)
