"""Run a `DeviceTrial`: measure the device's best bandwidth, arithmetic rate and latency.

- `_bandwidth`: bytes a second: read and written by a copy on the device, read by a sum, and on CUDA copied between
  pinned host memory and the device.
- `_products`: floating-point operations a second, 2n³ for a product of two n×n matrices. `float32` has TF32 off.
- `_latency`: seconds of a tiny operation: to launch it from the host, between two on the device, and to read one
  number of the device on the host.
- `facts` and `_versions`: the device and its software.

Each is the median of repetitions, after one warm-up. A CPU has no TF32 and no asynchronous launches: those rows are
left out.
"""

import platform
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from clipping.accel import cuda
from dpbench.measure import counters
from dpbench.measure.bench import device_of
from dpbench.measure.precision import arithmetic, dtype_of
from dpbench.measure.timing import stopwatch_for
from dpbench.records.environment import version_of
from dpbench.trials.evidence import DeviceTrial

REPEATS = 10
MAX_SECONDS = 1.0
#: Tiny operations in a row: a single one is too short for the clock.
ROW = 200
_PROPERTIES = {
    "capability": lambda p: f"{p.major}.{p.minor}",
    "multiprocessors": lambda p: p.multi_processor_count,
    "memory_bytes": lambda p: p.total_memory,
    "l2_bytes": lambda p: getattr(p, "L2_cache_size", None),
}


def run(trial: DeviceTrial) -> dict[str, Any]:
    """{"facts", "versions", "bandwidth", "products", "latency"}; the last three are lists of rows.

    Raises:
        torch.OutOfMemoryError: the device cannot hold `copied` bytes twice.
    """
    device = device_of(trial.device)
    return {
        "facts": facts(device),
        "versions": _versions(device),
        "bandwidth": list(_bandwidth(trial.copied, device)),
        "products": [row for size in trial.sizes for row in _products(size, device)],
        "latency": list(_latency(device)),
    }


def facts(device: torch.device) -> dict[str, Any]:
    """Name and size of the device; on CUDA also its clocks, power and temperature before the load.

    "triton_programs" is "run", or the reason why torch's operations replace Triton programs in every later trial.
    """
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    known = {name: read(properties) for name, read in _PROPERTIES.items()}
    programs = {"triton_programs": cuda.trouble(device) or "run"}
    return {"name": properties.name} | known | (counters.sample(device) or {}) | programs


def _versions(device: torch.device) -> dict[str, Any]:
    """Versions of Python, torch, triton, numpy and CUDA; None if not installed."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {name: version_of(name) for name in ("triton", "numpy")}
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def _bandwidth(size: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows {"what", "bytes", "seconds", "bytes_per_second"}."""
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


def _products(size: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows {"size", "precision", "seconds", "flops_per_second"}."""
    for precision in ("float32", "tf32", "bfloat16") if device.type == "cuda" else ("float32", "bfloat16"):
        a = torch.randn(size, size, device=device).to(dtype_of(precision))
        b, out = a.t().contiguous(), torch.empty_like(a)
        with arithmetic(precision, device):
            seconds = _seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)  # type: ignore[misc]
        rate = 2 * size**3 / seconds
        yield {"size": size, "precision": precision, "seconds": seconds, "flops_per_second": rate}


def _latency(device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows {"what", "seconds"}, each of one operation."""
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
    """Median seconds by the device's own clock."""
    stopwatch = stopwatch_for(device)
    stopwatch(action, 2, MAX_SECONDS)
    return median(stopwatch(action, REPEATS, MAX_SECONDS))


def _host(action: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds by the host's clock; the device is idle before each."""
    found = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter()
        action()
        found.append(time.perf_counter() - before)
    return found[1:]
