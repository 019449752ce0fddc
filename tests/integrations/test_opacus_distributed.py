"""Opacus' interface in one process and in two: the same sample, the same weights, noise once; and errors end in all."""

from pathlib import Path

import pytest
import torch
from opacus_process import train
from ranks import ranks

SUPPORT = Path(__file__).resolve().parents[1] / "support"

pytestmark = [
    pytest.mark.slow,  # test_engine_distributed shows the engine's part
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What became of each of two processes."""
    return ranks(tmp_path_factory.mktemp("two"), SUPPORT / "opacus_process.py")


@pytest.mark.parametrize(("place", "mode"), [(0, "hooks"), (1, "ghost")])
def test_one_process_and_two_have_the_same_weights(two, place, mode):
    alone, steps = train(mode, most=6)
    for found in two:
        weights, count = found[place]
        assert count == steps == 16
        for mine, p in zip(weights, alone, strict=True):
            torch.testing.assert_close(mine, p, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(two[0][place][0], two[1][place][0], strict=True))


def test_a_refusal_in_one_process_is_an_error_in_the_other(two):
    assert "samples mix" in two[0][2]
    assert "process 0 raised an error: nothing of it is released" in two[1][2]


def test_batches_of_the_caller_s_own_are_refused_in_several_processes(two):
    assert all("expected poisson_sampling=True" in found[3] and "in several processes" in found[3] for found in two)
