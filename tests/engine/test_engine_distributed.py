"""One process and two take the same path: the same sample, the same sum of clipped gradients, the same noise, once."""

from pathlib import Path

import pytest
import torch
from engine_process import train
from ranks import ranks

SUPPORT = Path(__file__).resolve().parents[1] / "support"

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What became of each of two processes; see `engine_process`."""
    return ranks(tmp_path_factory.mktemp("two"), SUPPORT / "engine_process.py")


def test_one_process_and_two(two):
    alone, steps = train()
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).state_dict()
    assert all((p - start[name]).abs().max() > 0.02 for name, p in alone.items()) and steps == 20
    first, second = (found[:2] for found in two)
    for (mine, count), (others, _) in zip(first, second, strict=True):  # without and with DistributedDataParallel
        assert count == 20
        for name, p in alone.items():
            torch.testing.assert_close(mine[name], p, rtol=1e-4, atol=1e-5)
            assert torch.equal(mine[name], others[name])


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
