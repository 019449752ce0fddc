"""Measures the peak memory of one step from the allocator's statistics or events.

``peak_bytes`` is everything alive at the worst moment: the *baseline* (parameters, buffers and the batch) and the
step's own allocations. It is never the resident set, which includes the interpreter and the libraries.

On CUDA: the caching allocator's own peaks, plus the private pools of CUDA graphs. The tensors of a captured step live
in such a pool; the allocator counts them as free, although each replay uses them. With F the part of all pools that the
allocator counts as free, ``peak = peak(allocated) + F``. A budget is `set_per_process_memory_fraction`: *an allocator
budget on that card*, not a smaller GPU, as it excludes libraries' workspaces, the context and other processes.

On a CPU: the profiler's memory hook sees every allocation and release as a signed number of bytes, in order. With the
running sum R_t = Σ_{s≤t} Δ_s, the peak is baseline + max(0, max_t R_t). It includes kernels' temporaries, which come
from the same allocator. Releases of memory allocated before the step are not seen; a step must own what it frees. The
profiler slows the step down, so it watches a step of its own, never a timed one. No CPU allocator enforces a budget: a
step that exceeds it raises `OverBudget`.

Functions take:
    budget: bytes, or None.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clipping import UnsupportedModel
from dpbench.measure.bench import (
    BACKWARD,
    FORWARD,
    NAMES,
    Memory,
    Phases,
    Step,
    device_of,
    open_workload,
    parameter_count,
    storage_bytes,
)
from dpbench.measure.precision import arithmetic
from dpbench.measure.simulate import simulated_device, simulated_peak
from dpbench.process.linux import available_cpus
from dpbench.trials import PeakTrial
from dpbench.trials.backend_classes import backend_class
from dpbench.trials.outcome import OverBudget

_MARK = "dpbench phase: "


def measured_peak(
    step: Callable[[], object], holds: Iterable[Tensor], device: torch.device, phases: Phases | None = None
) -> Memory:
    """Run `step` once and return its peak memory.

    On CUDA `holds` only gives the baseline; the peak is the allocator's, and includes all other live tensors.

    Args:
        holds: tensors that live before and after it.
        phases: reports the parts of the step; None for no peaks of parts.
    """
    baseline = storage_bytes(holds)
    gc.collect()  # reference cycles of an earlier step would be freed, and counted, during this one
    if device.type == "cuda":
        return _cuda_peak(step, baseline, device, phases)
    grown = {phase: baseline + growth for phase, growth in _cpu_growth(step, phases).items()}
    return Memory("cpu_allocator", max(grown.values()), baseline, phases=grown if phases is not None else None)


def peak_of(step: Step, device: torch.device) -> Memory:
    """The peak memory of a step of a backend or an engine."""
    return measured_peak(step, step.holds(), device)


def _cuda_peak(step: Callable[[], object], baseline: int, device: torch.device, phases: Phases | None) -> Memory:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # or the peak of `reserved` would include earlier steps
    torch.cuda.reset_peak_memory_stats(device)
    free = free_in_pools(device)
    peaks = {FORWARD: 0, BACKWARD: 0}
    reserved, now = 0, FORWARD

    def entered(phase: str) -> None:
        """The allocator counts when the host requests memory: no need to wait for the device."""
        nonlocal now, reserved
        stats = torch.cuda.memory_stats(device)
        peaks[now] = max(peaks[now], stats["allocated_bytes.all.peak"])
        reserved = max(reserved, stats["reserved_bytes.all.peak"])
        torch.cuda.reset_peak_memory_stats(device)
        now = phase

    if phases is not None:
        phases.entered = entered
    step()
    torch.cuda.synchronize(device)
    entered(BACKWARD)
    return Memory(
        "cuda_allocator",
        peak_bytes=max(peaks.values()) + free,
        baseline_bytes=baseline,
        reserved_bytes=reserved,
        phases={part: peak + free for part, peak in peaks.items()} if phases is not None else None,
    )


def free_in_pools(device: torch.device) -> int:
    """Bytes of the private pools of CUDA graphs that the allocator counts as free.

    Args:
        device: a CUDA device with its index.
    """
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == device.index]
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def _cpu_growth(step: Callable[[], object], phases: Phases | None) -> dict[str, int]:
    """max(0, max_t Σ_{s≤t} Δ_s) over the CPU allocator's events, for each part of `step`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps it off standard error, which is a trial's evidence

    def entered(phase: str) -> None:
        with torch.profiler.record_function(_MARK + phase):
            pass

    # acc_events: with a single cycle, torch 2.11 would warn that it clears the events of others
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        if phases is not None:
            phases.entered = entered
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[tuple[int, int, str]] = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            events.append((event.start_ns(), event.nbytes(), ""))
        elif event.name().startswith(_MARK):
            events.append((event.start_ns(), 0, event.name().removeprefix(_MARK)))
    events.sort(key=lambda event: event[0])
    alive = 0
    now, peaks = FORWARD, {FORWARD: 0, BACKWARD: 0}
    for _, size, phase in events:
        now = phase or now
        alive += size
        peaks[now] = max(peaks[now], alive)
    return peaks


def set_budget(budget: int | None, device: torch.device) -> None:
    """Limit CUDA's allocator to `budget` bytes from now on; does nothing on a CPU."""
    if budget is not None and device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)


def within_budget(result: dict[str, Any], budget: int | None) -> dict[str, Any]:
    """Return `result`, with a record of `Memory` as "memory", if its peak is at most `budget` bytes.

    Raises:
        OverBudget: with the result.
    """
    memory = result["memory"]
    if budget is not None and memory["peak_bytes"] > budget:
        peak = f"{memory['peak_bytes'] / 2**30:.3g} GiB ({memory['source']})"
        raise OverBudget(result, f"peak {peak}, over the budget of {budget / 2**30:.3g} GiB")
    return result


class UnsupportedSimulation(UnsupportedModel):
    """The backend refuses the model, or code of the model or backend does not run on fake tensors."""

    def __init__(self, refusal: UnsupportedModel) -> None:
        super().__init__("", refusal.problems)
        self.args = (f"{refusal} (simulated with fake tensors, on which some code does not run; measured it may)",)


def run(trial: PeakTrial) -> dict[str, Any]:
    """Run a `PeakTrial`: {"memory", "budget_bytes", "parameters"}; "memory" has "phases", each with its peak.

    Raises:
        OverBudget: the step needs more than `trial.memory_budget`.
        torch.OutOfMemoryError: the device, or its allocator under the budget, has no more memory.
        UnsupportedModel: the backend refuses the model, or is not available.
    """
    phases, sizes = Phases(), dict[str, int]()
    with arithmetic(trial.precision, torch.device(trial.device)):
        memory = (_simulated if trial.simulated else _measured)(trial, phases, sizes)
    record = memory.as_record()
    found = {"model": sizes["model"], **(memory.phases or {}), "step": memory.peak_bytes}
    record["phases"] = {name: found[name] for name in NAMES}
    result = {"memory": record, "budget_bytes": trial.memory_budget, "parameters": sizes["parameters"]}
    return within_budget(result, trial.memory_budget)


def _measured(trial: PeakTrial, phases: Phases, sizes: dict[str, int]) -> Memory:
    device = device_of(trial.device)
    set_budget(trial.memory_budget, device)
    with _open_step(trial, trial.device, phases, sizes) as step:
        return measured_peak(step, step.holds(), device, phases)


def _simulated(trial: PeakTrial, phases: Phases, sizes: dict[str, int]) -> Memory:
    device = simulated_device(trial.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(available_cpus())  # as many as the predicted step uses; each allocates memory
    try:
        return simulated_peak(
            lambda: _open_step(trial, device, phases, sizes),
            temporaries=torch.device(trial.device).type == "cpu",  # those of a GPU's kernels are not known
            phases=phases,
        )
    except UnsupportedModel as error:
        raise UnsupportedSimulation(error) from error
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _open_step(trial: PeakTrial, device: str, phases: Phases, sizes: dict[str, int]) -> Iterator[Step]:
    """The trial's step. Notes the bytes of its "model" and the number of its "parameters" in `sizes`."""
    chosen = backend_class(trial.backend)
    workload = open_workload(trial, device)
    batch = workload.batch(trial.batch_size)
    model = workload.model
    sizes |= {"model": storage_bytes([*model.parameters(), *model.buffers()]), "parameters": parameter_count(model)}
    with (
        phases.watched(model, workload.loss_fn) as loss_fn,
        chosen(model, loss_fn, verify=False, compile=False) as backend,
    ):
        yield Step(backend, *batch)
