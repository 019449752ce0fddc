"""Run a `SensitivityTrial`: how far difficult records move a backend's clipped sum, in units of C.

Compares two batches on the same model and open backend: one with the record and one without it, otherwise in the same
order. The distance of the two sums is computed in float64, over all parameters together. Nothing is verified, and no
noise is added.

Functions take:
    backend: the backend class.
    dtype: one of `dpbench.conformance.sensitivity.DTYPES`.
    device: "cpu" or "cuda".
    case: of hard records.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipping import Backend, UnsupportedModel
from dpbench.conformance.sensitivity import LIMITS, OUTCOMES, SensitivityTrial
from dpbench.conformance.sensitivity.problems import HardRecord, Problem, weighted_sum
from dpbench.conformance.sensitivity.records import RECORDS
from dpbench.measure.precision import autocasting
from dpbench.models.adapt import moved
from dpbench.models.workload import Workload
from dpbench.trials.backend_classes import backend_class

AUTOCAST = "-autocast"
Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """The result of one case.

    Attributes:
        case: its name.
        outcome: of `OUTCOMES`, the worst among the case's records.
        excess: the largest distance of the two sums, in units of C; None if no distance is a number.
        limit: the largest allowed excess: the dtype's tolerance, or the backend's claim if that is less.
        batch_size: of the worst record's batch, with the record.
        record: the worst record, in words.
        counts: outcome -> number of the case's records.
        reason: the message of a refusal or an error, in one line.
    """

    case: str
    outcome: str
    excess: float | None = None
    limit: float | None = None
    batch_size: int | None = None
    record: str | None = None
    counts: dict[str, int] | None = None
    reason: str | None = None


def run(trial: SensitivityTrial) -> dict[str, Any]:
    """{"rows": one for each case, with the fields of a `Found`}."""
    torch.set_num_threads(1)
    backend = backend_class(trial.backend)
    return {"rows": [asdict(found) for found in sensitivity(backend, trial.dtype, trial.device)]}


def sensitivity(backend: type[Backend], dtype: str = "float32", device: str = "cpu") -> Iterator[Found]:
    """Results of all cases that apply to `dtype`."""
    for case in RECORDS:
        if dtype in case.dtypes:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                yield measured(case, backend, dtype, device)


def measured(case: HardRecord, backend: type[Backend], dtype: str, device: str = "cpu") -> Found:
    """The worst result among the records of a case."""
    if backend.together > 1:
        return Found(case.name, "unsupported", reason="it clips means of several samples, which is another mechanism")
    own = torch.float32 if dtype.endswith(AUTOCAST) else getattr(torch, dtype)
    problem = case.make(torch.finfo(own))
    workload = Workload(problem.model.to(device, own), weighted_sum, lambda size: ((), ()))
    if dtype.endswith(AUTOCAST):
        workload = autocasting(workload, dtype.removesuffix(AUTOCAST), torch.device(device))
    try:
        with backend(workload.model, workload.loss_fn, clip=problem.clip, verify=False, compile=False) as opened:
            each = list(_of_each_record(case.name, opened, problem, own, device, LIMITS[dtype]))
    except (UnsupportedModel, _Unusable) as refused:
        return Found(case.name, "unsupported", reason=_one_line(refused))
    worst = min(each, key=lambda found: (OUTCOMES.index(found.outcome), -(found.excess or 0.0)))
    excess = max((found.excess for found in each if found.excess is not None), default=None)
    counts = Counter(found.outcome for found in each)
    return replace(worst, excess=excess, counts={name: counts[name] for name in OUTCOMES if counts[name]})


class _Unusable(Exception):
    """The ordinary batch has no valid sum to compare with."""


def _of_each_record(
    case: str, backend: Backend, problem: Problem, dtype: torch.dtype, device: str, limit: float
) -> Iterator[Found]:
    """The result of each record alone.

    Raises:
        UnsupportedModel: the batch without any of the records is refused.
        Unusable: the ordinary batch raises an error, or its sum is not finite.
    """
    placed = partial(moved, device=device, dtype=dtype)
    unit = problem.clip.sensitivity
    stated = getattr(backend, "sensitivity_bound", lambda batch_size: math.inf)  # other libraries claim none
    for batch in problem.batches:
        inputs, weights = placed(batch.inputs), placed(batch.weights)
        try:
            # timing may change the plan in the second step, and the claim holds for two batches by one plan
            for _ in range(1 if getattr(backend, "planner", None) is None else 2):
                without = backend(inputs, weights).grads
        except UnsupportedModel:
            raise
        except Exception as error:
            raise _Unusable(f"the ordinary batch raises {_one_line(error)}") from error
        if not _finite(without):
            raise _Unusable("the sum of the ordinary batch is no number")
        for record in batch.records:
            size, place = len(inputs) + 1, record.place
            allowed = min(limit, stated(size) / unit)
            result = partial(Found, case, limit=allowed, batch_size=size, record=record.label)
            with_record = [
                torch.cat([others[:place], placed(one), others[place:]])
                for others, one in ((inputs, record.inputs), (weights, record.weights))
            ]
            try:
                grads = backend(*with_record).grads
            except Exception as error:
                names_it = re.search(rf"\b(record|sample)s?\b.*\b{place}\b", str(error), re.DOTALL) is not None
                refused = isinstance(error, UnsupportedModel) or names_it
                yield result("refused" if refused else "error", reason=_one_line(error))
                continue
            if _finite(grads):
                apart = [torch.linalg.vector_norm(grad.double() - without[name]) for name, grad in grads.items()]
                excess = float(torch.linalg.vector_norm(torch.stack(apart))) / unit
                yield result("exceeds" if excess > allowed else "within", excess)
            else:
                yield result("not a number")


def _finite(grads: Grads) -> bool:
    """True if the whole sum is finite."""
    return all(bool(torch.isfinite(grad).all()) for grad in grads.values())


def _one_line(error: Exception) -> str:
    """An error's message, with its type unless it is a refusal."""
    said = " ".join(str(error).split())
    return said if isinstance(error, (UnsupportedModel, _Unusable)) else f"{type(error).__name__}: {said}"[:300]
