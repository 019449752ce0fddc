"""Steps as CUDA graphs, on a CPU: a recorder in CUDA's place runs what was recorded in the same memory."""

import contextlib
import itertools

import pytest
import torch
from fake_graph import Recorder, recording
from graphs import only
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import clipping.program.graphs
import clipping.program.step
from clipping import Flat, WrongGradient, compare, load_backend
from clipping.program.cuda_graph import Pool, Replayed, needs_host
from dpbench.conformance.cases import cross_entropy


class Stream:
    def __init__(self, device=None) -> None:
        self.device = device

    def wait_stream(self, other) -> None: ...


@pytest.fixture
def on_a_recorder(monkeypatch):
    Recorder.pools.clear()
    Recorder.count, numbers = 0, itertools.count()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def step(weight, count, x):
    count += 1
    y = (x @ weight).relu() * count
    return [y.sum(1), y.T @ x]


def test_a_replay_reads_what_lies_in_place_and_copies_the_batch(on_a_recorder):
    weight, count, other = torch.randn(4, 4), torch.zeros(()), torch.zeros(())
    replayed = Replayed(step, [weight, count, torch.randn(3, 4)], [2], Pool())
    count.zero_()
    kept = []
    for _ in range(4):
        weight.mul_(1.1)
        x = torch.randn(3, 4)
        wanted, found = step(weight, other, x), replayed(weight, count, x)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert torch.equal(count, other)
        kept.append((found, [each.clone() for each in found]))
        found[1].add_(1)  # the caller's to write to
    assert all(torch.equal(found[0], copy[0]) for found, copy in kept)
    assert Recorder.count == 2  # with the graph that keeps the memory


def test_lent_outputs_are_not_copied(on_a_recorder):
    weight, count = torch.randn(4, 4), torch.zeros(())
    replayed = Replayed(step, [weight, count, torch.randn(3, 4)], [2], Pool(lends=True), lent=1)
    (losses, lent), (others, same) = replayed(weight, count, torch.randn(3, 4)), replayed(weight, count, weight[:3])
    assert lent is same is replayed._outputs[1]
    assert losses.data_ptr() != others.data_ptr()


def test_what_lies_elsewhere_is_copied_from_then_on(on_a_recorder):
    """A parameter that was replaced, and a buffer that is bound anew in each step."""
    weight, first, x = torch.randn(4, 4), torch.full((), 5.0), torch.randn(3, 4)
    replayed = Replayed(step, [weight, first, x], [2], Pool())
    kept = first.clone(), weight.clone()
    for number in range(3):
        moved, count, other = torch.randn(4, 4), torch.full((), float(number)), torch.full((), float(number))
        wanted, found = step(moved, other, x), replayed(moved, count, x)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert count == other == number + 1  # it is written to
    assert torch.equal(first, kept[0])
    assert torch.equal(weight, kept[1])
    assert Recorder.count == 3


def test_after_a_failed_recording_the_next_step_is_recorded_anew(on_a_recorder, monkeypatch):
    """A step that runs out of memory may be tried again. The older graph reads what lay elsewhere."""
    weight, count, x = torch.randn(4, 4), torch.zeros(()), torch.randn(3, 4)
    pool, other = Pool(), torch.zeros(())
    replayed, moved = Replayed(step, [weight, count, x], [2], pool), torch.randn(4, 4)
    count.zero_()

    def full(run, device):
        run()
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(pool, "record", full)
        replayed(moved, count, x)
    assert count == 0
    for _ in range(2):
        wanted, found = step(moved, other, x), replayed(moved, count, x)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert torch.equal(count, other)


def test_after_a_failed_recording_another_pool_is_used(on_a_recorder):
    cpu, pool, weight = torch.device("cpu", 0), Pool(), torch.ones(3)

    def reads() -> None:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        pool.record(reads, cpu)
    first = Recorder.pools.copy()
    pool.record(lambda: weight.add_(1), cpu).replay()
    assert len(first) == 2 and pool._handle == max(first) and Recorder.pools == first
    assert weight.tolist() == [6.0] * 3  # of three runs before, the recording and the replay


@pytest.mark.parametrize("ends", [False, True])
def test_a_failed_recording_is_over_for_the_allocator_and_says_why(ends, on_a_recorder, monkeypatch):
    """Where CUDA cannot end it, torch raises before it tells its allocator, which would free no memory any more."""
    device, underway, used = torch.device("meta", 0), [], []

    def end(index, pool):
        if (index, pool) not in underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        underway.remove((index, pool))

    @contextlib.contextmanager
    def graph(graph, *, pool, **options):
        assert not underway, "captures_underway.empty() INTERNAL ASSERT FAILED"
        underway.append((0, pool))
        used.append(pool)
        try:
            yield
        except TypeError as error:
            if ends:
                end(0, pool)
                raise
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from error
        end(0, pool)
        used.remove(pool)  # when the graph is freed

    def run():
        if underway and len(used) == 1:
            raise TypeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: used.remove(pool))
    with pytest.raises(TypeError, match="not permitted"):
        Pool().record(run, device)
    assert not underway and len(used) == ends  # torch frees a graph that has ended


def test_a_recording_uses_a_stream_of_its_device_and_lets_other_threads_allocate(on_a_recorder, monkeypatch):
    device, options = torch.device("meta"), []
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **given: options.append(given) or graph)
    Pool().record(lambda: None, device)
    assert len(options) == 2
    assert all((x["stream"].device, x["capture_error_mode"]) == (device, "thread_local") for x in options)


def test_recording_again_draws_no_numbers(on_a_recorder):
    replayed = Replayed(lambda x: [x * torch.rand(3)], [torch.ones(3)], [], Pool())
    torch.manual_seed(0)
    first = replayed(torch.ones(3))[0]
    torch.manual_seed(0)
    assert torch.equal(replayed(torch.ones(3))[0], first)
    assert Recorder.count == 3


MIXED = {
    "nothing of the host": (lambda x: x * 2 + torch.arange(3, device=x.device), False),
    "a constant": (lambda x: x * torch.tensor(2.0, device="cpu") * (torch.arange(3, device="cpu") * 2)[1], False),
    "constants that are copied": (lambda x: x * torch.tensor([1.0, 2.0, 3.0], device="cpu").to(x.device), True),
    "a constant that is copied": (lambda x: x * torch.tensor(2.0, device="cpu").to(x.device), True),
    "an index": (lambda x: x[torch.tensor([0, 1], device="cpu")], True),
    "an argument": (lambda x, y: x * y, True),
    "a random number": (lambda x: x * torch.rand((), device="cpu"), True),
    "random numbers": (lambda x: x * torch.rand(3, device="cpu").to(x.device), True),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_replay_would_not_repeat_what_the_host_computes(name):
    run, needed = MIXED[name]
    given = (torch.empty(3, device="meta"), torch.ones((), device="cpu"))[: run.__code__.co_argcount]
    assert needs_host(make_fx(run, tracing_mode="fake")(*given), torch.device("meta")) == needed


def test_a_private_step_is_replayed(on_a_recorder, monkeypatch):
    """The traced step with its kernels; weights move in between, as an optimizer moves them."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    clip = Flat(max_grad_norm=0.5)
    only(monkeypatch, "replayed")
    made = clipping.program.step.Graph._made

    def on_a_gpu(graph, way, given, draws):
        with monkeypatch.context() as patched:
            patched.setattr(graph, "device", torch.device("cuda"))
            return made(graph, way, given, draws)

    monkeypatch.setattr(clipping.program.step.Graph, "_made", on_a_gpu)
    with (
        load_backend("bk_mixed")(model, cross_entropy, clip=clip, timing=False) as eager,
        load_backend("bk_mixed")(model, cross_entropy, clip=clip, compile=True, timing=False) as backend,
    ):
        for size in (6, 6, 6, 6, 5, 5, 5, 6):
            x, y = torch.randn(size, 1, 6, 6), torch.randint(3, (size,))
            assert compare(backend(x, y), eager(x, y)).within(1e-6)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.01 * torch.randn_like(p))
        assert list(backend.ways.values()) == ["replayed"] * 2
        assert (Recorder.count, len(Recorder.pools)) == (3, 1)  # both shapes share the memory that a graph keeps


def test_a_wrong_trace_is_refused_where_only_its_replay_was_wanted(monkeypatch):
    graph = clipping.program.step.Graph
    traced = graph._traced

    def tampered(self, given):
        right = traced(self, given)
        return lambda *tensors: [3 * x for x in right(*tensors)]

    monkeypatch.setattr(graph, "_traced", tampered)
    only(monkeypatch, "replayed")
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.randint(3, (6,))
    with (
        load_backend("bk_mixed")(model, cross_entropy, compile=True, timing=False) as backend,
        pytest.warns(RuntimeWarning, match="expected the step to run replayed"),
        pytest.raises(WrongGradient, match="as a graph"),
    ):
        for _ in range(4):
            backend(x, y)
