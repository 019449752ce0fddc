"""Simulated peaks: by hand where that is possible, and beside what the CPU's allocator measured."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import slow_unless
from test_measure_memory import overlapping
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clipping import BACKENDS, UnsupportedModel, load_backend
from clipping.backends.tape import BkMixed
from dpbench.measure import memory
from dpbench.measure.bench import Step, storage_bytes
from dpbench.measure.memory import measured_peak
from dpbench.measure.simulate import StorageLifetimes, simulated_device, simulated_peak
from dpbench.trials import PeakTrial

MIB = 2**20
#: Opacus makes tensor subclasses of parameters, and exchanges parameters: neither can be done to a fake one.
NOT_SIMULATED = {"opacus_functorch", "opacus_ew"}
SIMULATED = [name for name in BACKENDS if name not in NOT_SIMULATED]
#: The planner of bk_mixed times its routes in the second step, on real tensors only: the variant never does.
COMPARED = ["bk_mixed:memory" if name == "bk_mixed" else name for name in SIMULATED]
#: One that does nothing beside training, and one of each kind of what the others do.
QUICK = ("nonprivate", "microbatch", "vmap", "fastgradclip", "ghost", "bk_mixed:memory", "opacus_hooks")


@dataclass
class ByHand:
    """A step that is a function of the tensors it holds."""

    function: Callable[..., object]
    held: list[Tensor] = field(default_factory=list)

    def __call__(self) -> object:
        return self.function(*self.held)

    def holds(self) -> list[Tensor]:
        return self.held


def simulated(function: Callable[..., object], make: Callable[[], list[Tensor]] = list) -> tuple[int, int]:
    """(baseline, growth over it) in MiB."""
    found = simulated_peak(lambda: contextlib.nullcontext(ByHand(function, make())))
    assert found.source == "simulated"
    return found.baseline_bytes // MIB, (found.peak_bytes - found.baseline_bytes) / MIB


def mebibytes(count: int, **options: Any) -> Tensor:
    return torch.empty(count * MIB // 4, **options)


def views() -> None:
    base = mebibytes(6)
    kept = [base.view(2, -1), base[: MIB // 8], *base.split(MIB // 8), base.detach()]
    base.add_(1)
    kept[0].t().mul_(2)
    base.data.zero_()


def outlived_by_a_view() -> None:
    view = mebibytes(6)[:10]
    mebibytes(3)
    del view
    mebibytes(8)


def in_a_list() -> None:
    parts = torch.broadcast_tensors(mebibytes(1), mebibytes(1))
    torch.stack(parts)


@pytest.mark.parametrize(
    ("step", "mib"), [(partial(overlapping, "cpu"), 12), (views, 6), (outlived_by_a_view, 9), (in_a_list, 4)]
)
def test_a_peak_known_by_hand(step, mib):
    assert simulated(step) == (0, mib)


def test_what_is_held_is_the_baseline_and_no_growth():
    def step(x):
        x.add_(1)
        return x.view(2, -1).t() + 1

    assert simulated(step, lambda: [mebibytes(3)]) == (3, 3)


def test_what_autograd_saves_lives_until_the_backward_pass_is_done_with_it():
    def step(x):
        y = x.tanh()  # saves y
        z = y.exp()  # saves z
        w = z.tanh()  # saves w
        total = w.sum()
        del y, z, w
        return torch.autograd.grad(total, x)

    # 3 saved; tanh's backward makes a gradient (4) and lets w go; each further one replaces the one before it
    assert simulated(step, lambda: [mebibytes(1, requires_grad=True)])[1] == pytest.approx(4, abs=1e-4)


def test_nothing_is_alive_after_the_step_but_what_was_before():
    with FakeTensorMode(), StorageLifetimes() as lifetimes, torch.autograd.set_multithreading_enabled(False):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5))
        x = torch.randn(4, 3, 8, 8)
        gc.collect()
        before = lifetimes.alive
        assert before == storage_bytes([*model.parameters(), x])
        model(x).sum().backward()
        assert lifetimes.peak > lifetimes.alive == before + storage_bytes(p.grad for p in model.parameters())
        model.zero_grad()
        assert lifetimes.alive == before


def test_a_model_built_of_real_tensors_counts_once():
    weight = torch.randn(MIB // 4)
    baseline, growth = simulated(lambda w: w.view(2, -1).t() * 2, lambda: [_faked(weight)])
    assert (baseline, growth) == (1, 1)


def _faked(real: Tensor) -> Tensor:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert isinstance(mode, FakeTensorMode)
    return mode.from_tensor(real)


def test_a_gpu_is_simulated_on_the_cpu_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (simulated_device("cpu"), simulated_device("cuda"), simulated_device("cuda:1")) == ("cpu",) * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert simulated_device("cuda") == "cuda"


class Residual(nn.Module):
    """A small ResNet: stem, two residual blocks with GroupNorm and in-place activations, strided convolution, head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.GroupNorm(4, width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(2)
        )
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x.clone())
        return self.head(F.relu(self.down(x)).mean((2, 3)))


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 6 * 6, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@contextlib.contextmanager
def opened(make: Callable[[], nn.Module], backend: str, batch_size: int) -> Iterator[Step]:
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    with load_backend(backend)(make(), loss_fn, verify=False) as open_backend:
        yield Step(open_backend, torch.randn(batch_size, 3, 16, 16), torch.randint(0, 10, (batch_size,)))


@pytest.mark.parametrize(
    ("backend", "make"),
    slow_unless(lambda name, make: make is Residual and name in QUICK, itertools.product(COMPARED, (plain, Residual))),
)
def test_the_simulated_peak_is_the_measured_one(backend, make):
    """Within 5 %, with what convolutions allocate inside. In small networks each temporary weighs much."""
    skip_if_unavailable(backend)
    found = simulated_peak(lambda: opened(make, backend, 16))
    with opened(make, backend, 16) as step:
        if isinstance(step.backend, BkMixed):  # the plan that fake tensors get
            step.backend.planner.timing = False
        step()
        measured = measured_peak(Step(step.backend, step.inputs, step.targets), step.holds(), torch.device("cpu"))
    assert found.baseline_bytes == measured.baseline_bytes
    assert 0.95 < found.peak_bytes / measured.peak_bytes < 1.05


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_that_meet_are_added_in_place_unless_somebody_holds_the_first(keep):
    """Two gradients of 1 MiB, one after the other: with a hook that keeps the first, the sum is a tensor of its own."""
    kept: list[Any] = []

    def step(x: Tensor) -> object:
        y = x * 1  # its gradient is the sum
        one = (y * 2).sum()
        branch = y * 3
        if keep:
            branch.grad_fn.register_hook(lambda into, _: kept.append(into[0]))
        total = one + branch.sum()
        del y, branch
        found = torch.autograd.grad(total, x)
        kept.clear()
        return found

    def real() -> float:
        x = mebibytes(1, requires_grad=True)
        return (measured_peak(lambda: step(x), [x], torch.device("cpu")).peak_bytes - MIB) / MIB

    growth = simulated(step, lambda: [mebibytes(1, requires_grad=True)])[1]
    assert growth == pytest.approx(real(), abs=0.01) and round(growth) == 2 + keep


def test_what_a_gpu_s_kernels_allocate_is_not_guessed():
    here, there = (
        memory.run(PeakTrial(model="cnn", backend="nonprivate", batch_size=8, device=device, simulated=True))["memory"]
        for device in ("cpu", "cuda")
    )
    if not torch.cuda.is_available():
        assert there["peak_bytes"] < here["peak_bytes"]


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("backend", ["nonprivate", "microbatch", "mixed_ghost", "vmap"])
def test_each_part_of_a_step_has_its_peak(backend, simulated):
    trial = PeakTrial(model="cnn", backend=backend, batch_size=4, simulated=simulated)
    found = memory.run(trial)["memory"]
    phases = found["phases"]
    assert list(phases) == ["model", "forward", "backward", "step"]
    assert phases["model"] == 4 * 550_570 and phases["model"] < phases["forward"] < phases["backward"]
    assert phases["step"] == max(phases["forward"], phases["backward"]) == found["peak_bytes"]


@pytest.mark.parametrize("backend", sorted(NOT_SIMULATED))
def test_what_does_not_run_on_fake_tensors_is_refused_with_the_reason(backend):
    skip_if_unavailable(backend)
    trial = PeakTrial(model="cnn", backend=backend, batch_size=4, simulated=True)
    with pytest.raises(UnsupportedModel, match=r"\(simulated with fake tensors, .* measured .*\)$"):
        memory.run(trial)
    assert memory.run(trial.replace(simulated=False))["memory"]["peak_bytes"] > 0


def skip_if_unavailable(backend: str) -> None:
    if (reason := load_backend(backend).unavailable()) is not None:
        pytest.skip(reason)


def test_memory_that_this_machine_has_not_can_be_simulated():
    trial = PeakTrial(model="resnet18", backend="vmap", batch_size=16384, simulated=True)
    peak = memory.run(trial)["memory"]["peak_bytes"]
    assert peak > 16384 * 4 * 11_173_962  # a gradient of every parameter for each sample: 732 GB
    few = memory.run(trial.replace(batch_size=8192))["memory"]["peak_bytes"]
    assert peak / few == pytest.approx(2, rel=1e-3)
