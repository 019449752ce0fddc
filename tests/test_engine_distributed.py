"""One process and two take the same path: the same sample, the same sum of clipped gradients, the same noise, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_process import train


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_one_process_and_two(tmp_path):
    script = Path(__file__).parent / "engine_process.py"
    started = [subprocess.Popen([sys.executable, script, str(rank), str(tmp_path)]) for rank in range(2)]
    alone, steps = train()
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).state_dict()
    assert all((p - start[name]).abs().max() > 0.02 for name, p in alone.items()) and steps == 20
    assert [process.wait(timeout=60) for process in started] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for (mine, count), (others, _) in zip(first, second, strict=True):  # without and with DistributedDataParallel
        assert count == 20
        for name, p in alone.items():
            torch.testing.assert_close(mine[name], p, rtol=1e-4, atol=1e-5)
            assert torch.equal(mine[name], others[name])
