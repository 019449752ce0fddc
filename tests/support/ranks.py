"""Start the processes of one training as torchrun would, forked from one process that has imported torch."""

import importlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from waiting import PATIENCE

from dpbench.process.linux import die_with_parent


def ranks(folder: Path, script: Path, *words: str, processes: int = 2) -> list[Any]:
    """Run `main(folder, *words)` of the module `script` in each process, and return the results by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {
        # a script may import its test, and so everything that tests import
        "PYTHONPATH": os.pathsep.join([str(script.parent), *filter(None, sys.path)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, str(folder), script.stem, *words]
    subprocess.run(command, env={**os.environ, **known}, check=True, timeout=PATIENCE)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def end_of_rank(found: Any, folder: str) -> NoReturn:
    """Save a process's result and exit."""
    torch.save(found, f"{folder}/{os.environ['RANK']}.pt")
    torch.distributed.barrier()  # the first process to exit would close the others' store
    torch.distributed.destroy_process_group()
    os._exit(0)  # skips the interpreter's shutdown, in which gloo's threads sometimes abort the process


def fork(folder: str, name: str, *words: str) -> None:
    """Import the module and run its `main` in WORLD_SIZE processes."""
    module, parent, children = importlib.import_module(name), os.getpid(), []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if child := os.fork():
            children.append(child)
            continue
        die_with_parent(parent, signal.SIGKILL)
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
        end_of_rank(module.main(Path(folder), *words), folder)
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))


if __name__ == "__main__":
    fork(*sys.argv[1:])
