"""Measured peaks, on steps whose peak is known by hand."""

import dataclasses

import pytest
import torch

from dpbench.measure import memory
from dpbench.measure.bench import BACKWARD, FORWARD, Memory, Phases, device_of, storage_bytes
from dpbench.measure.memory import measured_peak, set_budget, within_budget
from dpbench.trials import PeakTrial
from dpbench.trials.outcome import OverBudget

CPU = torch.device("cpu")
MIB = 2**20
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.alone])]


def mebibytes(count: int, device: str = "cpu") -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8, device=device)


def overlapping(device: str) -> None:
    """4, then 4 + 8, then 8, then 8 + 2 MiB."""
    first = mebibytes(4, device)
    second = mebibytes(8, device)
    del first
    third = mebibytes(2, device)
    del second, third


def one_after_the_other(device: str) -> None:
    for size in (3, 5, 4):
        mebibytes(size, device)


def views_and_in_place(device: str) -> None:
    base = mebibytes(6, device)
    halves = base.view(2, -1).unbind()
    halves[0].zero_()
    base.view(2, -1).t().bitwise_not_()


def nothing(device: str) -> None:
    pass


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("step", "mib"), [(overlapping, 12), (one_after_the_other, 5), (views_and_in_place, 6), (nothing, 0)]
)
def test_the_peak_of_a_step_known_by_hand(step, mib, device):
    measured = measured_peak(lambda: step(device), [], device_of(device))
    others = measured.peak_bytes - mib * MIB
    assert others == 0 if device == "cpu" else others < MIB
    assert measured.source == f"{device}_allocator"


def test_the_baseline_is_in_the_peak_and_counts_a_storage_once():
    held = mebibytes(3)
    measured = measured_peak(lambda: overlapping("cpu"), [held, held.view(3, -1), held[:MIB]], CPU)
    assert (measured.baseline_bytes, measured.peak_bytes) == (3 * MIB, 15 * MIB)


def test_what_an_earlier_step_left_in_a_cycle_is_not_released_during_this_one():
    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself, cycle.tensor = cycle, mebibytes(9)
    del cycle
    assert measured_peak(lambda: overlapping("cpu"), [], CPU).peak_bytes == 12 * MIB


def test_storages_are_counted_once_and_whole():
    base = torch.zeros(10, dtype=torch.float64)
    assert storage_bytes([base[:2], base[5:], base.view(2, 5)]) == 80
    assert storage_bytes([base, base.clone()]) == 160
    assert storage_bytes([]) == 0


def test_over_budget_says_by_how_much_and_keeps_the_result():
    result = {"memory": Memory("cpu_allocator", 3 * 2**30, 1).as_record(), "parameters": 7}
    assert within_budget(result, None) is result and within_budget(result, 3 * 2**30) is result
    with pytest.raises(OverBudget) as raised:
        within_budget(result, 2 * 2**30)
    assert str(raised.value) == "peak 3 GiB (cpu_allocator), over the budget of 2 GiB"
    assert raised.value.result is result


@pytest.mark.parametrize("simulated", [False, True])
def test_the_body_of_a_peak_trial(simulated):
    trial = PeakTrial(model="cnn", backend="nonprivate", batch_size=4, simulated=simulated, memory_budget=2**30)
    result = memory.run(trial)
    assert result["parameters"] == 550_570 and result["budget_bytes"] == 2**30
    kept = result["memory"]
    assert kept["source"] == ("simulated" if simulated else "cpu_allocator")
    batch = 4 * 3 * 32 * 32 * 4 + 4 * 8
    assert kept["baseline_bytes"] == 4 * 550_570 + batch
    # at least a gradient of every parameter beside the parameter
    assert 2 * 4 * 550_570 < kept["peak_bytes"] < 10 * 4 * 550_570
    with pytest.raises(OverBudget, match="over the budget"):
        memory.run(trial.replace(memory_budget=kept["peak_bytes"] - 1))
    assert memory.run(trial.replace(memory_budget=kept["peak_bytes"]))["memory"] == kept


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the formulas are oneDNN's")
def test_a_simulated_step_has_the_threads_that_a_measured_one_would_have(monkeypatch):
    """The weight gradient of few groups takes memory in each thread: conv_memory's."""
    trial = PeakTrial(model="resnext", backend="nonprivate", batch_size=1, simulated=True)
    before, peaks = torch.get_num_threads(), []
    for cpus in (1, 8):
        monkeypatch.setattr(memory, "available_cpus", lambda cpus=cpus: cpus)
        peaks.append(memory.run(trial)["memory"]["peak_bytes"])
        assert torch.get_num_threads() == before
    assert peaks[0] < peaks[1]


def test_a_budget_is_no_business_of_the_cpu():
    set_budget(1, CPU)
    mebibytes(1)


class Books:
    """What CUDA's allocator has on its books, by hand: current and peak of each kind, in MiB."""

    KINDS = ("allocated", "active", "reserved")

    def __init__(self, monkeypatch) -> None:
        self.now = dict.fromkeys(self.KINDS, 0)
        self.peak = dict(self.now)
        self.segments = [self.segment((0, 0), 24, 9)]
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: self.peak.update(self.now))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: self._stats())
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)

    @staticmethod
    def segment(pool: tuple[int, int], total: int, allocated: int, device: int = 0) -> dict[str, object]:
        sizes = {"total_size": total * MIB, "allocated_size": allocated * MIB}
        return sizes | {"segment_pool_id": pool, "device": device}

    def _stats(self) -> dict[str, int]:
        return {f"{kind}_bytes.all.peak": self.peak[kind] * MIB for kind in self.KINDS}

    def be(self, allocated: int, active: int, reserved: int) -> None:
        self.now = {"allocated": allocated, "active": active, "reserved": reserved}
        self.peak = {kind: max(self.peak[kind], self.now[kind]) for kind in self.KINDS}


@pytest.mark.parametrize("by_phase", [False, True])
def test_on_cuda_what_was_reserved_stands_beside_what_was_allocated(monkeypatch, by_phase):
    books = Books(monkeypatch)
    phases = Phases() if by_phase else None

    def step() -> None:
        for phase, states in ((FORWARD, [(4, 5, 20), (9, 10, 20)]), (BACKWARD, [(7, 8, 24), (6, 6, 24)])):
            if phases is not None:
                phases.entered(phase)
            for state in states:
                books.be(*state)
        books.be(2, 2, 12)

    measured = measured_peak(step, [], torch.device("cuda", 0), phases)
    known = Memory("cuda_allocator", 9 * MIB, 0, reserved_bytes=24 * MIB)
    by_part = {FORWARD: 9 * MIB, BACKWARD: 9 * MIB}  # what the forward pass has left is there when backward begins
    assert measured == dataclasses.replace(known, phases=by_part if by_phase else None)


def test_what_a_replay_works_in_is_in_its_peak_though_the_books_call_it_free(monkeypatch):
    """`shared/gpu/ratio.py` read 0.35 GiB for a replay of 2: a graph's pool holds its activations for good."""
    books = Books(monkeypatch)
    own = [books.segment((0, 1), 2000, 40), books.segment((0, 2), 100, 0), books.segment((0, 1), 7, 7, device=1)]
    books.segments += own
    replay = measured_peak(lambda: books.be(350, 350, 2500), [], torch.device("cuda", 0), Phases())
    assert replay.reserved_bytes == 2500 * MIB
    assert replay.peak_bytes == (350 + 2060) * MIB == max(replay.phases.values())  # 40 of them are in the books


@pytest.mark.gpu
@pytest.mark.alone
def test_the_peak_of_a_replay_is_that_of_the_same_step_without_a_graph():
    device = device_of("cuda")
    x, graph = torch.ones(8 * MIB, device=device), torch.cuda.CUDAGraph()
    x.exp().sin().sum()  # what is loaded at the first use is no part of it

    def step() -> torch.Tensor:
        return x.exp().sin().sum()

    eager = measured_peak(step, [x], device)
    with torch.cuda.graph(graph):
        step()
    replayed = measured_peak(graph.replay, [x], device)
    assert replayed.peak_bytes == pytest.approx(eager.peak_bytes, rel=0.3)


@pytest.mark.gpu
@pytest.mark.alone
def test_cuda_refuses_what_is_beyond_the_budget():
    device = device_of("cuda")
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved(device)  # workspaces of libraries that earlier tests used
    try:
        set_budget(kept + 64 * MIB, device)
        mebibytes(32, "cuda")
        with pytest.raises(torch.OutOfMemoryError):
            mebibytes(96, "cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    measured = measured_peak(lambda: overlapping("cuda"), [], device)
    assert measured.reserved_bytes >= measured.peak_bytes > 0
