"""The peak memory of a step that is never computed.

Under `FakeTensorMode` a tensor has a shape, a dtype and a device, and no data: the step runs through model, autograd
and clipping in a second or so, whatever the batch size. Its storages are empty but real objects, born when an
operation returns a tensor with a new one and dead when the last tensor, view or saved tensor of the graph lets go.
Hence the peak: let s range over storages, alive at time t if born(s) ≤ t < dead(s). Then

    peak = baseline + max_t Σ_{s alive at t} bytes(s) − Σ_{s alive before the step} bytes(s)

with the baseline as in `dpbench.measure.memory`. A view or an alias is no new storage, nor is an in-place result; what
autograd saves is counted because its storage lives. The backward pass runs on the calling thread
(`set_multithreading_enabled(False)`), where the modes are.

**What it cannot see** is what a kernel allocates and frees inside one operation: workspaces of cuDNN and cuBLAS, copies
of a convolution's operands in oneDNN's layout, rounding by the allocator, fragmentation. Beside the CPU's allocator,
the peaks between operations agree to the byte for every backend; with the temporaries inside operations the simulated
peak is 0 to 6 % lower, up to 11 % for mixed ghost norms of convolutions (B = 32; the test has the numbers).
**What it sees in excess**: autograd adds gradients in place where it can, but never while a mode watches, so where
branches join (a residual connection) one activation more may be alive: 0.5 % of ordinary training of a ResNet18.

**A loop over samples** (`per_sample_loop`) does the same for every sample, and keeps of it only the norm and the loss.
From the second sample on, iterations allocate alike, so at the worst moment of the last one

    peak(B) = (what does not depend on B) + B · (bytes of an input, a target, a norm, a loss)

is affine in B for B ≥ 3, and two small batches give the peak of any.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch._dynamo  # the fake mode imports it in its constructor; here, a server has it before it forks a trial
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench.measure.bench import Memory, storage_bytes

#: The two batch sizes that a loop over samples is simulated at: steady, and one more.
_LOOP_SIZES = (3, 4)


class SimulatedStep(Protocol):
    """What is simulated: a step, and the tensors that live before and after it (`dpbench.measure.bench.Step`)."""

    def __call__(self) -> object: ...

    def holds(self) -> list[Tensor]: ...


OpenStep = Callable[[], AbstractContextManager[SimulatedStep]]


class StorageLifetimes(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, from their birth to their death.

    alive: bytes now. peak: the most there were; assign to it to begin anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.watch(result)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self.watch(part)
        return result

    def watch(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` from now to its death, unless it is counted already."""
        if tensor.layout is not torch.strided:
            return  # a sparse tensor has no storage of its own; the indices and values it is made of are seen
        storage = tensor.untyped_storage()
        key = id(storage)  # one Python object for as long as the storage lives
        if key in self._watched:
            return
        size = storage.nbytes()

        def dead(_: object) -> None:
            self.alive -= size
            del self._watched[key]

        self._watched[key] = weakref.ref(storage, dead)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def simulated_peak(open_step: OpenStep) -> Memory:
    """The peak of one step; `open_step()` is called under fake tensors, and builds model, batch and backend there."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        StorageLifetimes() as lifetimes,
        torch.autograd.set_multithreading_enabled(False),
        open_step() as step,
    ):
        holds = step.holds()
        for tensor in holds:
            lifetimes.watch(tensor)  # a model may have been built of real tensors first: no operation returned these
        baseline = storage_bytes(holds)
        gc.collect()  # building leaves cycles; they must not die during the step
        before = lifetimes.peak = lifetimes.alive
        step()
        return Memory("simulated", baseline + lifetimes.peak - before, baseline)


def simulated_peak_at(
    open_step_at: Callable[[int], AbstractContextManager[SimulatedStep]],
    batch_size: int,
    *,
    per_sample_loop: bool = False,
) -> Memory:
    """The peak at one batch size; exact and quick also for a backend that loops over samples (see the module)."""
    if not per_sample_loop or batch_size <= _LOOP_SIZES[1]:
        return simulated_peak(lambda: open_step_at(batch_size))
    few, more = (simulated_peak(lambda size=size: open_step_at(size)) for size in _LOOP_SIZES)  # type: ignore[misc]
    steps = batch_size - _LOOP_SIZES[0]
    return Memory(
        "simulated",
        peak_bytes=few.peak_bytes + steps * (more.peak_bytes - few.peak_bytes),
        baseline_bytes=few.baseline_bytes + steps * (more.baseline_bytes - few.baseline_bytes),
    )


def simulated_device(name: str) -> str:
    """Where fake tensors say they are: on `name`, or on the CPU where this machine has no such device.

    (Autograd asks the device's driver for its streams, fake or not.) Backends that choose by device choose alike.
    """
    return "cpu" if torch.device(name).type == "cuda" and not torch.cuda.is_available() else name
