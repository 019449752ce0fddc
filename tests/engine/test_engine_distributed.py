"""One process and two take the same path: the same sample, the same sum of clipped gradients, the same noise, once."""

import io
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import ranks
from torch import nn

from dpbench import Misuse, PrivacyEngine
from dpbench.engine import release

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


def attached(called, optimizer, **settings):
    """A seeded engine."""
    engine = PrivacyEngine(called, **settings, generator=torch.Generator().manual_seed(7))
    with warnings.catch_warnings(action="ignore"):
        engine.attach(optimizer)
    return engine


def make(rank=0, wrap=False, batch_size=6):
    """(the wrapped model to call, model, optimizer, engine, data)."""
    torch.manual_seed(rank)  # the models differ until the engine synchronises them
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    called = nn.parallel.DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    settings = {"batch_size": batch_size, "sample_size": 60, "max_grad_norm": 0.5, "noise_multiplier": 1.0}
    engine = attached(called, optimizer, **settings)
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 6, generator=numbers), torch.randint(0, 3, (60,), generator=numbers)
    return called, model, optimizer, engine, torch.utils.data.TensorDataset(x, y)


def go_on(called, optimizer, engine, data, steps):
    while engine.steps < steps:
        for xs, ys in engine.data_loader(data, max_physical_batch_size=2):
            optimizer.step(loss=F.cross_entropy(called(xs), ys, reduction="none"))
            if engine.steps == steps:
                break


def train(rank=0, wrap=False):
    """The state after two epochs, and the number of steps."""
    called, model, optimizer, engine, data = make(rank, wrap)
    go_on(called, optimizer, engine, data, 20)
    engine.detach()
    return model.state_dict(), engine.steps


def resumed(rank, own):
    """(the state without an interruption, the state with one after 13 of 20 steps, the spent privacy of both)."""
    called, model, optimizer, engine, data = make(rank)
    go_on(called, optimizer, engine, data, 13)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, engine)], file)
    box = [file.getvalue()]
    if not own:
        dist.broadcast_object_list(box, src=0)
    go_on(called, optimizer, engine, data, 20)
    spent = [engine.privacy_spent()]
    engine.detach()
    called, again, optimizer, engine, data = make(rank + 5)
    for part, state in zip((again, optimizer, engine), torch.load(io.BytesIO(box[0])), strict=True):
        part.load_state_dict(state)
    go_on(called, optimizer, engine, data, 20)
    spent.append(engine.privacy_spent())
    engine.detach()
    return model.state_dict(), again.state_dict(), spent


def different(rank):
    """The error message if the engines' settings differ."""
    try:
        make(rank, batch_size=6 - rank)
    except Misuse as error:
        return str(error)


def failing(rank):
    """(errors, (steps, logical batches drawn, how often the released sum contains each record) for each step).

    The second process has a record with NaN; both catch the error and go on.
    """
    torch.manual_seed(0)
    model = nn.Linear(40, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"batch_size": 20, "sample_size": 40, "max_grad_norm": 1.0, "noise_multiplier": 0.0}
    engine = attached(model, optimizer, **settings)
    raised, released = [], []
    for _ in range(4):
        for number, (x,) in enumerate(engine.data_loader(torch.utils.data.TensorDataset(torch.eye(40)))):
            losses = model(x)[:, 0] * (float("nan") if rank == 1 and number == 1 else 1.0)
            try:
                optimizer.step(loss=losses)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
            else:
                released.append((engine.steps, engine.drawn, (model.weight.grad * 20).tolist()[0]))
    engine.detach()
    return raised, released


def failing_later(rank):
    """(the error after a step that was not finite, the gradient of that step times b, the number of steps)."""
    called, _, optimizer, engine, data = make()
    x, y = data[:3]
    for factor in (1.0, float("nan") if rank == 1 else 1.0):
        optimizer.step(loss=F.cross_entropy(called(x), y, reduction="none") * factor)
    released = torch.cat([p.grad.flatten() for p in called.parameters()])
    try:
        optimizer.step(loss=F.cross_entropy(called(x), y, reduction="none"))
    except FloatingPointError as error:
        optimizer.step(loss=F.cross_entropy(called(x), y, reduction="none"))
        return str(error), released, engine.steps
    return None


def main(folder):
    """In each process: what became of each training; the last one with flags that are read later, as on a GPU."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = [train(rank), train(rank, wrap=True), resumed(rank, own=True), resumed(rank, own=False)]
    found += [different(rank), failing(rank)]
    release.LATER = {"cpu"}
    return [*found, failing_later(rank)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What became of each of two processes; see `main`."""
    return ranks(tmp_path_factory.mktemp("two"), Path(__file__))


def test_one_process_and_two(two):
    alone, steps = train()
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).state_dict()
    assert all((p - start[name]).abs().max() > 0.02 for name, p in alone.items()) and steps == 20
    first, second = (found[:2] for found in two)
    for (mine, count), (others, _) in zip(first, second, strict=True):  # without and with DistributedDataParallel
        assert count == 20
        torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, others, rtol=0, atol=0)


@pytest.mark.parametrize("place", [2, 3], ids=["each its own checkpoint", "the first one's for all"])
def test_two_processes_resume_bit_for_bit(two, place):
    ends = []
    for found in two:
        whole, again, (spent, spent_again) = found[place]
        assert all(torch.equal(p, again[name]) for name, p in whole.items())
        assert spent == spent_again and spent.steps == 20 and spent.sampled_by == "engine"
        ends.append(again)
    assert all(torch.equal(p, ends[1][name]) for name, p in ends[0].items())


def test_a_failure_in_one_process_is_one_in_all_and_no_record_is_in_a_sum_twice(two):
    (raised, released), (raised_there, released_there) = (found[5] for found in two)
    assert released == released_there and len(raised) == len(raised_there) == 4
    assert all(said.startswith("Misuse: expected every process to have its part") for said in raised)
    assert all(said.startswith("FloatingPointError: ") for said in raised_there)
    assert [steps for steps, _, _ in released] == [1, 2, 3, 4] and [drawn for _, drawn, _ in released] == [1, 3, 5, 7]
    for _, _, counts in released:
        assert all(abs(count - round(count)) < 1e-5 and round(count) in (0, 1) for count in counts)
        assert 0 < sum(counts) < 40


def test_a_step_that_is_not_finite_is_told_later_in_all_processes_at_once(two):
    (said, released, steps), (said_there, released_there, steps_there) = (found[6] for found in two)
    assert said == said_there and "got NaN or inf in '0.weight' at step 2" in said
    assert torch.equal(released, released_there) and released.isfinite().all() and released.any()
    assert steps == steps_there == 3


def test_processes_with_other_settings_are_told_everywhere(two):
    expected = "expected the same engine in every process, got batch_size=6 in the first and 5 in process 1"
    assert all(found[4].startswith(expected) for found in two)
