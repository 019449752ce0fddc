"""The peak memory of a step that is never computed.

Under `FakeTensorMode` a tensor has a shape, a dtype and a device, and no data: the step runs through model, autograd
and clipping in a second or so, whatever the batch size. Its storages are empty but real objects, born when an
operation returns a tensor with a new one and dead when the last tensor, view or saved tensor of the graph lets go.
Hence the peak: let s range over storages, alive at time t if born(s) ≤ t < dead(s). Then

    peak = baseline + max_t Σ_{s alive at t} bytes(s) − Σ_{s alive before the step} bytes(s)

with the baseline as in `dpbench.measure.memory`. A view or an alias is no new storage, nor is an in-place result; what
autograd saves is counted because its storage lives. The backward pass runs on the calling thread
(`set_multithreading_enabled(False)`), where the modes are.

**Inside an operation** a kernel allocates and frees memory that no mode sees. On a CPU it is added by formula
(`temporaries`): copies of a convolution's operands in oneDNN's layout (`measure.convolution_memory`), a softmax's
dense copy of its input, a group norm's sums, a wide copy of what is added to a wider sum. Workspaces of cuDNN and
cuBLAS, rounding by the allocator and fragmentation are not known: on CUDA, or for a device that this machine lacks,
none are added. The experiment `memory_accuracy` compares.

**Where branches join** (a residual connection) autograd adds one gradient to the other in place if nobody else holds
it, but never while a mode watches. The tracker takes back what is then alive in excess: a sum that the engine itself
makes, and that outlives its first summand at once, is that summand.

**A loop over blocks of a batch**, or over its samples (`clipping.core.microbatching`), is one block: the last. It is
one of the largest, and what the others leave is there while it is worked on: so many bytes are added to all of it
(`LastForAll`). So a step has about the same operations at any batch size, and takes the same time.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
import torch._dynamo  # the fake mode imports it in its constructor; here, a server has it before it forks a trial
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import InTurn, Parts, taken_by
from dpbench.measure.bench import Memory, storage_bytes
from dpbench.measure.convolution_memory import Convolution
from dpbench.measure.phases import BACKWARD, FORWARD, Phases

#: Where a mode is wrapped, to keep a compiler off it.
_WRAPPERS = {torch._dynamo.eval_frame.__file__, torch._compile.__file__}


class SimulatedStep(Protocol):
    """What is simulated: a step, and the tensors that live before and after it (`dpbench.measure.bench.Step`)."""

    def __call__(self) -> object: ...

    def holds(self) -> list[Tensor]:
        """Tensors that live before and after the step."""


OpenStep = Callable[[], AbstractContextManager[SimulatedStep]]


class StorageLifetimes(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, from their birth to their death.

    Args:
        temporaries: count what kernels of a CPU allocate and free inside one operation too.

    Attributes:
        alive: bytes now.
        peaks: part of a step -> the most there were while it ran.
        phase: the part that runs now; see `enter`.
    """

    def __init__(self, *, temporaries: bool = False) -> None:
        super().__init__()
        self.alive = 0
        self.phase = FORWARD
        self.peaks = {FORWARD: 0}
        self._temporaries = temporaries
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._replaced: int | None = None  # what the engine adds to, as long as nothing else has happened

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.alive
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and _the_engine_adds(sys._getframe(1)):
            self._accumulated(args[0], result)
            return result
        if self._temporaries:
            self.peak = max(self.peak, before + at_once(func, args, result))
        if isinstance(result, Tensor):
            self.watch(result)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self.watch(part)
        return result

    def watch(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` from now to its death, unless it is counted already.

        Args:
            tensor: real or fake.
        """
        if tensor.layout is not torch.strided:
            return  # a sparse tensor has no storage of its own; the indices and values it is made of are seen
        storage = tensor.untyped_storage()
        key = id(storage)  # one Python object for as long as the storage lives
        if key in self._watched:
            return
        size = storage.nbytes()
        self._settle()

        def dead(_: object) -> None:
            if self._replaced == key:
                self._replaced = None  # nobody else held it: it was added to in place
            self._settle()
            self.alive -= size
            del self._watched[key]

        self._watched[key] = weakref.ref(storage, dead)
        self.alive += size
        self.peak = max(self.peak, self.alive)

    @property
    def peak(self) -> int:
        """The most bytes while the present part of a step ran; assign to it to begin anew."""
        return self.peaks[self.phase]

    @peak.setter
    def peak(self, peak: int) -> None:
        self.peaks[self.phase] = peak

    def enter(self, phase: str) -> None:
        """Another part of the step begins, or goes on.

        Args:
            phase: its name.
        """
        self._settle()
        self.phase = phase
        self.peak = max(self.peaks.get(phase, 0), self.alive)

    @contextmanager
    def beside(self) -> Iterator[list[int]]:
        """Count what is alive inside it beside further bytes, which the caller adds to the list before it ends."""
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
        """`new` is `old` and another gradient; whether in the place of `old` is seen from what dies next."""
        peak = self.peak
        self.watch(new)
        if old.shape == new.shape and old.is_contiguous():
            self.peak, self._replaced = (
                max(peak, self.alive - new.untyped_storage().nbytes()),
                id(old.untyped_storage()),
            )

    def _settle(self) -> None:
        """Something happened before the old gradient died: it is held by somebody, and the sum is a tensor beside."""
        if self._replaced is not None:
            self._replaced = None
            self.peak = max(self.peak, self.alive)


class LastForAll(InTurn):
    """The last block alone: what the others have left is there while it is worked on, and how large that is it shows.

    Args:
        lifetimes: that see the step.
    """

    def __init__(self, lifetimes: StorageLifetimes) -> None:
        self._lifetimes = lifetimes

    def each(self, of_block: Callable[[slice], Parts], blocks: list[slice]) -> list[Parts]:
        if len(blocks) < 2:
            return super().each(of_block, blocks)
        largest = max(reversed(blocks), key=_size)  # the very last may be what was left over
        before, all_others = largest.start - blocks[0].start, sum(map(_size, blocks)) - _size(largest)

        def rows(part: Tensor, samples: int) -> int:
            return -(-samples * len(part) // _size(largest))

        with self._lifetimes.beside() as left:
            parts = of_block(largest)
            left.append(sum(rows(part, before) * _nbytes(part) // len(part) for part in parts))
        return [tuple(part.new_empty(rows(part, all_others), *part.shape[1:]) for part in parts), parts]

    def added(self, of_block: Callable[[slice], Tensor], blocks: list[slice]) -> Tensor:
        if len(blocks) < 2:
            return super().added(of_block, blocks)
        with self._lifetimes.beside() as left:
            found = of_block(blocks[-1])
            left.append(found.numel() * norm_dtype(found.dtype).itemsize)
        return found.to(norm_dtype(found.dtype))


def _the_engine_adds(frame: FrameType | None) -> bool:
    """Whether an addition is autograd's own, of gradients that meet: then no function of a backward pass has called it.

    Args:
        frame: the Python frame from which it came, perhaps by way of a mode's wrappers.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_run_backward.__code__


def at_once(func: Any, args: Any, result: Any) -> int:
    """Bytes that a CPU's kernel has allocated at once inside one operation, results included; 0 if no more than these.

    Args:
        func: the overload that is dispatched.
        args: its positional arguments.
        result: what it returned, or its shapes on fake tensors.
    """
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
    """The peak of one step; `open_step()` is called under fake tensors, and builds model, batch and backend there.

    Args:
        open_step: see above.
        temporaries: those inside a CPU's kernels are in it.
        phases: what tells of the parts of the step, for their peaks.
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
            lifetimes.watch(tensor)  # a model may have been built of real tensors first: no operation returned these
        baseline = storage_bytes(holds)
        gc.collect()  # building leaves cycles; they must not die during the step
        before = lifetimes.alive
        lifetimes.phase, lifetimes.peaks = FORWARD, {FORWARD: before, BACKWARD: before}
        if phases is not None:
            phases.entered = lifetimes.enter
        step()
        lifetimes.enter(BACKWARD)
        grown = {phase: baseline + peak - before for phase, peak in lifetimes.peaks.items()}
        return Memory("simulated", max(grown.values()), baseline, phases=grown if phases is not None else None)


def simulated_device(name: str) -> str:
    """Where fake tensors say they are: on `name`, or on the CPU where this machine has no such device.

    (Autograd asks the device's driver for its streams, fake or not.) Backends that choose by device choose alike.

    Args:
        name: "cpu" or "cuda".
    """
    return "cpu" if torch.device(name).type == "cuda" and not torch.cuda.is_available() else name
