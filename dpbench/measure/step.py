"""Run a `StepTrial`: verify one training step, time it, then measure its memory.

The order keeps each part from disturbing the next: the oracle's memory is freed before the allocator's budget is set,
the timing is warm, and the profiler of the CPU's memory, which slows everything down, comes last.
"""

import gc
from typing import Any

import torch

from clipping import Flat
from dpbench.measure import counters, verify
from dpbench.measure.bench import Step, device_of, open_workload, parameter_count
from dpbench.measure.flops import model_flops
from dpbench.measure.memory import peak_of, set_budget, within_budget
from dpbench.measure.precision import arithmetic, facts
from dpbench.measure.timing import stopwatch_for, time_steps
from dpbench.trials import StepTrial
from dpbench.trials.backend_classes import backend_class


def run(trial: StepTrial) -> dict[str, Any]:
    """{"parameters", "verification", "coverage", "loss", "warmup_seconds", "step_seconds", "memory", "precision",
    "way" (eager), on CUDA "model_flops" (`dpbench.measure.flops`)}.

    "precision" has torch's switches (`dpbench.measure.precision.facts`). On CUDA also "gpu": its clocks, power and
    temperature after the last timed step.

    Raises:
        Mismatch: the result on the first samples differs from the oracle's; nothing was timed.
        OverBudget: the step needs more than `trial.memory_budget`; it was timed all the same.
        torch.OutOfMemoryError: the device, or its allocator under the budget, has no more memory.
        UnsupportedModel: the backend refuses the model, or is not available; or the device lacks this precision.
    """
    device = device_of(trial.device)
    with arithmetic(trial.precision, device):
        return within_budget(_measured(trial, device), trial.memory_budget)


def _measured(trial: StepTrial, device: torch.device) -> dict[str, Any]:
    chosen = backend_class(trial.backend)
    workload = open_workload(trial)
    inputs, targets = workload.batch(trial.batch_size)
    clip = Flat(max_grad_norm=trial.max_grad_norm)
    with chosen(workload.model, workload.loss_fn, clip=clip, verify=False, compile=False) as backend:
        result: dict[str, Any] = {"parameters": parameter_count(workload.model)}
        verify.verified(backend, inputs, targets, trial.precision, result)
        gc.collect()

        set_budget(trial.memory_budget, device)
        timed = Step(backend, inputs, targets)
        timing = time_steps(timed, stopwatch=stopwatch_for(device), steps=trial.steps, max_seconds=trial.max_seconds)
        if device.type == "cuda":
            result["gpu"] = counters.sample(device)
        assert timed.losses is not None
        loss = float(timed.losses.double().mean())
        memory = peak_of(Step(backend, inputs, targets), device)  # a fresh one frees nothing of an earlier step
        result |= {
            "coverage": dict(backend.coverage),
            "warmup_seconds": timing.warmup_seconds,
            "step_seconds": timing.step_seconds,
            "memory": memory.as_record(),
            "loss": loss,
            "way": backend.ways["all"],
            "precision": facts(trial.precision, workload, inputs, targets),
        }
    # a CPU has no published peak to compare them with
    if device.type == "cuda" and (flops := model_flops(workload, inputs, targets, trial.batch_size)) is not None:
        result["model_flops"] = flops
    return result
