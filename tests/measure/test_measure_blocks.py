"""A simulated step lets the last block of a batch stand for all: to the byte, and with as few operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from marks import name_of, slow_unless
from test_measure_simulate import SIMULATED, Residual, opened, plain, skip_if_unavailable
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipping.accel import chunked_conv as pieces
from clipping.core.microbatching import InTurn
from clipping.norms import collection as norms
from clipping.rules import base
from dpbench.measure import memory, simulate
from dpbench.measure.bench import Memory, Step
from dpbench.measure.simulate import simulated_peak
from dpbench.trials import PeakTrial

#: Those that go through a batch in blocks.
BLOCKED = [name for name in SIMULATED if not name.startswith("opacus") and name not in ("private_cnn", "fastdp")]


@pytest.mark.parametrize(
    ("make", "backend"),
    slow_unless(
        lambda make, name: make is plain and name in ("microbatch", "ghost", "tf_microbatch:3", "bk_mixed:memory"),
        product([plain, Residual], [*BLOCKED, "tf_microbatch:3", "bk_mixed:memory"]),
    ),
    ids=name_of,
)
def test_the_last_block_stands_for_all_to_the_byte(backend, make, monkeypatch):
    tighten(monkeypatch)

    def every_block(batch_size: int) -> Memory:
        with monkeypatch.context() as patch:
            patch.setattr(simulate, "LastForAll", lambda _: InTurn())
            return peak(batch_size)

    def peak(batch_size: int) -> Memory:
        return simulated_peak(lambda: opened(make, backend, batch_size), phases=None)

    few = 16 if backend.startswith("tf_") else 0  # of the last microbatch, which may be smaller: a norm, losses
    for batch_size in (1, 7, 16, 23) if backend.startswith("tf_") else (1, 23):
        found, expected = peak(batch_size), every_block(batch_size)
        assert 0 <= expected.peak_bytes - found.peak_bytes <= few
        assert found.baseline_bytes == expected.baseline_bytes


def test_the_last_block_stands_for_all_in_each_part_of_a_step(monkeypatch):
    def phases() -> dict[str, int]:
        trial = PeakTrial(model="cnn", backend="microbatch", batch_size=6, simulated=True)
        return memory.run(trial)["memory"]["phases"]

    by_one = phases()
    monkeypatch.setattr(simulate, "LastForAll", lambda _: InTurn())
    assert by_one == phases()


class Wide(nn.Module):
    """Each layer large enough that 32 samples are several blocks, whatever a backend does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.body = nn.Conv2d(64, 64, 5, padding=2, bias=False)
        self.grouped = nn.Conv2d(64, 256, 3, stride=2, groups=4, bias=False)
        self.norm = nn.LayerNorm(7 * 7 * 256)
        self.linear = nn.Linear(7 * 7 * 256, 512, bias=False)
        self.head = nn.Linear(512, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(torch.tanh(self.stem(x))))
        return self.head(torch.tanh(self.linear(self.norm(self.grouped(x).flatten(1)))))


class Count(TorchDispatchMode):
    """How many operations there were. (To ask a fake tensor for its device is none.)"""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += func is not torch.ops.prim.device.default
        return func(*args, **(kwargs or {}))


def operations(open_step: Callable[[], contextlib.AbstractContextManager[Step]]) -> int:
    """Of one simulated step."""

    @contextlib.contextmanager
    def counted() -> Iterator[Step]:
        with open_step() as step, count:
            yield step

    count = Count()
    simulated_peak(counted)
    return count.operations


def tighten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch is treated as a large one is."""
    monkeypatch.setattr(base, "WORKSPACE", {"cpu": 2**15, "cuda": 2**15})
    monkeypatch.setattr(norms, "SMALL", 2**40)
    monkeypatch.setattr(pieces, "PIECE", 2**12)


COUNTED = [*SIMULATED, "tf_microbatch:4", "bk_mixed:paper", "bk_mixed:time", "bk_mixed:memory"]


@pytest.mark.parametrize("backend", slow_unless(lambda name: "ghost" not in name or name == "ghost", COUNTED))
def test_a_step_has_the_same_operations_whatever_the_batch(backend, monkeypatch):
    """Where 32 samples already are several blocks, kept one by one, and convolutions are taken in pieces.

    A sum of thousands of gradients is one of several portions, which are added up in float64: an operation or two each.
    """
    skip_if_unavailable(backend)
    tighten(monkeypatch)
    few, many = (operations(lambda size=size: opened(Wide, backend, size)) for size in (32, 4096))
    assert many == pytest.approx(few, rel=0.25)
