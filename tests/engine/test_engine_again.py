"""Batches that are read and not stepped, stepped and read again, or kept: none is in a sum that it is not of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpbench import Misuse, PrivacyEngine
from dpbench.engine.batch_identity import Ticket, Tickets

RECORDS, EXPECTED = 48, 12
X = torch.eye(RECORDS, dtype=torch.float64)
DATA = TensorDataset(X, torch.arange(RECORDS))
PADDED = {"max_physical_batch_size": 16, "pad": True}
PIECES = {"max_physical_batch_size": 4}
DONE = "that was not stepped yet, got one that is done with"


def make(key=5, **changes):
    """A record's gradient is its row of the identity: what is released says how often each is in the sum."""
    torch.manual_seed(0)
    model = nn.Linear(RECORDS, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"batch_size": EXPECTED, "sample_size": RECORDS, "max_grad_norm": 1.0, "noise_multiplier": 0.0}
    engine = PrivacyEngine(model, **settings | changes, epochs=2, generator=torch.Generator().manual_seed(key))
    with pytest.warns(UserWarning, match="not private"):
        engine.attach(optimizer)
    return model, optimizer, engine


def counts(model):
    return (model.weight.grad[0] * EXPECTED).round().long().tolist()


def often(ids):
    return torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=RECORDS).tolist()


@pytest.mark.parametrize("backend", ["bk_mixed", "microbatch"])
@pytest.mark.parametrize("loading", [PADDED, PIECES], ids=["padded", "pieces"])
def test_a_batch_that_was_read_and_left_out_is_not_taken_for_the_next(loading, backend):
    model, optimizer, engine = make(backend=backend)
    ids, drawing = [], -1
    for number, (x, mine) in enumerate(engine.data_loader(DATA, **loading)):
        losses = model(x)[:, 0]
        if number % 3 == 1:
            continue
        optimizer.step(loss=losses)
        if engine._drawing != drawing:
            ids, drawing = [], engine._drawing
        ids += set(mine.tolist())  # padding repeats a record
        if engine.stepped:
            assert counts(model) == often(ids)
    assert engine.steps > 1 and engine.privacy_spent().sampled_by == "engine"


def test_an_evaluation_in_training_mode_is_not_taken_for_the_next_batch():
    """Nobody wrote no_grad: the padding of what is stepped next was counted."""
    model, optimizer, engine = make()
    model(X[:16])
    ids = []
    for x, mine in engine.data_loader(DATA, **PADDED):
        optimizer.step(loss=model(x)[:, 0])
        ids += set(mine.tolist())
        if engine.stepped:
            assert counts(model) == often(ids)
            ids = []
        model(X[:16])
    assert engine.privacy_spent().sampled_by == "engine"


@pytest.mark.parametrize("backend", ["bk_mixed", "ghost", "microbatch"])
def test_losses_of_the_batch_before_the_last_read_are_refused(backend):
    model, optimizer, engine = make(backend=backend)
    batches = iter(engine.data_loader(DATA, **PADDED))
    (x, _), (later, _) = next(batches), next(batches)
    losses = model(x)[:, 0]
    others = model(later)[:, 0]
    with pytest.raises(Misuse, match="got some of an earlier one, of another batch"):
        optimizer.step(loss=losses + others)
    assert engine.steps == 0 and not engine._sums


def test_what_reads_a_parameter_before_the_model_is_called_is_of_the_same_pass():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, RECORDS, dtype=torch.float64))

        def forward(self, x):
            return x.sum(1) + 0 * self.weight.sum()

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"batch_size": EXPECTED, "sample_size": RECORDS, "max_grad_norm": 1.0, "noise_multiplier": 0.0}
    engine = PrivacyEngine(model, **settings, epochs=2, backend="microbatch")
    engine.attach(optimizer)
    engine._recorder._occasions = None  # which would look at the graph of the inputs
    for count in (5, 9, 5):
        losses = model(X[:count] * model.weight)
    optimizer.step(loss=losses)
    assert counts(model) == often(range(5))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("loading", [{}, PADDED, PIECES], ids=["whole", "padded", "pieces"])
def test_what_was_stepped_is_not_stepped_again(loading, ahead):
    model, optimizer, engine = make()
    batches = iter(engine.data_loader(DATA, **loading))
    (x, _), *_ = [next(batches) for _ in range(1 + ahead)]
    optimizer.step(loss=model(x)[:, 0])
    steps, size = engine.steps, engine._size
    for view in (x, x.view(len(x), -1), x.clone()):
        losses = model(view)[:, 0]
        for _ in range(2):
            with pytest.raises(Misuse, match=DONE):
                optimizer.step(loss=losses)
        with pytest.raises(Misuse, match="with every batch of data_loader"):
            optimizer.virtual_step(loss=losses)
    assert (engine.steps, engine._size) == (steps, size)


def test_after_a_step_its_batch_may_be_evaluated():
    """Also where what the model reads is another view that nobody would know."""
    for view in (lambda x: x, lambda x: x.flip(1)):
        model, optimizer, engine = make()
        for x, _ in engine.data_loader(DATA, **PADDED):
            optimizer.step(loss=model(view(x))[:, 0])
            model(view(x))
        assert engine.drawn == 4 and engine.privacy_spent().sampled_by == "engine"


@pytest.mark.parametrize(
    "moved", [lambda x: x, lambda x: x * 2 - 1, lambda x: x.flip(1)], ids=["", "scaled", "unknown"]
)
def test_batches_that_were_kept_are_not_stepped_in_another_epoch(moved):
    model, optimizer, engine = make()
    kept = list(engine.data_loader(DATA, **PADDED))
    for x, _ in kept:
        optimizer.step(loss=model(x)[:, 0])
    for x, _ in kept[-3:]:
        with pytest.raises(Misuse, match="expected a batch of data_loader"):
            optimizer.step(loss=model(moved(x))[:, 0])
    assert engine.steps == 4


def test_a_batch_of_an_iteration_that_was_broken_off_is_not_stepped():
    model, optimizer, engine = make()
    (x, _) = next(iter(engine.data_loader(DATA, **PADDED)))
    small = None
    for small, _ in engine.data_loader(DATA, **PADDED):
        optimizer.step(loss=model(small)[:, 0])
    with pytest.raises(Misuse, match=DONE):
        optimizer.step(loss=model(x)[:, 0])
    state = copy.deepcopy(engine.state_dict())
    (x, _) = next(iter(engine.data_loader(DATA, **PADDED)))
    engine.load_state_dict(state)
    with pytest.raises(Misuse, match=DONE):
        optimizer.step(loss=model(x)[:, 0])


def test_two_iterations_at_once_release_no_sample_twice():
    model, optimizer, engine = make()
    (x, ids), (same, those) = next(zip(engine.data_loader(DATA), engine.data_loader(DATA), strict=True))
    assert ids.tolist() == those.tolist()
    optimizer.step(loss=model(x)[:, 0])
    with pytest.raises(Misuse, match=DONE):
        optimizer.step(loss=model(same)[:, 0])
    assert engine.steps == 1


def test_an_iteration_ends_where_another_training_s_checkpoint_is_loaded():
    model, optimizer, engine = make(key=6)
    for x, _ in engine.data_loader(DATA):
        optimizer.step(loss=model(x)[:, 0])
        if engine.steps == 3:
            break
    state = copy.deepcopy([optimizer.state_dict(), engine.state_dict()])
    model, optimizer, engine = make()
    batches = iter(engine.data_loader(DATA))
    next(batches)
    optimizer.load_state_dict(state[0])
    engine.load_state_dict(state[1])
    with pytest.raises(Misuse, match="expected a new iteration of data_loader"):
        next(batches)
    for x, _ in engine.data_loader(DATA):
        optimizer.step(loss=model(x)[:, 0])
    assert engine.steps == 4


def test_parts_of_one_s_own_and_the_loader_s_are_in_no_sum_together():
    model, optimizer, engine = make()
    batches = engine.data_loader(DATA, **PIECES)
    first = True
    for x, _ in batches:
        optimizer.step(loss=model(x)[:, 0])
        if first:
            own = X[torch.arange(5)]
            optimizer.virtual_step(loss=model(own)[:, 0])
            assert engine._size == 5 and engine._sums["weight"][0].nonzero().flatten().tolist() == list(range(5))
            first = False
        if engine.stepped:
            assert max(counts(model)) == 1
    optimizer.virtual_step(loss=model(X[:5])[:, 0])
    optimizer.step(loss=model(X[5:8])[:, 0])
    assert counts(model) == often(range(8))


def test_parts_of_one_s_own_go_on_from_a_checkpoint():
    model, optimizer, engine = make()
    for x, _ in engine.data_loader(DATA):
        optimizer.step(loss=model(x)[:, 0])
    optimizer.virtual_step(loss=model(X[:5])[:, 0])
    state = copy.deepcopy([optimizer.state_dict(), engine.state_dict()])
    model, optimizer, engine = make()
    optimizer.load_state_dict(state[0])
    engine.load_state_dict(state[1])
    optimizer.step(loss=model(X[5:8])[:, 0])
    assert counts(model) == often(range(8))


def test_a_tensor_that_is_filled_anew_for_each_batch_is_each_batch():
    model, optimizer, engine = make()
    place, ids = torch.empty(16, RECORDS, dtype=torch.float64), []
    for x, mine in engine.data_loader(DATA, **PADDED):
        optimizer.step(loss=model(place[: len(x)].copy_(x))[:, 0])
        ids += set(mine.tolist())
        if engine.stepped:
            assert counts(model) == often(ids)
            ids = []
    assert engine.drawn == 4


def test_sparse_samples_and_single_ones_are_told_apart():
    sparse = torch.zeros(2, 8, 20_000)
    sparse[0, torch.arange(8), 13 + 450 * torch.arange(8)] = 1
    sparse[1, torch.arange(8), 17 + 450 * torch.arange(8)] = 1
    black = torch.zeros(2, 1, 784)  # but for a pixel in the middle
    black[0, 0, 391], black[1, 0, 402] = 1, 1
    for batches in (sparse, black):
        for copied in (lambda x: x, lambda x: x.clone()):
            tickets, count = Tickets(), batches.shape[1]
            handed = [Ticket(step, True, count, count, batch.clone()) for step, batch in enumerate(batches)]
            for ticket in handed:
                tickets.hand_out(ticket)
            tickets.read(copied(batches[1]), count, False)
            assert tickets.take(0) is handed[1]


def test_a_batch_is_known_beside_tensors_that_the_caller_makes():
    shared = torch.arange(9)  # of every batch, as positions are
    tickets, batches = Tickets(), [(torch.rand(9, 7), shared) for _ in range(3)]
    handed = [Ticket(step, True, 9, 9, batch) for step, batch in enumerate(batches)]
    for ticket in handed:
        tickets.hand_out(ticket)
    state = torch.zeros(9, 4)
    for i in (0, 2):
        tickets.read((*batches[i], state), 9, False)
        assert tickets.take(0) is handed[i]
    tickets.hand_out(Ticket(3, True, 9, 9, (torch.rand(9, 7), shared)))
    tickets.hand_out(Ticket(4, True, 9, 9, (torch.rand(9, 7), shared)))
    with pytest.raises(Misuse, match="none of these"):
        tickets.read((*batches[1], state), 9, False)


def test_samples_that_are_few_or_all_the_same_may_be_normalised():
    numbers = torch.Generator().manual_seed(0)
    few, many = torch.rand(2, 7, generator=numbers), torch.rand(9, 7, generator=numbers)
    same = torch.rand(1, 7, generator=numbers).repeat(9, 1)
    for batch, other in ((few, many), (same, many), (many, same)):
        tickets = Tickets()
        handed = [Ticket(step, True, len(x), len(x), x) for step, x in enumerate((other, batch))]
        for ticket in handed:
            tickets.hand_out(ticket)
        tickets.read((batch - 0.3) / 0.2, len(batch), False)
        assert tickets.take(0) is handed[1]
    tickets.hand_out(handed[1])
    tickets.hand_out(Ticket(5, True, 9, 9, same))
    with pytest.raises(Misuse, match="that are none of these"):
        tickets.read(torch.rand(9, 7, generator=numbers), 9, False)


def test_parameters_that_came_later_and_are_not_the_model_s_are_refused():
    """Their gradients are of private data, and nobody has clipped them."""
    model, optimizer, engine = make()
    optimizer.step(loss=model(X[:8])[:, 0])
    head = nn.Linear(2, 2)
    optimizer.add_param_group({"params": head.parameters(), "lr": 1.0})
    head(torch.ones(3, 2)).sum().backward()
    before = head.weight.detach().clone()
    for step in (lambda: optimizer.step(loss=model(X[:8])[:, 0]), engine.empty_step):
        with pytest.raises(Misuse, match="of the model's parameters alone, got 2 of others"):
            step()
    assert engine.steps == 1 and torch.equal(head.weight, before)
