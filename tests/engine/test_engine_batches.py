"""Batches read ahead of the step, read and not stepped, stepped and read again, or kept: none is in a wrong sum."""

import copy
from collections import deque

import pytest
import torch
from attached import attached
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from dpbench import Misuse
from dpbench.conformance.modules import Net
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
    settings = {"batch_size": EXPECTED, "sample_size": RECORDS, "noise_multiplier": 0.0, "epochs": 2} | changes
    generator = torch.Generator().manual_seed(key)
    return attached(nn.Linear(RECORDS, 1, bias=False).double(), lr=0.0, **settings, generator=generator)


def counts(model):
    return (model.weight.grad[0] * EXPECTED).round().long().tolist()


def often(ids):
    return torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=RECORDS).tolist()


@pytest.mark.parametrize("loading", [PADDED, PIECES], ids=["padded", "pieces"])
def test_a_batch_that_was_read_and_left_out_is_not_taken_for_the_next(loading):
    model, optimizer, engine = make()
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


@pytest.mark.parametrize("least", [0, EXPECTED])
def test_batches_that_were_left_out_are_told_of(least):
    """Their sizes are private, and decide here which ones are released."""
    model, optimizer, engine = make()
    for x, _ in engine.data_loader(DATA):
        if len(x) >= least:
            optimizer.step(loss=model(x)[:, 0])
    said = f"{4 - engine.steps} of data_loader's batches left out"
    assert any(each.startswith(said) for each in engine.privacy_spent().caveats) == (engine.steps < 4) == bool(least)


def test_what_reads_a_parameter_before_the_model_is_called_is_of_the_same_pass():
    tied = Net(lambda net, x: x.sum(1) + 0 * net.weight.sum(), weight=torch.ones(1, RECORDS, dtype=torch.float64))
    model, optimizer, engine = attached(tied, batch_size=EXPECTED, noise_multiplier=0.0, backend="microbatch")
    engine._recorder._occasions = None  # which would look at the graph of the inputs
    for count in (5, 9, 5):
        losses = model(X[:count] * model.weight)
    optimizer.step(loss=losses)
    assert counts(model) == often(range(5))


@pytest.mark.parametrize("read", [1, 2])
def test_what_was_stepped_is_not_stepped_again(read):
    model, optimizer, engine = make()
    batches = iter(engine.data_loader(DATA, **PIECES))
    (x, _), *_ = [next(batches) for _ in range(read)]
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


@pytest.mark.gpu
@pytest.mark.parametrize("loading", [{}, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_copy_on_a_gpu_of_what_was_stepped_is_not_stepped(depth, loading):
    """Each x.to(device) is another tensor, as where the loss of each head has a step of its own."""
    settings = {"batch_size": EXPECTED, "sample_size": RECORDS, "epochs": 2}
    model, optimizer, engine = attached(nn.Linear(RECORDS, 1).double().cuda(), **settings)
    with pytest.raises(Misuse, match=f"{DONE}|expected one loss for each"):  # of another size than the next one
        for x, _ in ahead(engine.data_loader(DATA, **loading), depth):
            for _ in range(2):
                optimizer.step(loss=model(x.cuda())[:, 0])
                torch.cuda.synchronize()
    assert engine.steps <= 2


def test_after_a_step_its_batch_may_be_evaluated():
    """Also where what the model reads is another view that nobody would know."""
    for view, loading in ((lambda x: x, PADDED), (lambda x: x.flip(1), {"max_physical_batch_size": 16})):
        model, optimizer, engine = make()
        for x, _ in engine.data_loader(DATA, **loading):
            optimizer.step(loss=model(view(x))[:, 0])
            model(view(x))
        assert engine.drawn == 4 and engine.privacy_spent().sampled_by == "engine"


def test_batches_that_were_kept_are_not_stepped_in_another_epoch():
    model, optimizer, engine = make()
    kept = list(engine.data_loader(DATA, **PADDED))
    for x, _ in kept:
        optimizer.step(loss=model(x)[:, 0])
    for x, moved in zip(
        (x for x, _ in kept[-3:]), (lambda x: x, lambda x: x * 2 - 1, lambda x: x.flip(1)), strict=True
    ):
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


def handed_out(*batches):
    tickets = Tickets()
    handed = []
    for step, batch in enumerate(batches):
        count = len(batch[0] if isinstance(batch, tuple) else batch)
        handed.append(Ticket(step, True, count, count, batch))
        tickets.hand_out(handed[-1])
    return tickets, handed


def test_sparse_samples_and_single_ones_are_told_apart():
    sparse = torch.zeros(2, 8, 20_000)
    sparse[0, torch.arange(8), 13 + 450 * torch.arange(8)] = 1
    sparse[1, torch.arange(8), 17 + 450 * torch.arange(8)] = 1
    black = torch.zeros(2, 1, 784)  # but for a pixel in the middle
    black[0, 0, 391], black[1, 0, 402] = 1, 1
    for batches in (sparse, black):
        for copied in (lambda x: x, lambda x: x.clone()):
            count = batches.shape[1]
            tickets, handed = handed_out(*(batch.clone() for batch in batches))
            tickets.read(copied(batches[1]), count, False)
            assert tickets.take(0) is handed[1]


def test_a_batch_is_known_beside_tensors_that_the_caller_makes():
    shared = torch.arange(9)  # of every batch, as positions are
    batches = [(torch.rand(9, 7), shared) for _ in range(3)]
    tickets, handed = handed_out(*batches)
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
        tickets, handed = handed_out(other, batch)
        tickets.read((batch - 0.3) / 0.2, len(batch), False)
        assert tickets.take(0) is handed[1]
    tickets.hand_out(handed[1])
    tickets.hand_out(Ticket(5, True, 9, 9, same))
    with pytest.raises(Misuse, match="that are none of these"):
        tickets.read(torch.rand(9, 7, generator=numbers), 9, False)


def ahead(loader, depth):
    """Yield what the loader yields, `depth` batches later: accelerate, timm and transformers do so."""
    waiting = deque()
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > depth:
            yield waiting.popleft()
    yield from waiting


def releases(wrap, moved=lambda x: x, **loading):
    """How often each record is in the sum of each step: [steps, RECORDS]."""
    model, optimizer, engine = make()
    found = []
    for _ in range(2):
        loader = engine.data_loader(DATA, **loading)
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
    "padded pieces": {"max_physical_batch_size": 4, "pad": True, "num_workers": 1},  # which read ahead, too
}


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("loading", LOADING)
def test_what_is_read_ahead_is_released_as_it_was_drawn(loading, depth):
    found, engine = releases(lambda loader: ahead(loader, depth), **LOADING[loading])
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


@pytest.mark.parametrize("kind", MOVED)
def test_a_batch_is_known_by_its_tensors_and_by_copies_of_them(kind):
    plain, _ = releases(iter, moved=MOVED[kind], **LOADING["padded"])
    found, _ = releases(lambda loader: ahead(loader, 2), moved=MOVED[kind], **LOADING["padded"])
    torch.testing.assert_close(found, plain)


def test_what_is_not_known_is_refused_by_name():
    model, optimizer, engine = make()
    with pytest.raises(Misuse, match=r"of the 2 batches that data_loader has handed out .* that are none of these"):
        for rows, _ in ahead(engine.data_loader(DATA, max_physical_batch_size=RECORDS, pad=True), 1):
            optimizer.step(loss=model(torch.randn_like(rows))[:, 0])
    assert engine.steps == 0


def test_one_batch_after_the_other_may_be_changed_at_will():
    model, optimizer, engine = make()
    for rows, _ in engine.data_loader(DATA, max_physical_batch_size=RECORDS):
        optimizer.step(loss=model(torch.randn_like(rows))[:, 0])
    assert engine.steps == 4 and engine.privacy_spent().sampled_by == "engine"


@pytest.mark.parametrize("collate_fn", [default_collate, list])
@pytest.mark.parametrize("again", [False, True])
def test_padding_is_known_by_its_place_and_must_stay_there(collate_fn, again):
    """Also if another pass of the same step has read the batch as it was."""
    model, optimizer, engine = make()
    for rows in engine.data_loader(list(DATA), max_physical_batch_size=16, pad=True, collate_fn=collate_fn):
        x, real = (rows[0] if collate_fn is default_collate else torch.stack([x for x, _ in rows])), engine.mask
        order = torch.randperm(len(x))
        if real.all() or (order[~real] == torch.arange(len(x))[~real]).all():
            optimizer.step(loss=model(x[order])[:, 0])
            continue
        if again:
            model(x)
        losses = model(x[order])[:, 0]
        with pytest.raises(Misuse, match="samples of a padded batch of data_loader in its order"):
            optimizer.step(loss=losses)
        return


def test_padding_is_known_in_a_part_of_the_features():
    ids = torch.randint(9, 5000, (6, 12), generator=torch.Generator().manual_seed(0))
    tickets, ticket = Tickets(), Ticket(0, True, 4, 6, ids)
    for inputs, is_known in ((ids[:, :-1].clone(), True), (ids.t().clone().t()[:, 3:9].float() / 7, True)):
        tickets.hand_out(ticket)
        tickets.read(inputs, 6, False)
        assert ticket.in_order == is_known and not ticket.has_order([inputs.flip(0)])
        tickets.clear()


def test_a_checkpoint_does_not_count_what_was_read_ahead_as_done():
    model, optimizer, engine = make()
    for rows, _ in ahead(engine.data_loader(DATA), 2):
        optimizer.step(loss=model(rows)[:, 0])
        if engine.steps == 2:
            break
    assert engine.drawn == engine.state_dict()["drawn"] == 2
    assert next(iter(engine.data_loader(DATA)))[1].tolist() == engine._sampler.batch(2).tolist()


def test_parts_of_one_tensor_are_told_apart():
    """As a data set in memory hands them out: one storage holds all batches."""
    whole = torch.randn(12, 5)
    batches = whole.split(4)  # which whoever reads ahead keeps
    tickets, handed = handed_out(*batches)
    tickets.read(batches[1].view(4, 5), 4, False)
    assert tickets.take(0) is handed[1] and len(tickets) == 1


def test_a_batch_whose_step_has_raised_is_tried_again_as_itself():
    """With one more read ahead, which was taken for it: its padding and its pieces are another batch's."""
    for loading in (LOADING["whole"], LOADING["padded pieces"]):
        model, optimizer, engine = make()
        loader = engine.data_loader(DATA, **loading)
        expected, _ = releases(lambda loader: ahead(loader, 1), **loading)
        found, failed = [], False
        for rows, _ in ahead(loader, 1):
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
    batches = iter(engine.data_loader(DATA))
    rows, _ = next(batches)
    with pytest.raises(RuntimeError, match="of a scheduler"):
        optimizer.step(loss=model(rows)[:, 0])
    with pytest.raises(Misuse, match="a second release of the same sample"):
        model(rows)
    rows, _ = next(batches)
    optimizer.step(loss=model(rows)[:, 0])
    assert engine.steps == 2


def test_what_is_unknown_after_a_failure_is_refused():
    model, optimizer, engine = make()
    batches = iter(engine.data_loader(DATA))
    rows, _ = next(batches)
    with pytest.raises(Misuse, match="shape"):
        optimizer.step(loss=model(rows).sum())
    with pytest.raises(Misuse, match="begin to iterate anew"):
        model(torch.rand(rows.shape, dtype=rows.dtype))
    rows, _ = next(iter(engine.data_loader(DATA)))
    optimizer.step(loss=model(rows)[:, 0])


BESIDE = {
    "a mask without padding": torch.ones(5, dtype=torch.bool),
    "True": True,
    "uint16": torch.ones(5, dtype=torch.uint16),
    "complex": torch.full((5,), 1j),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
    "not a number": torch.full((5,), float("nan")),
    "sparse": torch.eye(5)[0],
}


def rows_beside(beside):
    return [(row, beside) for row in X]


@pytest.mark.parametrize("kind", BESIDE)
def test_whatever_torch_collates_is_loaded(kind):
    def collated(samples):
        rows, beside = default_collate(samples)
        return rows, beside.to_sparse() if kind == "sparse" else beside

    model, optimizer, engine = make()
    for rows, _ in engine.data_loader(rows_beside(BESIDE[kind]), collate_fn=collated):
        optimizer.step(loss=model(rows)[:, 0])
    assert engine.steps == 4


class Plain:
    def __init__(self, samples):
        self.rows, self.beside = default_collate(samples)


def nested(samples):
    rows, beside = default_collate(samples)
    return rows, torch.nested.nested_tensor(list(beside), layout=torch.jagged)


@pytest.mark.parametrize(("collate", "came"), [(Plain, "got Plain"), (nested, "got one that is nested")])
def test_what_cannot_be_empty_is_refused_when_the_loader_is_made(collate, came):
    _, _, engine = make()
    with pytest.raises(ValueError, match=f"{came}: a Poisson sample may be empty"):
        engine.data_loader(rows_beside(torch.ones(5)), collate_fn=collate)
    engine.data_loader(rows_beside(torch.ones(5)), collate_fn=collate, max_physical_batch_size=4, pad=True)
