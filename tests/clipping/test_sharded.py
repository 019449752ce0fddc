"""Two and four processes give what one does, under DDP and FSDP2: clipped sums, trained parameters, noise once."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import PATIENCE

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from ranks import ranks
from sharded_process import CASES, MODELS, clipped, loss_fn, made, train

from clipping import Flat, load_backend

SUPPORT = Path(__file__).resolve().parents[1] / "support"

pytestmark = pytest.mark.slow  # what two processes answer is checked by `test_distributed_experiment`, too
SCRIPT = SUPPORT / "sharded_process.py"


@pytest.fixture(scope="module")
def alone():
    """What one process finds."""
    return {case: clipped(case) for case in CASES}


def processes_of(found, alone):
    """Every sum and norm of several processes is that of one."""
    for key in found[0]["alike"]:
        _, case, empty = key
        grads, norms = alone[case]
        share = len(found) - empty
        for rank, each in enumerate(found):
            mine, own = each["alike"][key]
            assert mine.keys() == grads.keys()
            for name, grad in grads.items():
                error = (mine[name] - grad).norm() / grad.norm().clamp(min=1e-12)
                assert error <= 1e-9, (key, rank, name, float(error))
            expected = norms[rank::share] if rank < share else norms[:0]
            torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    assert len(found[0]["alike"]) == (3 if len(found) == 4 else 2) * (len(CASES) + len(MODELS))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return ranks(tmp_path_factory.mktemp("two"), SCRIPT)


def test_sums_of_two_processes_are_those_of_one(two, alone):
    for case, (grads, norms) in alone.items():
        assert (norms > 0.4).any() and all(g.abs().max() > 0 for g in grads.values()), case
    processes_of(two, alone)


def test_sums_of_four_processes_under_torchrun_are_those_of_one(tmp_path, alone):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    subprocess.run([*torchrun, SCRIPT, str(tmp_path)], check=True, timeout=PATIENCE)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    processes_of(found, alone)
    assert_trained(found)
    for each in found[1:]:  # full_tensor takes the shards of one replica: that all have the same noise shows here
        assert torch.equal(each["replicas"], found[0]["replicas"])
    assert abs(float(found[0]["replicas"].std()) / 1.5 - 1) < 0.05


def assert_trained(found):
    """The same batches, sums and noise as in one process, though batches are cut, and empty in some process."""
    for noise in (0, 1):
        parameters, sizes = train(noise=float(noise))
        assert sum(sizes) > 20 and max(sizes) == 2
        for how in ("ddp", "fsdp", *(["hsdp"] if "hsdp" in found[0] else [])):
            for each in found:
                mine, _ = each[how][noise]
                for name, p in parameters.items():
                    torch.testing.assert_close(mine[name], p, rtol=1e-7, atol=1e-7)
            pieces = [each[how][noise][1] for each in found]
            assert len({len(own) for own in pieces}) == 1
            assert sum(map(sum, pieces)) == sum(sizes) and any(0 in own for own in pieces)


def test_training_takes_the_path_of_one_process(two):
    assert_trained(two)


def test_noise_is_drawn_once_for_each_coordinate(two):
    first, second = (each["noise"] for each in two)
    assert torch.equal(first, second)  # of all shards together, as either process sees them
    count = len(first)
    assert abs(float(first.std()) / 1.5 - 1) < 5 / count**0.5  # σ · sensitivity · lr / batch size = 3 · 0.5 · 4 / 4
    assert abs(float(first.mean())) < 5 * 1.5 / count**0.5
    assert len(first.unique()) > 0.95 * count  # of a grid of some four million near the middle
    weight = first[: 300 * 101].view(101, 300)
    above, below = weight[:50].flatten(), weight[51:].flatten()[: 50 * 300]  # of the two processes
    assert abs(float((above * below).mean()) / 1.5**2) < 5 / len(above) ** 0.5


def test_mixed_precision_keeps_norms_and_sums_in_float32(two):
    model, x, y = made("gpt", torch.float32)
    with load_backend("bk_mixed")(model, loss_fn, clip=Flat(max_grad_norm=0.4)) as run:
        full = run(x, y)
    for rank, each in enumerate(two):
        grads, norms = each["mixed"]
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms, full.norms[rank::2], rtol=3e-2, atol=1e-2)
        assert not torch.equal(norms, full.norms[rank::2])  # bfloat16 it was
        for name, grad in full.grads.items():
            assert grads[name].dtype == torch.float32
            assert (grads[name] - grad).norm() <= 0.1 * grad.norm() + 1e-3, name


def test_what_cannot_be_sharded_is_refused_in_one_line(two):
    said = two[0]["refusals"]
    assert said.pop("bk_ghost") == ""
    assert said.keys() == {"nonprivate", "microbatch", "vmap", "ghost", "mixed_ghost", "fastgradclip"}
    for backend, line in said.items():
        assert line == (
            f"{backend} does not support this model: 0.weight: is sharded, and under FSDP2 every process must run the "
            "same number of passes, with one backward pass (remedy: use bk_mixed or bk_ghost)"
        )
