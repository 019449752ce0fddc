"""Body of a `DeviceTrial`: what the device can do at best, by which every other time is to be read.

- `bandwidth`: bytes a second: read and written by a copy on the device, read by a sum, and on CUDA crossing between
  pinned memory of the host and the device.
- `products`: floating-point operations a second, 2n³ of a product of two n×n matrices. `float32` has TF32 off.
- `latency`: seconds of a tiny operation: what the host takes to launch it, the device from one to the next, and the
  host to read one number that the device has made.
- `facts` and `versions`: which device, and what drives it.

Each is the median of repetitions, after one that pays for what happens once. On a CPU there is no TF32, and no launch
that is over before its operation is: those rows are left out.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from clipping.accel import cuda
from dpbench.measure import gpu
from dpbench.measure.bench import device_of
from dpbench.measure.precision import arithmetic, dtype_of
from dpbench.measure.timing import stopwatch_for
from dpbench.trials.evidence import DeviceTrial

REPEATS = 10
MAX_SECONDS = 1.0
#: Tiny operations in a row: one alone is shorter than the clock can tell.
ROW = 200
_PROPERTIES = {
    "capability": lambda p: f"{p.major}.{p.minor}",
    "multiprocessors": lambda p: p.multi_processor_count,
    "memory_bytes": lambda p: p.total_memory,
    "l2_bytes": lambda p: getattr(p, "L2_cache_size", None),
}


def run(trial: DeviceTrial) -> dict[str, Any]:
    """{"facts", "versions", "bandwidth", "products", "latency"}, the last three lists of rows; see the module's text.

    Args:
        trial: which device, and how much of it.

    Raises:
        torch.OutOfMemoryError: `copied` bytes, twice, are more than there is.
    """
    device = device_of(trial.device)
    return {
        "facts": facts(device),
        "versions": versions(device),
        "bandwidth": list(bandwidth(trial.copied, device)),
        "products": [row for size in trial.sizes for row in products(size, device)],
        "latency": list(latency(device)),
    }


def facts(device: torch.device) -> dict[str, Any]:
    """Name and size of the device; on CUDA its clocks, power and temperature as well, before it has much to do.

    "triton_programs": "run", or why they do not, and torch's operations stand in for them in every later trial.

    Args:
        device: of the trial.
    """
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    known = {name: read(properties) for name, read in _PROPERTIES.items()}
    programs = {"triton_programs": cuda.trouble(device) or "run"}
    return {"name": properties.name} | known | (gpu.sample(device) or {}) | programs


def versions(device: torch.device) -> dict[str, Any]:
    """Of what computes: None where it is not installed.

    Args:
        device: of the trial.
    """
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def bandwidth(size: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows {"what", "bytes", "seconds", "bytes_per_second"}; `size` is in bytes.

    Args:
        size: bytes that are copied.
        device: of the trial.
    """
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    passes: list[tuple[str, int, Callable[[], object]]] = [
        ("copy on the device", 2, lambda: target.copy_(source)),
        ("sum on the device", 1, source.sum),
    ]
    if device.type == "cuda":
        host = torch.zeros(min(size, 2**28) // 4, pin_memory=True)
        there = source[: host.numel()]
        passes += [
            ("host to device, pinned", 1, lambda: there.copy_(host, non_blocking=True)),
            ("device to host, pinned", 1, lambda: host.copy_(there, non_blocking=True)),
        ]
    for what, times, action in passes:
        moved = times * (host.numel() * 4 if "host" in what else size)
        seconds = _seconds(action, device)
        yield {"what": what, "bytes": moved, "seconds": seconds, "bytes_per_second": moved / seconds}


def products(size: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows {"size", "precision", "seconds", "flops_per_second"}.

    Args:
        size: rows and columns of each matrix.
        device: of the trial.
    """
    for precision in ("float32", "tf32", "bfloat16") if device.type == "cuda" else ("float32", "bfloat16"):
        a = torch.randn(size, size, device=device).to(dtype_of(precision))
        b, out = a.t().contiguous(), torch.empty_like(a)
        with arithmetic(precision, device):
            seconds = _seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)  # type: ignore[misc]
        rate = 2 * size**3 / seconds
        yield {"size": size, "precision": precision, "seconds": seconds, "flops_per_second": rate}


def latency(device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows {"what", "seconds"}, of one operation each.

    Args:
        device: of the trial.
    """
    number = torch.zeros(1, device=device)

    def row_of_operations() -> None:
        for _ in range(ROW):
            number.add_(1)

    yield {"what": "one operation to the next", "seconds": _seconds(row_of_operations, device) / ROW}
    if device.type == "cuda":
        yield {"what": "launch, on the host", "seconds": median(_host(row_of_operations, device)) / ROW}
    yield {"what": "read one number on the host", "seconds": median(_host(number.item, device))}
    yield {"what": "operation and reading its number", "seconds": median(_host(lambda: number.add_(1).item(), device))}


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """As the device's own clock has it."""
    stopwatch = stopwatch_for(device)
    stopwatch(action, 2, MAX_SECONDS)
    return median(stopwatch(action, REPEATS, MAX_SECONDS))


def _host(action: Callable[[], object], device: torch.device) -> list[float]:
    """As the host's clock has it, each with nothing left to do on the device before."""
    found = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter()
        action()
        found.append(time.perf_counter() - before)
    return found[1:]
