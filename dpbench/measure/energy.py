"""Reads energy counters, in joules: RAPL of CPU packages, NVML of a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from dpbench.measure.gpu import _handle

_RAPL = Path("/sys/class/powercap")
NOT_READABLE = "not readable"


def counter(device: torch.device) -> tuple[str, Callable[[], float] | None]:
    """The name of the counter ("RAPL", "NVML" or "not readable"), and a function that reads its joules, or None.

    Joules count from an arbitrary moment.
    """
    if device.type == "cuda":
        read = _of_gpu(device)
        return ("NVML", read) if read is not None else (NOT_READABLE, None)
    read = _of_packages()
    return ("RAPL", read) if read is not None else (NOT_READABLE, None)


def _of_packages() -> Callable[[], float] | None:
    """Energy of all CPU packages of the machine, by all processes; handles counters that wrap around."""
    packages = [path for path in sorted(_RAPL.glob("intel-rapl:*")) if path.name.count(":") == 1]
    try:
        ranges = [int((path / "max_energy_range_uj").read_text()) for path in packages]
        last = [int((path / "energy_uj").read_text()) for path in packages]
    except (OSError, ValueError):
        return None
    if not packages:
        return None
    total = 0

    def read() -> float:
        nonlocal total
        for i, path in enumerate(packages):
            now = int((path / "energy_uj").read_text())
            total += (now - last[i]) % (ranges[i] + 1)
            last[i] = now
        return total / 1e6

    return read


def _of_gpu(device: torch.device) -> Callable[[], float] | None:
    found = _handle(device)
    if found is None:
        return None
    nvml, handle = found

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            raise OSError("the driver does not say")
        return millijoules.value / 1000

    try:
        read()
    except (OSError, AttributeError):
        return None
    return read
