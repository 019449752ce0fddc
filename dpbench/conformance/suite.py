"""Runs all cases on one backend."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from clipping import Backend, Flat
from clipping.numerics.products import full_precision
from dpbench.conformance import ConformanceTrial
from dpbench.conformance.cases import CASES, Case
from dpbench.conformance.contract import CHECKS, median
from dpbench.conformance.judging import TOLERANCE, Check, Measured, Verdict, answered, hold, judge, oracle, placed
from dpbench.conformance.refusals import REFUSALS
from dpbench.trials.backend_classes import backend_class

SINGLE = 1e-3
"""Relative error of a model in float32 against the oracle in float64: no case has a discontinuous activation."""


def exact_on(case: Case, backend: type[Backend], device: str) -> Measured:
    """Compare norms, sums and losses with the oracle: in float64, then the same model in float32. C is the median norm.

    Args:
        case: the model.
    """
    setup = placed(case.make(), device)
    clip = Flat(median(setup))
    reference = oracle(setup, clip, backend.together)
    out, coverage = answered(backend, setup, clip)
    agreement = hold(out, reference, TOLERANCE)
    with full_precision(convolutions=True):  # TF32 rounds with every method
        out, _ = answered(backend, placed(setup, device, torch.float32), clip)
    hold(out, reference, SINGLE, " in float32")
    return Measured(agreement, coverage)


def checks(backend: type[Backend] = Backend) -> dict[str, Check]:
    """Name -> check, the models first.

    A backend that clips the means of several samples is another mechanism: it gets the models, with its own definition
    as reference, and none of the checks for per-sample clipping.
    """
    models: dict[str, Check] = {case.name: partial(exact_on, case) for case in CASES}
    return models | (CHECKS | REFUSALS if backend.together == 1 else {})


def conformance(backend: type[Backend], device: str = "cpu", only: Iterable[str] | None = None) -> Iterator[Verdict]:
    """Yield the backend's verdict on every case.

    Args:
        only: names of cases; None for all.
    """
    known = checks(backend)
    for name in known if only is None else only:
        yield judge(name, known[name], backend, device)


def run(trial: ConformanceTrial) -> dict[str, Any]:
    """Run a `ConformanceTrial`: {"rows": one for each case, with the fields of a `Verdict`}.

    Args:
        trial: of one backend.
    """
    torch.set_num_threads(1)
    backend = backend_class(trial.backend)
    return {"rows": [vars(verdict) for verdict in conformance(backend, trial.device)]}
