"""Predicts the peak memory of a step by running it on fake tensors.

Under `FakeTensorMode` a tensor has a shape, a dtype and a device, and no data: a step through model, autograd and
clipping takes about a second, whatever the batch size. A storage is born when an operation returns a tensor with a new
one, and dies when the last tensor, view or saved tensor of the graph frees it. Hence

    peak = baseline + max_t Σ_{s alive at t} bytes(s) − Σ_{s alive before the step} bytes(s)

with the baseline as in `dpbench.measure.memory`. The backward pass runs on the calling thread, which has the modes.

**Inside an operation** a kernel allocates and frees memory that no mode sees. For a CPU, formulas add it (`_at_once`).
Workspaces of cuDNN and cuBLAS, rounding by the allocator and fragmentation are unknown: nothing is added on CUDA, or
for a device that this machine lacks. The experiment `memory_accuracy` compares.

**Where branches join** (a residual connection) autograd adds one gradient to the other in place if it holds the only
reference, but never under a mode. The tracker subtracts the difference: a sum made by the autograd engine that directly
outlives its first summand counts as that summand.

**A loop over blocks of a batch**, or over its samples (`clipping.core.microbatching`), runs the last of its largest
blocks alone. The results of the blocks before it exist while it runs, so their bytes are added (`LastForAll`).
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # the fake mode imports it; loaded here, before a server forks a trial
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from clipping.core.batches import tensors_of
from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import InTurn, Parts, taken_by
from clipping.numerics.convolution_memory import Convolution
from dpbench.measure.bench import BACKWARD, FORWARD, Memory, Phases, Step, storage_bytes

#: Files whose functions wrap a mode, to keep the compiler away from it.
_WRAPPERS = {torch._dynamo.eval_frame.__file__, torch._compile.__file__}


OpenStep = Callable[[], AbstractContextManager[Step]]


class StorageLifetimes(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, from birth to death.

    Args:
        temporaries: also count memory that CPU kernels allocate and free inside one operation.

    Attributes:
        alive: bytes now.
        peaks: part of a step -> the most bytes alive while it ran.
        phase: the running part; see `enter`.
    """

    def __init__(self, *, temporaries: bool = False) -> None:
        super().__init__()
        self.alive = 0
        self.phase = FORWARD
        self.peaks = {FORWARD: 0}
        self._temporaries = temporaries
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._replaced: int | None = None  # the summand that autograd may replace, until another event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.alive
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and _the_engine_adds(sys._getframe(1)):
            self._accumulated(args[0], result)
            return result
        if self._temporaries:
            self.peak = max(self.peak, before + _at_once(func, args, result))
        for part in tensors_of(result):
            self.watch(part)
        return result

    def watch(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` from now to its death, unless it already counts.

        Args:
            tensor: real or fake.
        """
        if tensor.layout is not torch.strided:
            return  # a sparse tensor has no storage of its own; its indices and values are watched
        storage = tensor.untyped_storage()
        key = id(storage)  # one Python object for as long as the storage lives
        if key in self._watched:
            return
        size = storage.nbytes()
        self._settle()

        def dead(_: object) -> None:
            if self._replaced == key:
                self._replaced = None  # no other reference: autograd added in place
            self._settle()
            self.alive -= size
            del self._watched[key]

        self._watched[key] = weakref.ref(storage, dead)
        self.alive += size
        self.peak = max(self.peak, self.alive)

    @property
    def peak(self) -> int:
        """The most bytes alive while the present part ran; assign to reset it."""
        return self.peaks[self.phase]

    @peak.setter
    def peak(self, peak: int) -> None:
        self.peaks[self.phase] = peak

    def enter(self, phase: str) -> None:
        """Begin or continue a part of the step.

        Args:
            phase: its name.
        """
        self._settle()
        self.phase = phase
        self.peak = max(self.peaks.get(phase, 0), self.alive)

    @contextmanager
    def beside(self) -> Iterator[list[int]]:
        """Add further bytes to the peaks inside the context; the caller appends them to the list before it ends."""
        self._settle()
        before, self.peaks = self.peaks, {self.phase: self.alive}
        further: list[int] = []
        try:
            yield further
        finally:
            self._settle()
            inside, self.peaks = self.peaks, before
            for phase, peak in inside.items():
                self.peaks[phase] = max(self.peaks.get(phase, 0), peak + sum(further))

    def _accumulated(self, old: Tensor, new: Tensor) -> None:
        """`new` is `old` plus another gradient; the next death tells whether `new` replaces `old`."""
        peak = self.peak
        self.watch(new)
        if old.shape == new.shape and old.is_contiguous():
            self.peak = max(peak, self.alive - new.untyped_storage().nbytes())
            self._replaced = id(old.untyped_storage())

    def _settle(self) -> None:
        """Another event came before the old gradient's death: others hold it, and the sum is a separate tensor."""
        if self._replaced is not None:
            self._replaced = None
            self.peak = max(self.peak, self.alive)


class LastForAll(InTurn):
    """Runs the last of the largest blocks alone, and derives the size of the other blocks' results from its result.

    Args:
        lifetimes: of the step.
    """

    def __init__(self, lifetimes: StorageLifetimes) -> None:
        self._lifetimes = lifetimes

    def each(self, of_block: Callable[[slice], Parts], blocks: list[slice]) -> list[Parts]:
        largest = max(reversed(blocks), key=_size)  # the very last may be a smaller remainder
        before, all_others = largest.start - blocks[0].start, sum(map(_size, blocks)) - _size(largest)

        def rows(part: Tensor, samples: int) -> int:
            return -(-samples * len(part) // _size(largest))

        with self._lifetimes.beside() as left:
            parts = of_block(largest)
            left.append(sum(rows(part, before) * _nbytes(part) // len(part) for part in parts))
        return [tuple(part.new_empty(rows(part, all_others), *part.shape[1:]) for part in parts), parts]

    def added(self, of_block: Callable[[slice], Tensor], blocks: list[slice]) -> Tensor:
        with self._lifetimes.beside() as left:
            found = of_block(blocks[-1])
            left.append(found.numel() * norm_dtype(found.dtype).itemsize)
        return found.to(norm_dtype(found.dtype))


def _the_engine_adds(frame: FrameType | None) -> bool:
    """True if autograd itself adds two gradients: then no function of a backward pass called the addition."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_run_backward.__code__


def _at_once(func: Any, args: Any, result: Any) -> int:
    """Peak bytes that a CPU's kernel allocates inside one operation, results included; 0 if only the results."""
    aten = torch.ops.aten
    if func is aten.convolution.default and not args[6]:
        x, weight, _, stride, *_, groups = args
        dense = sum(_nbytes(each) for each in (x, weight) if not each.is_contiguous())
        return dense + Convolution(x.shape, weight.shape, result.shape, stride, groups, x.dtype).forward()
    if func is aten.convolution_backward.default and not args[7]:
        g, x, weight, _, stride, *_, groups, (of_input, of_weight, _) = args
        dense = sum(_nbytes(each) for each in (g, x, weight) if not each.is_contiguous())
        sizes = Convolution(x.shape, weight.shape, g.shape, stride, groups, g.dtype)
        return dense + sizes.gradients(of_input, of_weight)
    if func in (aten._log_softmax.default, aten._softmax.default) and not args[0].is_contiguous():
        return _nbytes(args[0]) + _nbytes(result)
    if func is aten.native_group_norm_backward.default:
        sums = 2 * args[5] * args[6] * args[0].element_size()
        return sums + sum(_nbytes(part) for part in result if part is not None)
    if func is aten.addcmul_.default:
        total, *factors = args
        return sum(each.numel() * total.element_size() for each in factors if each.dim() and each.dtype != total.dtype)
    return 0


def _size(block: slice) -> int:
    return block.stop - block.start


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def simulated_peak(open_step: OpenStep, *, temporaries: bool = True, phases: Phases | None = None) -> Memory:
    """The peak of one step.

    Args:
        open_step: called under fake tensors; builds model, batch and backend.
        temporaries: include those inside a CPU's kernels.
        phases: reports the parts of the step, for their peaks.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        StorageLifetimes(temporaries=temporaries) as lifetimes,
        taken_by(LastForAll(lifetimes)),
        torch.autograd.set_multithreading_enabled(False),
        open_step() as step,
    ):
        holds = step.holds()
        for tensor in holds:
            lifetimes.watch(tensor)  # a model may come from real tensors, which no operation returned
        baseline = storage_bytes(holds)
        gc.collect()  # reference cycles left by building must not die during the step
        before = lifetimes.alive
        lifetimes.phase, lifetimes.peaks = FORWARD, {FORWARD: before, BACKWARD: before}
        if phases is not None:
            phases.entered = lifetimes.enter
        step()
        lifetimes.enter(BACKWARD)
        grown = {phase: baseline + peak - before for phase, peak in lifetimes.peaks.items()}
        return Memory("simulated", max(grown.values()), baseline, phases=grown if phases is not None else None)


def simulated_device(name: str) -> str:
    """The device of fake tensors: `name`, or the CPU if this machine lacks such a device.

    (Autograd calls the device's driver for its streams even for fake tensors.)

    Args:
        name: "cpu" or "cuda".
    """
    return "cpu" if torch.device(name).type == "cuda" and not torch.cuda.is_available() else name
