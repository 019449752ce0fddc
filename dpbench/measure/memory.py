"""Peak memory of one step, as the allocator saw it.

``peak_bytes`` is everything alive at the worst moment: the *baseline* (parameters, buffers and the batch, which live
before and after the step) and what the step itself had allocated then. Never the resident set, which holds the
interpreter, the libraries, and pages that were freed and kept.

On CUDA: the caching allocator's own peaks. A budget is `set_per_process_memory_fraction`: the allocator then refuses to
reserve more, which is *an allocator budget on that card* and not a smaller GPU (workspaces that libraries allocate
beside it, the context and the other processes are not in it).

On a CPU: every allocation and release passes the profiler's memory hook as a signed number of bytes, in order. With
the running sum R_t = Σ_{s≤t} Δ_s, the peak is baseline + max(0, max_t R_t). Kernels' own temporaries are in it (copies
of a convolution's operands in oneDNN's layout, the unfolded input in float64): they come from the same allocator. What
was allocated before the step and is released during it is not seen going; a step must own what it frees. The profiler
slows the step down, so it watches a step of its own, never one that is timed. No CPU allocator enforces a budget: a
step that went over it is said to have gone over (`OverBudget`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clipping import UnsupportedModel
from dpbench.measure.bench import (
    Memory,
    Step,
    available_backend,
    device_of,
    open_workload,
    parameter_count,
    storage_bytes,
)
from dpbench.measure.simulate import simulated_device, simulated_peak_at
from dpbench.outcome import OverBudget
from dpbench.trials import PeakTrial


def measured_peak(step: Callable[[], object], holds: Iterable[Tensor], device: torch.device) -> Memory:
    """Run `step` once and take its peak; `holds` are the tensors that live before and after it.

    On CUDA `holds` is what is reported as the baseline; the peak is the allocator's, whatever else is alive.
    """
    baseline = storage_bytes(holds)
    gc.collect()  # what an earlier step left in reference cycles would be released, and counted, during this one
    if device.type == "cuda":
        return _cuda_peak(step, baseline, device)
    return Memory("cpu_allocator", baseline + max(0, _cpu_growth(step)), baseline)


def _cuda_peak(step: Callable[[], object], baseline: int, device: torch.device) -> Memory:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # or the peak of `reserved` would be that of the steps before
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return Memory(
        "cuda_allocator",
        peak_bytes=stats["allocated_bytes.all.peak"],
        baseline_bytes=baseline,
        active_bytes=stats["active_bytes.all.peak"],
        reserved_bytes=stats["reserved_bytes.all.peak"],
        alloc_retries=stats["num_alloc_retries"],
    )


def _cpu_growth(step: Callable[[], object]) -> int:
    """max_t Σ_{s≤t} Δ_s over the CPU allocator's events during `step`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to standard error, which is a trial's evidence
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    changes.sort(key=lambda change: change[0])
    alive = peak = 0
    for _, size in changes:
        alive += size
        peak = max(peak, alive)
    return peak


def set_budget(budget: int | None, device: torch.device) -> None:
    """Hold CUDA's allocator to `budget` bytes from now on; elsewhere there is nothing to set."""
    if budget is not None and device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)


def within_budget(result: dict[str, Any], budget: int | None) -> dict[str, Any]:
    """`result`, whose "memory" is a record of `Memory`, if its peak is at most `budget` bytes.

    Raises:
        OverBudget: with the result.
    """
    memory = result["memory"]
    if budget is not None and memory["peak_bytes"] > budget:
        peak = f"{memory['peak_bytes'] / 2**30:.3g} GiB ({memory['source']})"
        raise OverBudget(result, f"peak {peak}, over the budget of {budget / 2**30:.3g} GiB")
    return result


class UnsupportedSimulation(UnsupportedModel):
    """The backend refuses the model, or the model's or backend's code does not run on fake tensors."""

    def __init__(self, refusal: UnsupportedModel) -> None:
        super().__init__("", refusal.problems)
        self.args = (f"{refusal} (simulated with fake tensors, on which some code does not run; measured it may)",)


def run(trial: PeakTrial) -> dict[str, Any]:
    """Body of a `PeakTrial`: {"memory", "budget_bytes", "parameters"}.

    Raises:
        OverBudget: the step needs more than `trial.memory_budget`.
        torch.OutOfMemoryError: the device, or its allocator held to the budget, had no more.
        UnsupportedModel: the backend refuses the model, or is not available.
    """
    memory, parameters = _simulated(trial) if trial.simulated else _measured(trial)
    result = {"memory": memory.as_record(), "budget_bytes": trial.memory_budget, "parameters": parameters}
    return within_budget(result, trial.memory_budget)


def _measured(trial: PeakTrial) -> tuple[Memory, int]:
    device = device_of(trial.device)
    set_budget(trial.memory_budget, device)
    with _open_step(trial, trial.batch_size, trial.device) as step:
        return measured_peak(step, step.holds(), device), parameter_count(step.backend.model)


def _simulated(trial: PeakTrial) -> tuple[Memory, int]:
    device = simulated_device(trial.device)
    parameters = 0

    @contextmanager
    def open_at(batch_size: int) -> Iterator[Step]:
        nonlocal parameters
        with _open_step(trial, batch_size, device) as step:
            parameters = parameter_count(step.backend.model)
            yield step

    per_sample_loop = available_backend(trial.backend).per_sample_loop
    try:
        return simulated_peak_at(open_at, trial.batch_size, per_sample_loop=per_sample_loop), parameters
    except UnsupportedModel as error:
        raise UnsupportedSimulation(error) from error


@contextmanager
def _open_step(trial: PeakTrial, batch_size: int, device: str) -> Iterator[Step]:
    backend_class = available_backend(trial.backend)
    workload = open_workload(trial, device)
    batch = workload.batch(batch_size)
    with backend_class(workload.model, workload.loss_fn, verify=False) as backend:
        yield Step(backend, *batch)
