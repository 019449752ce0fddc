"""A simulated step lets the last block of a batch stand for all, to the byte."""

from itertools import product

import pytest
from marks import name_of, slow_unless
from test_measure_simulate import SIMULATED, Residual, opened, plain

from clipping.accel import chunked_conv as pieces
from clipping.core.microbatching import InTurn
from clipping.norms import collection as norms
from clipping.rules import base
from dpbench.measure import memory, simulate
from dpbench.measure.bench import Memory
from dpbench.measure.simulate import simulated_peak
from dpbench.trials import PeakTrial

#: Those that go through a batch in blocks.
BLOCKED = [name for name in SIMULATED if not name.startswith("opacus") and name not in ("private_cnn", "fastdp")]


@pytest.mark.parametrize(
    ("make", "backend"),
    slow_unless(
        lambda make, name: make is plain and name in ("ghost", "tf_microbatch:3", "bk_mixed:memory"),
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


def tighten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch is treated as a large one is."""
    monkeypatch.setattr(base, "WORKSPACE", {"cpu": 2**15, "cuda": 2**15})
    monkeypatch.setattr(norms, "SMALL", 2**40)
    monkeypatch.setattr(pieces, "PIECE", 2**12)
