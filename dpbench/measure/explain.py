"""Body of an `ExplainTrial`: the decision for every use of every parameter of a model, from its shapes alone.

The step runs under fake tensors, which have a shape and no data: any resolution answers in seconds. (A model whose
Python code asks for a value, or an operation that has no fake form, is run on real ones, and the result says so.)

Weights have no part in it, so the sizes are the model's own unless the trial says otherwise: 224x224 images and 1000
classes for timm and torchvision (timm's own resolution where it is another), 32x32 and 10 for the built-in CIFAR forms
and for files.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from clipping import UnsupportedModel
from clipping.explain import STRATEGIES, Cost, Row, explain
from dpbench.errors import UsageError
from dpbench.measure.bench import tensors_in
from dpbench.models import load_workload, split_reference
from dpbench.trials import ExplainTrial

#: scheme -> (image size, classes); ImageNet's for what is made for it
NATURAL = {"builtin": (32, 10), "file": (32, 10), "timm": (224, 1000), "torchvision": (224, 1000)}
_TEXT = (224, 10)


def run(trial: ExplainTrial) -> dict[str, Any]:
    """{"rows": [...], "summary": {...}}; of what cannot be explained, {"usage": line} or {"problems": [...]}.

    A row has the keys of `row_of`. The summary: see `summary_of`, and "inputs" (the shape of each, of the whole batch),
    "batch_size", and "real_tensors": None, or why fake ones would not do.
    """
    try:
        size, classes = sizes(trial)
        try:
            found, why_real = _explain(trial, size, classes, FakeTensorMode(allow_non_fake_inputs=True)), None
        except UnsupportedModel:
            raise
        except Exception as error:  # a value was asked for, or an operation has no fake form: many words for it
            why_real = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            found = _explain(trial, size, classes, nullcontext())
    except UsageError as error:
        return {"usage": str(error)}
    except UnsupportedModel as error:
        return {"problems": [problem._asdict() for problem in error.problems]}
    found["summary"] |= {"batch_size": trial.batch_size, "real_tensors": why_real}
    return found


def sizes(trial: ExplainTrial) -> tuple[int, int]:
    """(image size, number of classes): the trial's, or the model's own."""
    scheme, name = split_reference(trial.model)
    size, classes = NATURAL.get(scheme, _TEXT)
    if trial.image_size is None and scheme == "timm":
        size = _timm_size(name) or size
    return trial.image_size or size, trial.num_classes or classes


def _timm_size(name: str) -> int | None:
    """The resolution that the published weights of a timm model were trained at, if timm knows."""
    from dpbench.models.external import needs

    with needs("timm"):
        import timm
    config = timm.get_pretrained_cfg(name, allow_unregistered=True) if timm.is_model(name) else None
    return config.input_size[-1] if config is not None and config.input_size else None


def _explain(trial: ExplainTrial, size: int, classes: int, mode: AbstractContextManager[Any]) -> dict[str, Any]:
    with mode:
        workload = load_workload(trial.model, image_size=size, num_classes=classes, data="synthetic")
        inputs, targets = workload.batch(trial.batch_size)
        rows = explain(workload.model, workload.loss_fn, inputs, targets)
        entries = {name: p.numel() for name, p in workload.model.named_parameters() if p.requires_grad}
        shapes = [list(tensor.shape) for tensor in tensors_in(inputs)]
    return {"rows": [row_of(row) for row in rows], "summary": summary_of(rows, entries) | {"inputs": shapes}}


def row_of(row: Row) -> dict[str, Any]:
    """A row as it is printed: figures of one sample and, T, d, p, 2T² and pd, of one group."""
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
        "bytes": _cost(row.bytes),
        "flops": _cost(row.operations),
        "reason": row.reason,
    }


def _cost(cost: Cost) -> dict[str, int | None]:
    return {"ghost": cost.ghost, "instantiate": cost.instantiate}


def summary_of(rows: list[Row], entries: dict[str, int]) -> dict[str, Any]:
    """What the rows come to.

    Args:
        rows: all of them.
        entries: parameter -> its number of entries, for every trainable parameter.

    Returns:
        "parameters" (their number of entries), "share" (of them, by the route of `mixed_ghost`), "totals" (strategy ->
        {"bytes", "flops"} of one sample), "uncounted" (uses whose operations are not known), "unused" (parameters that
        the loss does not depend on).
    """
    routes: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        routes[row.parameter] |= {route for route in [row.routes["mixed"]] if route is not None}
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
