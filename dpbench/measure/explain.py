"""Run an `ExplainTrial`: the route of every use of every parameter, and the plan of `bk_mixed`.

The step runs under fake tensors. A model whose Python code reads a value, or an operation without a fake form, runs on
real tensors; the result says so. A trial that measures runs on real tensors on its device, times each route,
and then a step by the resulting plan, and of ordinary training.

Weights do not matter, so the sizes default to the model's own: 224x224 images and 1000 classes for timm and torchvision
(or timm's own resolution), 32x32 and 10 for the built-in CIFAR models and for files.
"""

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from statistics import median
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from clipping import UnsupportedModel
from clipping.backends.microbatch import NonPrivate
from clipping.backends.tape import BkMixed
from clipping.core.batches import tensors_of
from clipping.explain.routes import STRATEGIES, Row, explain
from clipping.planning.planner import Planner
from dpbench.errors import UsageError, in_words
from dpbench.measure import verify
from dpbench.measure.bench import Step
from dpbench.measure.memory import peak_of
from dpbench.measure.timing import stopwatch_for, time_steps
from dpbench.models.loading import load_workload
from dpbench.models.own import one_line
from dpbench.models.references import split_reference
from dpbench.models.workload import ModelError, Workload
from dpbench.trials import ExplainTrial, LargestTrial, RecommendTrial
from dpbench.trials.packages import to_be_installed

Sized = ExplainTrial | LargestTrial | RecommendTrial

#: scheme -> (image size, classes); those of ImageNet for models made for it
NATURAL = {"builtin": (32, 10), "file": (32, 10), "timm": (224, 1000), "torchvision": (224, 1000)}
_TEXT = (224, 10)
#: Time STEPS steps, or as many as fit in MAX_SECONDS
STEPS, MAX_SECONDS = 5, 10.0


def run(trial: ExplainTrial) -> dict[str, Any]:
    """{"rows": [...], "summary": {...}}; {"usage": line} or {"problems": [...]} if the model cannot be explained.

    A row has the keys of `_row_of`. The summary has the keys of `_summary_of` and `planned`, "inputs" (each one's shape
    for the whole batch), "batch_size", and "real_tensors": None, or the reason why fake ones did not work.
    """
    try:
        size, classes = sizes(trial)
        if trial.measure:
            return _explain(trial, size, classes, nullcontext())
        try:
            found, why_real = _explain(trial, size, classes, FakeTensorMode(allow_non_fake_inputs=True)), None
        except UnsupportedModel:
            raise
        except Exception as error:  # many types of error mean that a value was read or that no fake form exists
            why_real = in_words(error)[:200]
            found = _explain(trial, size, classes, nullcontext())
    except UsageError as error:
        return {"usage": str(error)}
    except UnsupportedModel as error:
        return {"problems": [problem._asdict() for problem in error.problems]}
    found["summary"]["real_tensors"] = why_real
    return found


def sizes(trial: Sized) -> tuple[int, int]:
    """(image size, number of classes): the trial's, or the model's own."""
    scheme, name = split_reference(trial.model)
    size, classes = NATURAL.get(scheme, _TEXT)
    if trial.image_size is None and scheme == "timm":
        size = _timm_size(name) or size
    return trial.image_size or size, trial.num_classes or classes


def _timm_size(name: str) -> int | None:
    """The training resolution of a timm model's published weights, if timm knows it."""
    with one_line(to_be_installed("timm")):
        import timm
    config = timm.get_pretrained_cfg(name, allow_unregistered=True) if timm.is_model(name) else None
    return config.input_size[-1] if config is not None and config.input_size else None


def _explain(trial: ExplainTrial, size: int, classes: int, mode: AbstractContextManager[Any]) -> dict[str, Any]:
    device = trial.device if trial.measure else "cpu"
    with mode:
        workload = load_workload(trial.model, image_size=size, num_classes=classes, data="synthetic", device=device)
        inputs, targets = workload.batch(trial.batch_size)
        planner = Planner(file=False)
        found = explain(workload.model, workload.loss_fn, inputs, targets, planner=planner, measure=trial.measure)
        entries = {name: p.numel() for name, p in workload.model.named_parameters() if p.requires_grad}
        if not entries:
            raise ModelError(f"{trial.model} to have parameters to train", "none")
        shapes = [list(tensor.shape) for tensor in tensors_of(inputs)]
    summary = _summary_of(found, entries) | {"inputs": shapes, "batch_size": trial.batch_size, "real_tensors": None}
    summary["measured"] = _steps(workload, inputs, targets, planner) if trial.measure else None
    return {"rows": [_row_of(row) for row in found], "summary": summary}


def _steps(workload: Workload, inputs: Any, targets: Any, planner: Planner) -> dict[str, Any]:
    """Measure a step by the planner's "plan", and an "ordinary" one.

    Each -> {"step_seconds", "peak_bytes", "source", "verification", "coverage"}, the last two as in an `OverheadTrial`.

    Raises:
        Mismatch: the plan's result differs from the oracle's.
    """
    found = {}
    device = tensors_of(inputs)[0].device
    for name, backend_class in (("plan", BkMixed), ("ordinary", NonPrivate)):
        with backend_class(workload.model, workload.loss_fn, verify=False, compile=False) as backend:
            if isinstance(backend, BkMixed):
                backend.planner = planner
            agreement, tolerance, samples = verify.against_oracle(backend, inputs, targets)
            step = Step(backend, inputs, targets)
            timing = time_steps(step, stopwatch=stopwatch_for(device), steps=STEPS, max_seconds=MAX_SECONDS)
            memory = peak_of(Step(backend, inputs, targets), device)  # a fresh one frees nothing of an earlier step
            coverage = dict(backend.coverage)
        seconds = median(timing.step_seconds)
        found[name] = {"step_seconds": seconds, "peak_bytes": memory.peak_bytes, "source": memory.source}
        found[name] |= {"verification": verify.verification_record(agreement, tolerance, samples), "coverage": coverage}
        verify.require(backend.name, agreement, tolerance, {"measured": found})
    return found


def _row_of(row: Row) -> dict[str, Any]:
    """A row to print: figures of one sample; T, d, p, 2T² and pd of one group; seconds of the batch."""
    linear = row.positions is not None and row.inputs is not None and row.outputs is not None
    return {
        "parameter": row.parameter,
        "op": row.operation,
        "T": row.positions,
        "d": row.inputs,
        "p": row.outputs,
        "groups": row.groups,
        "two_T_squared": 2 * row.positions**2 if linear else None,  # type: ignore[operator]
        "p_times_d": row.inputs * row.outputs if linear else None,  # type: ignore[operator]
        "paper_choice": row.paper,
        "choice": row.routes["mixed"],
        "bytes": asdict(row.bytes),
        "flops": asdict(row.operations),
        "reason": row.reason,
        "plan": row.plan,
        "predicted_seconds": row.predicted,
        "measured_seconds": row.measured,
    }


def _summary_of(rows: list[Row], entries: dict[str, int]) -> dict[str, Any]:
    """Totals of all rows.

    Returns:
        "parameters" (their number of entries), "share" (of entries, by the route of `mixed_ghost`), "totals" (strategy
        -> {"bytes", "flops"} of one sample), "uncounted" (uses with an unknown number of operations), "unused"
        (parameters that the loss does not depend on).
    """
    routes: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if (route := row.routes["mixed"]) is not None:
            routes[row.parameter].add(route)
    total = sum(entries.values())
    share = dict.fromkeys(("ghost", "instantiate", "fallback", "unused"), 0.0)
    for name, count in entries.items():
        taken = next((route for route in ("fallback", "instantiate", "ghost") if route in routes[name]), "unused")
        share[taken] += count / max(1, total)
    return {
        "parameters": total,
        "share": share,
        "totals": {
            name: {
                "bytes": sum(row.bytes.of(row.routes[name]) or 0 for row in rows),
                "flops": sum(row.operations.of(row.routes[name]) or 0 for row in rows),
            }
            for name in STRATEGIES
        },
        "uncounted": sum(row.routes["mixed"] == "fallback" for row in rows),
        "unused": [name for name in entries if not routes[name]],
    }
