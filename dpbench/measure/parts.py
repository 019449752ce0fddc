"""Run a `PartsTrial`: measure each part of a `PrivacyEngine` step, and of a plain step of the same optimizer.

Parts of a private step: ``forward`` (model and losses), ``clip`` (backward pass, norms, clipped sum), ``finite`` (are
the sums finite), ``noise`` (noise, division, writing to `.grad`), ``optimizer``, and ``rest`` (other work).
A part's time excludes the parts inside it, so the parts add up to the step. Separate passes measure

- seconds: on CUDA an event at every border; on a CPU the host's clock.
- launches and waits: on CUDA from a trace of torch.profiler; on a CPU, the operations that torch dispatches, and the
  numbers that the host reads from tensors, which would be waits on CUDA. `counted` names what was counted.

The result is ``{"tensors", "parameters", "counted", "steps": {"plain": entry, "private": entry}}``; an entry is
``{"parts": {name: {"seconds": [one a step], "launches", "waits"}}, "step_seconds": [...]}``.
"""

import contextlib
import gc
import itertools
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clipping.core.batches import forward
from dpbench.engine import PrivacyEngine, PrivacyWarning
from dpbench.engine import engine as engine_module
from dpbench.engine.release import Sums
from dpbench.measure.bench import device_of, open_workload, parameter_count
from dpbench.measure.precision import arithmetic
from dpbench.measure.traces import traced
from dpbench.measure.training_step import engine_for
from dpbench.trials.evidence import PartsTrial
from dpbench.trials.not_here import NotHere

#: The first step verifies and compiles, the second may check whether samples mix, and the allocator settles.
WARM = 4
REST = "rest"
PARTS: dict[str, tuple[str, ...]] = {
    "plain": ("forward", "backward", "optimizer", REST),
    "private": ("forward", "clip", "finite", "noise", "optimizer", REST),
}
#: Steps in a trace; launches hardly differ between steps.
TRACED = 2
_MARK = "dpbench part: "
_NUMBERS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")


Counts = tuple[Counter[str], Counter[str]]
"""Launches and host waits of each part in `TRACED` steps."""


class Parts:
    """A step and its running part; calls `left` at every border.

    Attributes:
        step: runs one step.
        left: called with the name of the part that ends or is interrupted by one inside it.

    Methods take:
        name: of a part.
    """

    def __init__(self) -> None:
        self.inside = [REST]
        self.step: Callable[[], None] = lambda: None
        self.left: Callable[[str], None] = lambda name: None

    def watched(self, left: Callable[[str], None]) -> None:
        """Run a step, and call `left` at every border of it, with "" at its beginning and `REST` at its end.

        Args:
            left: see the class.
        """
        left("")
        with mock.patch.object(self, "left", left):
            self.step()
        left(REST)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attribute the body to a part."""
        self.left(self.inside[-1])
        self.inside.append(name)
        try:
            yield
        finally:
            self.left(name)
            self.inside.pop()


def run(trial: PartsTrial) -> dict[str, Any]:
    """See the module's docstring.

    Raises:
        UnsupportedModel: the engine's backend refuses the model.
    """
    device = device_of(trial.device)
    steps: dict[str, Any] = {}
    counted = "kernel launches" if device.type == "cuda" else "operations that torch dispatches"
    for name in PARTS:
        with arithmetic(trial.precision, device), _opened(trial, name == "private") as parts:
            for _ in range(WARM):
                parts.step()
            gc.collect()
            seconds = [_seconds(parts, device) for _ in range(trial.steps)]
            try:
                counts = (_launches if device.type == "cuda" else _dispatched)(parts, device)
            except NotHere as reason:
                counts, counted = None, str(reason)
            steps[name] = _entry(PARTS[name], seconds, counts)
        gc.collect()
    workload = open_workload(trial, "cpu")
    return {
        "tensors": sum(p.requires_grad for p in workload.model.parameters()),
        "parameters": parameter_count(workload.model),
        "counted": counted,
        "steps": steps,
    }


@contextlib.contextmanager
def _opened(trial: PartsTrial, private: bool) -> Iterator[Parts]:
    """The engine's step on the caller's batches, without the loader; or the ordinary step, of the losses' mean."""
    workload, parts = open_workload(trial), Parts()
    inputs, targets = workload.batch(trial.batch_size)
    optimizer = getattr(torch.optim, trial.optimizer)(workload.model.parameters(), lr=1e-4)

    def step() -> None:
        with parts.part("forward"):
            losses = workload.loss_fn(forward(workload.model, inputs), targets)
        if private:
            optimizer.step(loss=losses)
        else:
            with parts.part("backward"):
                losses.mean().backward()
            with parts.part("optimizer"):
                optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    parts.step = step
    if not private:
        yield parts
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        with _told(parts, engine_for(trial.backend, workload, trial.batch_size), optimizer):
            yield parts


@contextlib.contextmanager
def _told(parts: Parts, engine: PrivacyEngine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Attach the engine, and patch it to report its parts."""
    optimizer.step = parts.part("optimizer")(optimizer.step)  # type: ignore[method-assign]
    with contextlib.ExitStack() as stack:
        engine.attach(optimizer)
        stack.callback(engine.detach)
        for owner, name, part in (
            (engine._recorder, "finish", "clip"),
            (Sums, "require_finite", "finite"),
            (engine_module, "release_gradients", "noise"),
        ):
            own = getattr(owner, name)
            setattr(owner, name, parts.part(part)(own))
            stack.callback(setattr, owner, name, own)
        yield


def _entry(names: tuple[str, ...], seconds: list[dict[str, float]], counts: Counts | None) -> dict[str, Any]:
    """The entry of one kind of step: each part's seconds in every step, and its counts in one step."""
    parts: dict[str, Any] = {}
    for name in names:
        launches, waits = (None, None) if counts is None else (each[name] / TRACED for each in counts)
        taken = [each.get(name, 0.0) for each in seconds]
        parts[name] = {"seconds": taken, "launches": launches, "waits": waits}
    return {"parts": parts, "step_seconds": [sum(each.values()) for each in seconds]}


def _seconds(parts: Parts, device: torch.device) -> dict[str, float]:
    """Seconds of each part in one step."""
    cuda = device.type == "cuda"
    borders: list[tuple[str, Any]] = []

    def left(name: str) -> None:
        if cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            borders.append((name, event))
        else:
            borders.append((name, time.perf_counter()))

    if cuda:
        torch.cuda.synchronize(device)
    parts.watched(left)
    if cuda:
        torch.cuda.synchronize(device)
    found: defaultdict[str, float] = defaultdict(float)
    for (_, before), (name, after) in itertools.pairwise(borders):
        found[name] += before.elapsed_time(after) / 1000 if cuda else after - before
    return found


def _launches(parts: Parts, device: torch.device) -> Counts:
    """(kernels launched, waits of the host) of each part in `TRACED` steps, from a trace with a mark at each border."""

    def left(name: str) -> None:
        with torch.profiler.record_function(_MARK + name):
            pass

    trace = traced(lambda: parts.watched(left), device, TRACED)
    marks, found = trace.marks(_MARK), (Counter[str](), Counter[str]())
    for (begin, _), (end, name) in itertools.pairwise(marks):
        for counter, times in zip(found, (trace.launches(), trace.waits()), strict=True):
            counter[name] += sum(begin <= time < end for time in times) if name else 0
    return found


class _Dispatched(TorchDispatchMode):
    """Counts the operations, and the numbers that the host reads, of each part."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts, self.operations, self.numbers = parts, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = self.parts.inside[-1]
        self.operations[part] += 1
        self.numbers[part] += func._schema.name in _NUMBERS
        return func(*args, **(kwargs or {}))


def _dispatched(parts: Parts, device: torch.device) -> Counts:
    """(operations, numbers read by the host) of each part in `TRACED` steps."""
    with _Dispatched(parts) as counted:
        for _ in range(TRACED):
            parts.step()
    return counted.operations, counted.numbers
