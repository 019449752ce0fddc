"""Body of a `SensitivityTrial`: how far hard records move the sum that a backend computes, in units of C.

The same model, the same open backend, two batches: one with the record and one without it, all else in the same order.
The distance of the two sums is taken in float64, over all parameters together. Nothing is verified, no noise is added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipping import Backend, UnsupportedModel
from dpbench.conformance.sensitivity import LIMITS, OUTCOMES, SensitivityTrial
from dpbench.conformance.sensitivity.problems import HardRecord, Problem, Record, weighted_sum
from dpbench.conformance.sensitivity.records import RECORDS
from dpbench.trials.backend_classes import backend_class

AUTOCAST = "-autocast"
Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """What one case came to.

    Attributes:
        case: its name.
        outcome: of `OUTCOMES`, the worst that any of the case's records met.
        excess: the largest distance of the two sums, in units of C; None if there was none that is a number.
        limit: the largest excess that is right here: what the dtype allows, or what the backend states if that is less.
        batch_size: of the worst record's batch, with the record.
        record: the worst record, in words.
        counts: outcome -> how many of the case's records met it.
        reason: what a refusal or an error said, in one line.
    """

    case: str
    outcome: str
    excess: float | None = None
    limit: float | None = None
    batch_size: int | None = None
    record: str | None = None
    counts: dict[str, int] | None = None
    reason: str | None = None


class Autocast(nn.Module):
    """A model whose forward pass runs in autocast, and nothing else does: as PyTorch asks for it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast(inputs[0].device.type, self.dtype):
            return self.model(*inputs)


def run(trial: SensitivityTrial) -> dict[str, Any]:
    """{"rows": one for each case, with the fields of a `Found`}.

    Args:
        trial: which backend, in which dtype.
    """
    torch.set_num_threads(1)
    backend = backend_class(trial.backend)
    return {"rows": [asdict(found) for found in sensitivity(backend, trial.dtype, trial.device)]}


def sensitivity(
    backend: type[Backend], dtype: str = "float32", device: str = "cpu", cases: Iterable[HardRecord] = RECORDS
) -> Iterator[Found]:
    """What every case comes to that makes sense in `dtype`, one of `dpbench.conformance.sensitivity.DTYPES`.

    Args:
        backend: which one.
        dtype: one of `DTYPES`.
        device: "cpu" or "cuda".
        cases: of hard records.
    """
    for case in cases:
        if dtype in case.dtypes:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                yield measured(case, backend, dtype, device)


def measured(case: HardRecord, backend: type[Backend], dtype: str, device: str = "cpu") -> Found:
    """The worst that the records of a case do to one backend.

    Args:
        case: of hard records.
        backend: which one.
        dtype: one of `DTYPES`.
        device: "cpu" or "cuda".
    """
    if backend.together > 1:
        return Found(case.name, "unsupported", reason="it clips means of several samples, which is another mechanism")
    own = torch.float32 if dtype.endswith(AUTOCAST) else getattr(torch, dtype)
    problem = case.make(torch.finfo(own))
    model = problem.model.to(device, own)
    if dtype.endswith(AUTOCAST):
        model = Autocast(model, getattr(torch, dtype.removesuffix(AUTOCAST)))
    try:
        with backend(model, weighted_sum, clip=problem.clip, verify=False) as opened:
            moves = list(each_move(opened, problem, own, device, LIMITS[dtype]))
    except (UnsupportedModel, Unusable) as refused:
        return Found(case.name, "unsupported", reason=one_line(refused))
    worst = min(moves, key=lambda move: (OUTCOMES.index(move.outcome), -(move.excess or 0.0)))
    excess = max((move.excess for move in moves if move.excess is not None), default=None)
    counts = {name: sum(move.outcome == name for move in moves) for name in OUTCOMES}
    met = {name: count for name, count in counts.items() if count}
    return Found(
        case.name, worst.outcome, excess, worst.limit, worst.batch_size, worst.record.label, met, reason=worst.reason
    )


class Unusable(Exception):
    """The ordinary batch has no sum, so that there is nothing to compare with."""


@dataclass(frozen=True)
class Move:
    """What one record did; fields as those of `Found`."""

    record: Record
    batch_size: int
    limit: float
    outcome: str
    excess: float | None = None
    reason: str | None = None


def each_move(backend: Backend, problem: Problem, dtype: torch.dtype, device: str, limit: float) -> Iterator[Move]:
    """One for each record.

    Args:
        backend: opened on the problem's model.
        problem: batches, and records to add to them.
        dtype: of inputs and weights.
        device: "cpu" or "cuda".
        limit: what the backend states, in units of C.

    Raises:
        UnsupportedModel: the batch without any of the records is refused.
        Unusable: it raises an error, or its sum is no number.
    """

    def placed(x: Tensor) -> Tensor:
        return x.to(device, dtype if x.is_floating_point() else x.dtype)

    unit = problem.clip.sensitivity
    for batch in problem.batches:
        inputs, weights = placed(batch.inputs), placed(batch.weights)
        try:
            # a plan that is timed changes in its second step, and what is stated is of two batches by the same plan
            for _ in range(1 if getattr(backend, "planner", None) is None else 2):
                without = backend(inputs, weights).grads
        except UnsupportedModel:
            raise
        except Exception as error:
            raise Unusable(f"the ordinary batch raises {one_line(error)}") from error
        if not finite(without):
            raise Unusable("the sum of the ordinary batch is no number")
        for record in batch.records:
            size, place = len(inputs) + 1, record.place
            allowed = min(limit, stated(backend, size) / unit)
            with_record = between(inputs, placed(record.inputs), place), between(weights, placed(record.weights), place)
            try:
                grads = backend(*with_record).grads
            except Exception as error:
                refused = isinstance(error, UnsupportedModel) or names_place(str(error), place)
                yield Move(record, size, allowed, "refused" if refused else "error", reason=one_line(error))
                continue
            if finite(grads):
                excess = distance(grads, without) / unit
                yield Move(record, size, allowed, "exceeds" if excess > allowed else "within", excess)
            else:
                yield Move(record, size, allowed, "not a number")


def stated(backend: Backend, batch_size: int) -> float:
    """What the backend says that one record can move the sum by; other libraries say nothing.

    Args:
        backend: of ours, or another library's.
        batch_size: B.
    """
    bound = getattr(backend, "sensitivity_bound", None)
    return math.inf if bound is None else float(bound(batch_size))


def names_place(said: str, place: int) -> bool:
    """Whether an error says which record it is about, by its position in the batch.

    Args:
        said: the error's words.
        place: the position.
    """
    return re.search(rf"\b(record|sample)s?\b.*\b{place}\b", said, re.DOTALL) is not None


def between(batch: Tensor, one: Tensor, place: int) -> Tensor:
    """The batch with one sample more, at `place`.

    Args:
        batch: [B, ...].
        one: [1, ...].
        place: where it comes to stand.
    """
    return torch.cat([batch[:place], one, batch[place:]])


def finite(grads: Grads) -> bool:
    """Whether all of a sum is finite.

    Args:
        grads: parameter name -> its part of the sum.
    """
    return all(bool(torch.isfinite(grad).all()) for grad in grads.values())


def distance(first: Grads, second: Grads) -> float:
    """L2, over all parameters together, in float64.

    Args:
        first, second: parameter name -> its part of the sum.
    """
    apart = [torch.linalg.vector_norm(grad.double() - second[name].double()) for name, grad in first.items()]
    return float(torch.linalg.vector_norm(torch.stack(apart)))


def one_line(error: Exception) -> str:
    """An error's words, with its type unless it is a refusal.

    Args:
        error: of any kind.
    """
    said = " ".join(str(error).split())
    return said if isinstance(error, (UnsupportedModel, Unusable)) else f"{type(error).__name__}: {said}"[:300]
