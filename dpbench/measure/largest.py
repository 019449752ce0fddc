"""Run a `LargestTrial`: find the largest batch that fits in a budget, by a simulated search in one process.

The search is `dpbench.trials.max_batch.MaxBatch`; its probes are simulated steps (`dpbench.measure.simulate`). On CUDA
a `ConfirmTrial` checks that the predicted batch fits and a larger one does not. It verifies the backend on a few
samples, then runs two real steps, each with a fresh backend and within the budget, measured as by a `PeakTrial`: one at
the predicted batch, and one a search step away, larger if the first fitted, else smaller.
"""

import gc
import time
from typing import Any

import torch

from clipping import Backend, Flat
from dpbench.measure import memory, verify
from dpbench.measure.bench import Step, device_of, open_workload, parameter_count
from dpbench.measure.explain import sizes
from dpbench.measure.memory import peak_of, set_budget
from dpbench.measure.overhead import allocations_that_fail
from dpbench.measure.precision import arithmetic
from dpbench.models.workload import Workload
from dpbench.trials import ConfirmTrial, LargestTrial, PeakTrial
from dpbench.trials.backend_classes import backend_class
from dpbench.trials.max_batch import MaxBatch, Probe
from dpbench.trials.outcome import Outcome, OverBudget, classify


def run(trial: LargestTrial) -> dict[str, Any]:
    """{"batch_size", "ended", "probes"}: the largest batch size seen to fit, or 0.

    "ended" is "bracketed" (a batch a tolerance larger does not fit), "full" (the budget is used except for `unused`),
    "limit" (`max_batch_size` fits), "nothing" (a batch of one does not fit) or "time". A probe is {"batch_size",
    "fits", "peak_bytes", "seconds"}, in the order of the search.

    Raises:
        UnsupportedModel: the backend refuses the model, or is not available.
        UsageError: the model cannot be built.
    """
    image_size, num_classes = sizes(trial)
    same = ("model", "backend", "batch_size", "device", "precision", "seed", "memory_budget")
    settings = {name: getattr(trial, name) for name in same}
    probe = PeakTrial(**settings, image_size=image_size, num_classes=num_classes, simulated=True)
    most, start = trial.max_batch_size, trial.batch_size
    search = MaxBatch(probe=probe, start=start, max_batch_size=most, tolerance=trial.tolerance)
    begin = time.monotonic()
    seen: dict[int, Probe] = {}
    probes: list[dict[str, Any]] = []
    while (ended := _end(trial, search, seen, time.monotonic() - begin)) is None:
        size = search.next_batch_size(seen)
        assert size is not None
        before = time.monotonic()
        seen[size] = found = _probe(probe.replace(batch_size=size))
        said = {"batch_size": size, "fits": found.fits, "peak_bytes": found.peak_bytes}
        probes.append(said | {"seconds": time.monotonic() - before})
    return {"batch_size": search.answer(seen), "ended": ended, "probes": probes}


def _probe(trial: PeakTrial) -> Probe:
    try:
        result, fits = memory.run(trial), True
    except OverBudget as over:
        result, fits = over.result, False
    return Probe(fits, result["memory"]["peak_bytes"], result["memory"]["baseline_bytes"])


def _end(trial: LargestTrial, search: MaxBatch, seen: dict[int, Probe], seconds: float) -> str | None:
    """Why the search is over; None if it continues."""
    low = search.answer(seen)
    if search.next_batch_size(seen) is None:
        return "nothing" if not low else "limit" if low >= search.max_batch_size else "bracketed"
    if low and trial.memory_budget is not None:
        peak = seen[low].peak_bytes
        assert peak is not None
        if peak >= (1 - trial.unused) * trial.memory_budget:
            return "full"
    return "time" if seen and seconds >= trial.max_seconds else None


def confirm(trial: ConfirmTrial) -> dict[str, Any]:
    """Run a `ConfirmTrial`: {"parameters", "verification", "coverage", "probes"}.

    A probe is {"batch_size", "fits", "memory", "seconds"}; "memory" is None for a step that ran out of memory.

    Raises:
        Mismatch: the result on a few samples differs from the oracle's; no step was run.
        UnsupportedModel: the backend refuses the model, or is not available.
    """
    device = device_of(trial.device)
    with arithmetic(trial.precision, device), allocations_that_fail(device):
        workload = open_workload(trial)
        result: dict[str, Any] = {"parameters": parameter_count(workload.model)}
        with _opened(trial, workload, clip=Flat(max_grad_norm=1.0)) as backend:
            few = workload.batch(verify.SAMPLES * backend.together)
            verify.verified(backend, *few, trial.precision, result)
        set_budget(trial.memory_budget, device)
        first = _measured(trial, workload, trial.batch_size, device)
        size = trial.second(fits=first["fits"])
        second = [] if size is None else [_measured(trial, workload, size, device)]
    return result | {"probes": [first, *second]}


def _opened(trial: ConfirmTrial, workload: Workload, **options: Any) -> Backend:
    return backend_class(trial.backend)(workload.model, workload.loss_fn, verify=False, compile=False, **options)


def _measured(trial: ConfirmTrial, workload: Workload, size: int, device: torch.device) -> dict[str, Any]:
    gc.collect()  # reference cycles of an earlier step would count against the budget
    begin, memory = time.monotonic(), None
    try:
        memory = _peak(trial, workload, size, device)
    except Exception as error:
        if classify(error)[0] is not Outcome.OOM:
            raise
        error.__traceback__ = None  # its frames hold the tensors of the step
    fits = memory is not None and (trial.memory_budget is None or memory["peak_bytes"] <= trial.memory_budget)
    return {"batch_size": size, "fits": fits, "memory": memory, "seconds": time.monotonic() - begin}


def _peak(trial: ConfirmTrial, workload: Workload, size: int, device: torch.device) -> dict[str, Any]:
    with _opened(trial, workload) as backend:
        return peak_of(Step(backend, *workload.batch(size)), device).as_record()
