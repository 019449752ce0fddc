"""Run a `ConfirmTrial`: check by real steps that the predicted largest batch fits and a larger one does not.

Verify the backend on a few samples, then run two real steps, each with a fresh backend and within the budget, measured
as by a `PeakTrial`: one at the predicted batch, and one a search step away, larger if the first fitted, else smaller.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from clipping import Backend, Flat
from dpbench.measure import verify
from dpbench.measure.bench import Step, device_of, open_workload, parameter_count
from dpbench.measure.memory import peak_of, set_budget
from dpbench.measure.overhead import allocations_that_fail
from dpbench.measure.precision import arithmetic
from dpbench.models.workload import Workload
from dpbench.trials import ConfirmTrial
from dpbench.trials.backend_classes import backend_class
from dpbench.trials.outcome import Outcome, classify


def run(trial: ConfirmTrial) -> dict[str, Any]:
    """{"parameters", "verification", "coverage", "probes"}; a probe is {"batch_size", "fits", "memory", "seconds"}.

    "memory" is None for a step that ran out of memory.

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
        first = _probe(trial, workload, trial.batch_size, device)
        size = trial.second(fits=first["fits"])
        second = [] if size is None else [_probe(trial, workload, size, device)]
    return result | {"probes": [first, *second]}


def _opened(trial: ConfirmTrial, workload: Workload, **options: Any) -> Backend:
    return backend_class(trial.backend)(workload.model, workload.loss_fn, verify=False, compile=False, **options)


def _probe(trial: ConfirmTrial, workload: Workload, size: int, device: torch.device) -> dict[str, Any]:
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
