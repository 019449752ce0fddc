"""The environment variables of the measuring process."""

import atexit
import functools
import os
import platform
import shutil
import tempfile
from pathlib import Path

#: Number GPUs as nvidia-smi does, and detect them without a CUDA context.
_SERVER_VARIABLES = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: Names of the variable with torch's options for its CUDA allocator, old and new.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def server_variables(device: str) -> dict[str, str]:
    """Environment variables for the process that measures on `device`.

    On CUDA, unless the user configures the allocator, it uses expandable segments. A budget limits the reserved memory.
    With segments of fixed sizes, that includes gaps too small for later tensors, and the largest batch would depend on
    the gaps.

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
    """Variables that limit the server to one thread: with more, a fork may hang, and Python 3.12 warns of each.

    OpenBLAS, used by numpy and scipy, starts its threads when loaded. On other processors torch may also use it for
    matrix products, so its threads stay.
    """
    if platform.machine() not in ("x86_64", "AMD64") or "OPENBLAS_NUM_THREADS" in os.environ:
        return {}
    return {"OPENBLAS_NUM_THREADS": "1"}


@functools.cache
def _folder_for_triton() -> dict[str, str]:
    """A folder for Triton's compiled programs if ~/.triton is not writable.

    Without a folder Triton compiles nothing, and without a lasting one each trial would compile again.
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
