"""Run a `ProfileTrial`: trace steps of each backend on one model and batch, to see where the time goes.

After warm steps, some are traced. The result is ``{"parameters", "counted", "backends": {name: entry}, "files"}``. An
entry has ``outcome`` and ``evidence``, and per step ``launches`` and ``waits`` (None on a CPU, which has none),
``operations`` and ``device_seconds`` (all kernels, or all operations of a CPU), and ``top``, the largest operations:
``{"name", "asked_by", "calls", "seconds", "share"}``. ``files``: name -> the Chrome trace, gzip in base64, which the
store writes beside the records (`dpbench.records.store`).
"""

import base64
import gc
from typing import Any

import torch

from clipping import Flat
from dpbench.measure.bench import Step, device_of, open_workload, parameter_count
from dpbench.measure.precision import arithmetic
from dpbench.measure.traces import Trace, traced
from dpbench.models.workload import Workload
from dpbench.trials.backend_classes import backend_class
from dpbench.trials.evidence import ProfileTrial
from dpbench.trials.outcome import Outcome, noted, refuse_failed

TOP = 15
#: Steps before the trace: the first pays for kernels, the second may time a planner's routes, the third settles.
WARM = 4


def run(trial: ProfileTrial) -> dict[str, Any]:
    """See the module's docstring.

    Raises:
        PartlyFailed: a backend's entry is an `error`; with the whole result.
    """
    device = device_of(trial.device)
    workload = open_workload(trial)
    files: dict[str, str] = {}
    entries = {name: _entry(name, trial, workload, device, files) for name in trial.backends}
    result: dict[str, Any] = {
        "parameters": parameter_count(workload.model),
        "counted": "kernels, by their time on the device" if device.type == "cuda" else "operations, by their own time",
        "backends": entries,
        "files": files,
    }
    refuse_failed(entries, result)
    return result


def _entry(
    name: str, trial: ProfileTrial, workload: Workload, device: torch.device, files: dict[str, str]
) -> dict[str, Any]:
    entry: dict[str, Any] = {"outcome": Outcome.OK, "evidence": None}
    with noted(entry):
        with backend_class(name)(
            workload.model, workload.loss_fn, clip=Flat(max_grad_norm=1.0), verify=False, compile=False
        ) as backend:
            step = Step(backend, *workload.batch(trial.batch_size))
            with arithmetic(trial.precision, device):
                for _ in range(WARM):
                    step()
                gc.collect()
                trace = traced(step, device, trial.steps)
        entry |= summary(trace, trial.steps, device)
        if len(trace.compressed) <= trial.most_bytes:
            files[f"{name.replace(':', '-')}.json.gz"] = base64.b64encode(trace.compressed).decode()
    gc.collect()
    return entry


def summary(trace: Trace, steps: int, device: torch.device) -> dict[str, Any]:
    """The numbers of an entry that come from a trace, each per step."""
    cuda = device.type == "cuda"
    operations = trace.operations()
    seconds = sum(operation.seconds for operation in operations)
    return {
        "launches": len(trace.launches()) / steps if cuda else None,
        "waits": len(trace.waits()) / steps if cuda else None,
        "operations": sum(operation.calls for operation in operations) / steps,
        "device_seconds": seconds / steps,
        "top": [
            {
                "name": operation.name,
                "asked_by": operation.asked_by,
                "calls": operation.calls / steps,
                "seconds": operation.seconds / steps,
                "share": operation.seconds / seconds if seconds else 0.0,
            }
            for operation in operations[:TOP]
        ],
    }
