"""Starts processes as torchrun would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from waiting import PATIENCE


def torchrun(folder, script, *words, processes=2):
    """What each process has written, of `processes` that run `script` as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, sys.path))  # a script may import its test, and so all that a test may
    known = {
        "PYTHONPATH": path,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, Path(__file__).parent / script, str(folder), *words],
            env={**os.environ, **known, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    try:
        assert [process.wait(timeout=PATIENCE) for process in started] == [0] * processes
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]
