"""Replaces the functions of torch.cuda for the fake device of `fake_cuda.py`, once in a process."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
import warnings
from types import SimpleNamespace
from typing import Any

import fake_cuda
import fake_graph
import fake_guard
import torch
from fake_cuda import CARDS, GENERATORS, MEMORY, OWN, Card

CAPABILITY = (9, 0)
_KEPT: list[Any] = []
_POOLS = itertools.count()


def _count() -> int:
    """Number of visible devices: none in a process that measures a CPU."""
    there = range(int(os.environ.get("FAKE_CUDA", "1")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, there)))
    return sum(each.strip().isdigit() and int(each) in there for each in visible.split(","))


class Generator(torch._C.Generator):
    """A CPU generator that knows its device."""

    def __new__(cls, device: Any) -> Any:
        made = super().__new__(cls)
        made._on = _indexed(device)
        OWN[made._cdata] = made
        return made

    def __init__(self, device: Any) -> None: ...

    device = property(lambda self: self._on)  # type: ignore[assignment]


class _AnyGenerator(type):
    """torch.Generator; torch's own generators are instances of it, too."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, torch._C.Generator)

    def __call__(cls, device: Any = "cpu") -> Any:
        return Generator(device) if torch.device(device).type == "cuda" else torch._C.Generator(device)


class Stream:
    """The only stream: every operation runs at once."""

    cuda_stream = stream_id = 0
    device_type = 1

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.device, self.device_index = _indexed(device), _indexed(device).index

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def wait_event(self, event: Event) -> None: ...
    def wait_stream(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...


class Event:
    """A time of the host's clock."""

    def __init__(self, enable_timing: bool = False, **more: Any) -> None:
        self._timed, self.at = enable_timing, None

    def record(self, stream: Any = None) -> None:
        self.at: float | None = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        if self.at is None or end.at is None or not (self._timed and end._timed):
            raise RuntimeError(
                "Both events must be recorded, with enable_timing=True, before calculating elapsed time."
            )
        return (end.at - self.at) * 1000

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


def _indexed(device: Any = None) -> torch.device:
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = torch.device("cuda" if device is None else device)
    return found if found.index is not None else torch.device(found.type, torch.cuda.current_device())


def _properties(device: Any = None) -> Any:
    card = CARDS[_indexed(device).index]
    major, minor = CAPABILITY
    return SimpleNamespace(
        name="NVIDIA Fake", major=major, minor=minor, total_memory=card.memory, multi_processor_count=132,
        L2_cache_size=50 * 2**20, warp_size=32, uuid=uuid.UUID(int=card.index), is_integrated=0, is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472, gcnArchName="",
    )  # fmt: skip


def install() -> None:
    """Install the device, right after the import of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the fake replaces its CUDA kernels
        _KEPT.append(fake_cuda.register())
    CARDS.extend(Card(i, MEMORY) for i in range(max(1, _count())))
    guard = fake_guard.install(len(CARDS))
    _of_c(guard)
    _of_python()
    _storages()
    _profiler()


def _of_c(guard: Any) -> None:
    """Replace the C++ functions that torch.cuda calls."""
    owner: list[int] = []

    def exchange(index: int) -> int:
        before = guard.get_current()
        if index >= 0:
            guard.set_current(index)
        return before

    def memory(index: int, fraction: float) -> None:
        CARDS[index].fraction = fraction

    def reset(index: int) -> None:
        CARDS[index].peak = CARDS[index].now

    names = {
        "init": lambda: owner.append(os.getpid()),
        "isInBadFork": lambda: bool(owner) and owner[0] != os.getpid(),
        "hasPrimaryContext": lambda index: bool(owner),
        "getDeviceCount": _count,
        "getDevice": lambda: guard.get_current(),
        "setDevice": lambda index: guard.set_current(index),
        "exchangeDevice": exchange,
        "maybeExchangeDevice": lambda index: exchange(index),  # TorchDynamo tells functions apart by identity
        "synchronize": lambda: None,
        "emptyCache": lambda: None,
        "memoryStats": lambda index: CARDS[index].stats(),
        "memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "resetPeakMemoryStats": reset,
        "resetAccumulatedMemoryStats": lambda index: None,
        "setMemoryFraction": lambda fraction, index: memory(index, fraction),
        "getMemoryFraction": lambda index: CARDS[index].fraction,
        "isCurrentStreamCapturing": lambda: False,
        "set_sync_debug_mode": lambda mode: setattr(Card, "sync", mode),
        "get_sync_debug_mode": lambda: Card.sync,
        "getCurrentRawStream": lambda index: 0,
        "clearCublasWorkspaces": lambda: None,
    }
    for name, function in names.items():
        setattr(torch._C, f"_cuda_{name}", function)


def _of_python() -> None:
    """Replace functions of torch.cuda and torch.accelerator, and torch.Generator."""
    cuda: Any = torch.cuda
    torch.Generator = _AnyGenerator("Generator", (), {})  # type: ignore[misc,assignment]
    GENERATORS.extend(Generator(torch.device("cuda", card.index)) for card in CARDS)
    cuda.default_generators = tuple(GENERATORS)
    cuda._is_in_bad_fork = torch._C._cuda_isInBadFork  # type: ignore[attr-defined]
    cuda._exchange_device = torch._C._cuda_exchangeDevice  # type: ignore[attr-defined]
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice  # type: ignore[attr-defined]
    cuda.graphs._cuda_isCurrentStreamCapturing = torch._C._cuda_isCurrentStreamCapturing
    cuda._queued_calls.clear()  # they need a real device
    cuda.is_available = lambda: _count() > 0
    cuda.device_count = _count
    cuda.get_device_properties = _properties
    cuda.mem_get_info = cuda.memory.mem_get_info = lambda device=None: (
        (card := CARDS[_indexed(device).index]).memory - card.now,
        card.memory,
    )
    cuda.Event = cuda.streams.Event = Event
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.current_stream = cuda.default_stream = Stream
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.set_stream = lambda stream: None
    cuda.synchronize = lambda device=None: cuda._lazy_init()
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = fake_graph.Recorder
    cuda.graph = cuda.graphs.graph = fake_graph.recording
    cuda.graph_pool_handle = cuda.graphs.graph_pool_handle = lambda: (0, next(_POOLS))
    accelerator: Any = torch.accelerator  # functions of its own, as Dynamo knows each
    accelerator.is_available = lambda: _count() > 0
    accelerator.device_count = _count
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda") if _count() else None
    accelerator.current_device_index = cuda.current_device
    accelerator.set_device_index = cuda.set_device
    accelerator.synchronize = lambda device=None: cuda.synchronize(device)


def _storages() -> None:
    """Create storages directly on the device; pinned memory is ordinary memory."""
    new = torch.UntypedStorage.__new__

    def made(cls: Any, *args: Any, device: Any = None, **more: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return new(cls, *args, **more, **({} if device is None else {"device": device}))
        given = args[0] if args else more.get("size", 0)
        if isinstance(given, int):
            return torch.empty(given, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(given, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = made  # type: ignore[method-assign,assignment]
    library = torch.library.Library("aten", "IMPL")
    library.impl("_pin_memory", lambda x, device=None: x.clone(), "CPU")
    library.impl("is_pinned", lambda x, device=None: False, "CPU")
    _KEPT.append(library)


def _profiler() -> None:
    """Profile the CPU only: each operation would look for a real device."""
    from torch.profiler import ProfilerActivity, profiler

    own = profiler._KinetoProfile.__init__

    def begin(self: Any, *, activities: Any = None, **more: Any) -> None:
        seen = [ProfilerActivity.CPU] if activities is None else list(activities)
        own(self, activities=[each for each in seen if each != ProfilerActivity.CUDA] or [ProfilerActivity.CPU], **more)

    profiler._KinetoProfile.__init__ = begin  # type: ignore[assignment]
