"""Answers torch's C++ calls about CUDA devices: the current device, their number, the stream.

Autograd's engine calls virtual functions of two C++ objects, the device's guard and its hooks. This module copies their
virtual tables and replaces some entries by C functions. torch's headers give the position of each function.
`fake_cuda.py` describes the whole fake.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = """
#include <stdint.h>
typedef struct { int8_t type, index; } Device;         /* c10::Device; 1 is CUDA */
typedef struct { Device device; int64_t id; } Stream;  /* c10::Stream */
static int8_t devices = 1;
static __thread int8_t current = 0;
void set_devices(int8_t count) { devices = count; }
void set_current(int8_t index) { current = index; }
int8_t get_current(void) { return current; }
Device getDevice(void *self) { (void)self; return (Device){1, current}; }
void setDevice(void *self, Device d) { (void)self; if (d.index >= 0) current = d.index; }
Device exchangeDevice(void *self, Device d) { Device old = getDevice(self); setDevice(self, d); return old; }
Stream getStream(void *self, Device d) { (void)self; return (Stream){{1, d.index < 0 ? current : d.index}, 0}; }
int8_t deviceCount(void *self) { (void)self; return devices; }
static void *(*host)(void);
void set_host(void *(*function)(void)) { host = function; }
void init(void *self) { (void)self; }
void *getPinnedMemoryAllocator(void *self) { (void)self; return host(); }
int hasPrimaryContext(void *self, int8_t index) { (void)self; return index >= 0 && index < devices; }
"""
_TORCH = Path(torch.__file__).parent
_CUDA = 1  # c10::DeviceType


def _compiled() -> ctypes.CDLL:
    """Compile the library once for each user, and load it."""
    name = f"dpbench-fake-{os.getuid()}-{hashlib.sha256(_SOURCE.encode()).hexdigest()[:16]}.so"
    path = Path(tempfile.gettempdir(), name)
    if not path.exists() or path.stat().st_uid != os.getuid():
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "fake.c"), Path(folder, "fake.so")
            source.write_text(_SOURCE)
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
            aside = path.with_suffix(f".{os.getpid()}")
            aside.write_bytes(made.read_bytes())
            aside.rename(path)
    return ctypes.CDLL(str(path))


def _places(header: str) -> list[str]:
    """Names of the virtual functions of the first class in a torch header, in the order of its virtual table."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", (_TORCH / "include" / header).read_text(), flags=re.DOTALL)
    found = []
    for name in re.findall(r"\bvirtual\b[^;{(]*?(~?\w+)\(", text):
        found += [name, name] if name.startswith("~") else [name]  # a destructor has two entries
    return found


def _answers(address: int, header: str, names: tuple[str, ...], library: ctypes.CDLL) -> None:
    """Give the object at `address` its own virtual table with functions of the library."""
    places = _places(header)
    before = ctypes.c_void_p.from_address(address).value
    assert before is not None
    size = 256  # enough for a derived class; two entries come before the table
    table = (ctypes.c_void_p * size)()
    ctypes.memmove(table, before - 16, 8 * size)
    for name in names:
        table[2 + places.index(name)] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))  # C++ keeps its address until the process ends
    ctypes.c_void_p.from_address(address).value = ctypes.addressof(table) + 16


def install(devices: int) -> ctypes.CDLL:
    """Install the answers for this number of devices.

    Returns:
        a library with set_current(index), get_current() and set_devices(count).
    """
    own = _compiled()
    own.set_devices(devices)
    torch._C._ensureCUDADeviceGuardSet()
    c10 = ctypes.CDLL(str(_TORCH / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_CUDA + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    asked = ("getDevice", "setDevice", "exchangeDevice", "getStream", "deviceCount")
    _answers(guards[_CUDA], "c10/core/impl/DeviceGuardImplInterface.h", asked, own)
    own.set_host(ctypes.cast(c10._ZN3c1015GetCPUAllocatorEv, ctypes.c_void_p))
    hooks = ctypes.CDLL(str(_TORCH / "lib" / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.c_void_p
    _answers(
        hooks(),
        "ATen/detail/AcceleratorHooksInterface.h",
        ("hasPrimaryContext", "init", "getPinnedMemoryAllocator"),
        own,
    )
    return own
