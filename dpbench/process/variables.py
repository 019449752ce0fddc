"""The environment variables of the process that measures."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import shutil
import tempfile
from pathlib import Path

#: To number GPUs as nvidia-smi does, and to look without touching.
_SERVER_VARIABLES = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: What torch reads of how its allocator of CUDA memory is to work, by its names from old to new.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def server_variables(device: str) -> dict[str, str]:
    """What the process that measures on `device` is told of it.

    On CUDA, unless a person has said how memory is to be allocated: in segments that grow where they lie. A budget is
    on what the allocator has reserved. Cut from segments of fixed sizes, that has holes which no later tensor fits in,
    and the largest batch would be that of the holes.

    Args:
        device: "cpu" or "cuda".
    """
    variables = _SERVER_VARIABLES | _one_thread()
    if device == "cpu":
        return variables | {"CUDA_VISIBLE_DEVICES": ""}
    said = any(name in os.environ for name in ALLOCATOR)
    allocator = {} if said else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return variables | allocator | _folder_for_triton()


def _one_thread() -> dict[str, str]:
    """What keeps the server's process at one thread: with more, a fork may hang, and Python 3.12 warns of each.

    OpenBLAS, which numpy and scipy bring, starts its threads when it is loaded. On other processors than these torch
    may multiply by it, too, and is left its threads.
    """
    if platform.machine() not in ("x86_64", "AMD64") or "OPENBLAS_NUM_THREADS" in os.environ:
        return {}
    return {"OPENBLAS_NUM_THREADS": "1"}


@functools.cache
def _folder_for_triton() -> dict[str, str]:
    """Where the trials of this process keep what Triton compiles, where its own folder cannot be written to.

    That is ~/.triton; without a folder it compiles nothing, and without one that lasts each trial would compile anew.
    """
    if any(name in os.environ for name in ("TRITON_CACHE_DIR", "TRITON_HOME")):
        return {}
    try:
        own = Path(os.path.expanduser("~/"), ".triton", "cache")
        own.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=own).close()
        return {}
    except OSError:
        folder = tempfile.mkdtemp(prefix="dpbench-triton-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return {"TRITON_CACHE_DIR": folder}
