"""Reads a GPU's clocks, power and temperature from its driver (NVML).

A step's time means little without the clock: a card at its power limit slows down. This module calls the driver's
library directly, since torch's own functions need another package, and nvidia-smi takes longer than a turn.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_LIBRARY = "libnvidia-ml.so.1"
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CORE = 0  # nvmlTemperatureSensors_t


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
