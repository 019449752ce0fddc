"""A fake CUDA device for torch that stores and computes everything on the CPU.

Tensors are ordinary ones in CPU memory with `device` "cuda:0" (DLPack changes their device). For each operation with a
CUDA kernel, torch's dispatcher gets a Python kernel that runs the CPU's on the same memory. Autograd (in the device's
own thread), autocast, torch.func, hooks and fake tensors are therefore torch's own, as on a GPU.

It finds faults that a CPU does not show: tensors of two devices in one operation, a generator of the other device, a
forbidden synchronisation, a device initialised before a fork, more memory than the card has, and errors in every line
behind `if device.type == "cuda"`.

Not covered:

- times, and a GPU's own rounding: cuBLAS, cuDNN, atomics (operands are rounded to TF32 where torch's switches say so)
- streams, races, and reads before a copy has finished
- fragmentation in the allocator (`reserved` equals allocated), and temporary memory of kernels
- Triton programs (torch operations replace them), Inductor's code for CUDA
- what a CUDA graph forbids, and its memory (a recorder replaces it)
- fused attention (torch's plain attention replaces it) and cuDNN's recurrent layers
- NCCL, several processes, fully sharded models
- a profiler's device events, NVML (nvidia-smi is a script)

`environment()` returns the variables for a process with the device. It puts a folder with a `sitecustomize` on
PYTHONPATH, which forked and spawned processes inherit. FAKE_CUDA is the number of devices.
"""

import contextlib
import ctypes
import functools
import importlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

MEMORY = 8 * 2**30
_CUDA = 2  # DLPack's kind of device
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal")
_ANYWHERE = ("copy_", "index", "index_put_", "_index_put_impl_", "_foreach_copy_")  # also accept CPU tensors
_VIEWS = ("view", "as_strided", "_reshape_alias", "unfold", "view_as_real", "view_as_complex", "set_", "is_set_to")


def environment(**more: str) -> dict[str, str]:
    """Environment variables for a process with the fake device, and more."""
    site = str(Path(__file__).resolve().with_name("fake_site"))
    paths = {name: os.pathsep.join(filter(None, [site, os.environ.get(name)])) for name in ("PYTHONPATH", "PATH")}
    return {**os.environ, **paths, "FAKE_CUDA": "1", "CUDA_VISIBLE_DEVICES": "0", **more}


class Card:
    """One device and its allocated memory, counted as CUDA's allocator does.

    Attributes:
        blocks: address of a storage on "cuda" -> (the CPU storage behind it, a weak reference that runs at its end).
        sync: as in `torch.cuda.set_sync_debug_mode`.
    """

    sync = 0

    def __init__(self, index: int, memory: int) -> None:
        self.index, self.memory, self.fraction = index, memory, 1.0
        self.now = self.peak = self.retries = 0
        self.blocks: dict[int, tuple[Any, Any]] = {}

    def take(self, size: int) -> int:
        """Allocate `size` bytes; returns the rounded size, as the allocator would."""
        size = -(-size // 512) * 512
        if self.now + size > self.fraction * self.memory:
            self.retries += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU {self.index} has a total capacity "
                f"of {self.memory / 2**30:.2f} GiB, of which {(self.memory - self.now) / 2**30:.2f} GiB is free."
            )
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def stats(self) -> dict[str, Any]:
        """As `torch._C._cuda_memoryStats`."""
        of = {"current": self.now, "peak": self.peak, "allocated": self.peak, "freed": self.peak - self.now}
        pools = dict.fromkeys(("all", "small_pool", "large_pool"), of)
        kinds = ("allocated", "reserved", "active", "inactive_split", "requested")
        return {**{f"{kind}_bytes": pools for kind in kinds}, "num_alloc_retries": self.retries, "num_ooms": 0}


CARDS: list[Card] = []
GENERATORS: list[Any] = []
OWN: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""C++ address -> a generator for the device."""

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _moved(x: torch.Tensor, index: int) -> torch.Tensor:
    """The same memory as a tensor of a fake device. Restores the strides that DLPack drops for dimensions of size 1."""
    capsule = torch._C._to_dlpack(x)
    device = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    (ctypes.c_int32 * 2).from_address(device)[:] = [_CUDA, index]
    found = torch._C._from_dlpack(capsule)
    if found.stride() == x.stride():
        return found
    return torch.ops.aten.as_strided.default.redispatch(_ON_CPU, found, x.size(), x.stride(), 0)


def to_card(x: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor of the device in the memory of a CPU tensor that nothing else uses."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.storage_offset() or (not x.is_contiguous() and x.untyped_storage().nbytes() > x.nbytes):
        x = x.clone(memory_format=torch.contiguous_format)
    card, memory = CARDS[index], x.untyped_storage()
    size = card.take(memory.nbytes())
    found = _moved(x, index)
    storage = found.untyped_storage()
    address = storage._cdata

    def freed(_: Any) -> None:
        if card.blocks.pop(address, None) is not None:
            card.now -= size

    card.blocks[address] = (memory, weakref.ref(storage, freed))
    return found


def to_cpu(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor in the memory of a device tensor."""
    block = CARDS[x.device.index].blocks.get(x.untyped_storage()._cdata)
    if block is None:
        raise RuntimeError(f"expected memory of the fake device, got a storage of {x.device} that it has not given")
    found = torch.empty(0, dtype=x.dtype).set_(block[0], x.storage_offset(), x.size(), x.stride())
    found = torch._conj(found) if x.is_conj() else found
    return torch._neg_view(found) if x.is_neg() else found


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply the function to all entries of nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return [_each(x, function) for x in value] if type(value) is list else tuple(_each(x, function) for x in value)
    return {k: _each(x, function) for k, x in value.items()} if isinstance(value, dict) else function(value)


class Call:
    """One call of an operation: its arguments as CPU tensors, mapped to the original ones."""

    def __init__(self, name: str, args: Any, kwargs: Any) -> None:
        self.name, self.index = name, -1
        self.given: dict[int, tuple[Any, Any]] = {}  # id of a CPU argument -> (CPU argument, original argument)
        self._others: list[torch.Tensor] = []
        self.args, self.kwargs = _each(args, self._taken), _each(kwargs, self._taken)
        if self._others and name.partition(".")[0] not in _ANYWHERE:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:{self.index} and {self._others[0].device}! ({name})"
            )
        asked = kwargs.get("device")
        if self.index < 0 or (asked is not None and asked.index is not None):
            self.index = torch.cuda.current_device() if asked is None or asked.index is None else asked.index

    def _taken(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if not x.is_cuda or (self.index >= 0 and x.device.index != self.index):
                self._others += [x] if x.dim() or x.is_cuda else []
            elif self.index < 0:
                self.index = x.device.index
            own = to_cpu(x) if x.is_cuda else x
            self.given[id(own)] = own, x
            return own
        if isinstance(x, torch._C.Generator) and x._cdata not in OWN:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def run(self, op: Any) -> Any:
        """Run on the CPU and return results as device tensors; results that are arguments stay the same objects."""
        for name in _outputs(op) & self.kwargs.keys():
            if not (own := self.kwargs[name]).numel():  # the operation resizes it, and so replaces its memory
                self.kwargs[name] = fresh = torch.empty(0, dtype=own.dtype)
                self.given[id(fresh)] = fresh, self.given[id(own)][1]
        if self.kwargs.get("pin_memory"):
            self.kwargs["pin_memory"] = False
        with _drawing(op, self.index):
            found = STANDING_IN.get(self.name, op)(*self.args, **self.kwargs)
        for own, x in list(self.given.values()):
            if own.shape != x.shape:
                give_memory(x, own)
        return _each(found, self._back)

    def _back(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in self.given:
            return self.given[id(x)][1]
        memory = x.untyped_storage()._cdata
        shared = any(own.untyped_storage()._cdata == memory for own, _ in self.given.values())
        return to_card(x.clone() if shared else x, self.index)


@functools.cache
def _outputs(op: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in op._schema.arguments if argument.is_out)


@functools.cache
def _draws(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


@contextlib.contextmanager
def _drawing(op: Any, index: int) -> Iterator[None]:
    """Make an operation without a generator draw from the device's."""
    if not _draws(op):
        yield
        return
    mine, cpu = GENERATORS[index], torch.default_generator
    before = cpu.get_state()
    cpu.set_state(mine.get_state())
    try:
        yield
    finally:
        mine.set_state(cpu.get_state())
        cpu.set_state(before)


def give_memory(x: torch.Tensor, memory: torch.Tensor) -> None:
    """Replace the memory and size of a device tensor."""
    found = to_card(memory.clone(), x.device.index)
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    set_.redispatch(_ON_CPU, x, found.untyped_storage(), 0, found.size(), found.stride())


def _numbers(op: Any, name: str) -> set[int]:
    """Positions of tensor arguments that the dispatcher may pass as numbers."""
    if torch._C._should_allow_numbers_as_tensors(name):
        return set()
    return {i for i, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"}


def _tensor(x: Any, others: Any) -> Any:
    """Turn a number back into a tensor that does not widen the dtype of the others."""
    if not isinstance(x, float):
        return torch.tensor(x) if isinstance(x, (int, complex)) else x
    real = any(isinstance(y, torch.Tensor) and y.is_floating_point() for y in others)
    return torch.tensor(x, dtype=torch.float64 if real else None)


def _kernel(op: Any, name: str) -> Callable[..., Any]:
    """The kernel that torch's dispatcher calls for an operation on the device."""
    base = name.partition(".")[0]
    numbers = _numbers(op, base)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            torch.cuda._lazy_init()
            if base == "resize_" and args[0].numel() != torch.Size(args[1]).numel():
                give_memory(args[0], torch.empty(args[1], dtype=args[0].dtype))
            if base in _VIEWS or base == "resize_":
                return op.redispatch(_ON_CPU, *args, **kwargs)
            to_host = base == "copy_" and args[0].is_cpu and not (len(args) > 2 and args[2])
            if Card.sync == 2 and (base in _WAITS or to_host):
                raise RuntimeError(f"called a synchronizing CUDA operation ({name})")
            if numbers and any(isinstance(args[i], (int, float, complex)) for i in numbers if i < len(args)):
                args = tuple(_tensor(x, args) if i in numbers else x for i, x in enumerate(args))
            return Call(name, args, kwargs).run(op)

    return kernel


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """float32 to TF32, which keeps 11 bits."""
    if x.dtype != torch.float32:
        return x
    bits = (x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def _as_tf32(function: Any, operands: slice, switch: Any) -> Any:
    """A product that rounds its operands as on a GPU, if the switch allows TF32; torch's default allows it in cuDNN."""

    def multiply(*args: Any, **kwargs: Any) -> Any:
        if switch.fp32_precision == "tf32":
            given = list(args)
            given[operands] = map(_rounded, given[operands])
            args = tuple(given)
        return function(*args, **kwargs)

    return multiply


def _product(function: Any, count: int) -> Any:
    """A matrix product with an output dtype argument, for which the CPU has no kernel."""
    return lambda *args, **scales: function(*(x.to(args[count]) for x in args[:count]), **scales)


def _attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, **more: Any
) -> Any:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask.logical_not(), -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, **more)[0]


def _decomposed(name: str) -> Any:
    """torch's own formula of an operation."""

    def formula(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("torch._decomp.decompositions"), name)(*args, **kwargs)

    return formula


#: Replacements for operations without a CPU kernel.
STANDING_IN: dict[str, Callable[..., Any]] = {
    "mm.dtype": _product(torch.mm, 2),
    "bmm.dtype": _product(torch.bmm, 2),
    "addmm.dtype": _product(torch.addmm, 3),
    "baddbmm.dtype": _product(torch.baddbmm, 3),
    "_fused_rms_norm_backward": _decomposed("_fused_rms_norm_backward"),
    "record_stream": lambda x, stream: None,
    **{
        name: _as_tf32(getattr(torch.ops.aten, name).default, operands, switch)
        for name, operands, switch in (
            ("convolution", slice(0, 2), torch.backends.cudnn.conv),
            ("convolution_backward", slice(0, 3), torch.backends.cudnn.conv),
            ("mm", slice(0, 2), torch.backends.cuda.matmul),
            ("bmm", slice(0, 2), torch.backends.cuda.matmul),
            ("addmm", slice(1, 3), torch.backends.cuda.matmul),
            ("baddbmm", slice(1, 3), torch.backends.cuda.matmul),
        )
    },
}


def register() -> dict[str, torch.library.Library]:
    """Register a kernel for each operation with a CUDA kernel, or with a CPU kernel and none for all devices."""
    of = torch._C._dispatch_get_registrations_for_dispatch_key
    own = {"aten::copy_", "aten::convolution", "aten::convolution_backward"}  # these dispatch on the device themselves
    composite = {*of("CompositeExplicitAutograd"), *of("CompositeImplicitAutograd")}
    every = {*of("CUDA")} | {*of("CPU")} - composite | own
    libraries = {package: torch.library.Library(package, "IMPL") for package in ("aten", "c10d")}
    for full in sorted(every):
        package, _, name = full.partition("::")
        operation, _, overload = name.partition(".")
        op = getattr(getattr(getattr(torch.ops, package), operation, None), overload or "default", None)
        if package in libraries and op is not None:
            libraries[package].impl(name, _kernel(op, name), "CUDA")
    for key in ("AutogradCUDA", "CUDA", "FuncTorchBatched"):
        libraries["aten"].impl("scaled_dot_product_attention", _attention, key)
    return libraries
