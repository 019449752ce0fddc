"""Checks whether a clipping backend is exact, by small problems that run on any subclass of `clipping.Backend`.

    from dpbench.conformance.suite import conformance
    for verdict in conformance(Mine):
        print(verdict.case, verdict.result)          # exact | refuses | wrong

There are four kinds of cases. *Models*: small networks, each with a trait for which some library has silently computed
wrong results; norms, sums and losses are compared with the microbatch oracle, in float64 within 1e-9 and again in
float32. *Clipping functions*: exact with each, and the property that privacy rests on: removing a sample moves the sum
by at most the sensitivity. *The contract*: batches of one sample, none, equal norms, a zero gradient, changing sizes; a
loss shaped [B, 1]; half precision; an unchanged model. *Refusals*: reads of parameters that most backends cannot see,
and samples that mix; a backend must give the oracle's result or refuse.

Verification is off, so the backend's own result is judged. It is on for samples that mix, which the interface must
detect. Noise, its scale, and the division by the nominal batch size are not tested: no backend computes them.

This module is for the parent process, and imports no torch.

Functions take:
    backend: a subclass of `clipping.Backend`, or its name.
    device: "cpu" or "cuda", for models and batches.
    setup: (model, inputs, targets, loss_fn), of one case.
    clip: norms [B] -> factors [B], or the name of such a function.
    numbers: `torch.finfo` of the dtype.
    seed: of random numbers.
    positions, channels: T and p, of weights [1, T, p].
"""

from dataclasses import dataclass
from typing import ClassVar

from dpbench.trials import STEP_SOURCES
from dpbench.trials.backends import BackendTrial

__all__ = ["ConformanceTrial"]


@dataclass(frozen=True, kw_only=True)
class ConformanceTrial(BackendTrial):
    """All conformance cases of one backend."""

    kind: ClassVar[str] = "conformance"
    body: ClassVar[str] = "dpbench.conformance.suite:run"
    sources: ClassVar[tuple[str, ...]] = (*STEP_SOURCES, "dpbench/conformance/**/*.py")
    device: str = "cpu"
