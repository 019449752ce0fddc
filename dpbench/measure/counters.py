"""Reads a GPU's clocks, power, temperature and energy from its driver (NVML), and energy of CPU packages (RAPL).

A step's time means little without the clock: a card at its power limit slows down. This module calls the driver's
library directly, since torch's own functions need another package, and nvidia-smi takes longer than a turn.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_LIBRARY = "libnvidia-ml.so.1"
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CORE = 0  # nvmlTemperatureSensors_t
_RAPL = Path("/sys/class/powercap")
NOT_READABLE = "not readable"


def sample(device: torch.device) -> dict[str, float | None] | None:
    """{"sm_mhz", "memory_mhz", "watts", "celsius"} now, None for each that the driver lacks; None on a CPU."""
    if device.type != "cuda":
        return None
    found = _handle(device)
    if found is None:
        return dict.fromkeys(("sm_mhz", "memory_mhz", "watts", "celsius"))
    nvml, handle = found
    milliwatts = _asked(nvml.nvmlDeviceGetPowerUsage, handle)
    return {
        "sm_mhz": _asked(nvml.nvmlDeviceGetClockInfo, handle, _SM),
        "memory_mhz": _asked(nvml.nvmlDeviceGetClockInfo, handle, _MEMORY),
        "watts": None if milliwatts is None else milliwatts / 1000,
        "celsius": _asked(nvml.nvmlDeviceGetTemperature, handle, _CORE),
    }


def energy(device: torch.device) -> tuple[str, Callable[[], float] | None]:
    """The name of the counter ("RAPL", "NVML" or "not readable"), and a function that reads its joules, or None.

    Joules count from an arbitrary moment.
    """
    name, read = ("NVML", _of_gpu(device)) if device.type == "cuda" else ("RAPL", _of_packages())
    return (name if read is not None else NOT_READABLE), read


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


def _asked(function: Any, handle: Any, *which: int) -> int | None:
    value = ctypes.c_uint()
    return None if function(handle, *map(ctypes.c_uint, which), ctypes.byref(value)) else value.value


@functools.cache
def _handle(device: torch.device) -> tuple[Any, Any] | None:
    """(the library, its handle of the device); None without the library, or if it does not know the device."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    except (OSError, AttributeError):
        return None
    handle = ctypes.c_void_p()
    name = (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}").encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
        return None
    return nvml, handle
