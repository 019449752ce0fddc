"""Is a clipping backend exact? Problems as data, run on any subclass of `clipping.Backend`, a person's own among them.

    from dpbench.conformance.suite import conformance
    for verdict in conformance(Mine):
        print(verdict.case, verdict.result)          # exact | refuses | wrong

Four kinds of cases. *Models*: small networks, each with a habit that some library has got wrong in silence; norms,
sums and losses beside the microbatch oracle, in float64 within 1e-9 and again in float32. *Clipping functions*: exact
with each, and the black-box property that privacy rests on, that removing a sample moves the sum by the sensitivity at
the most. *The contract*: batches of one sample, none, equal norms, a zero gradient, changing sizes; a loss shaped
[B, 1]; half precision; the model left as it was found. *Refusals*: reads of parameters that most backends cannot see,
and samples that mix; right is the oracle's answer or a refusal.

Verification is off: what is judged is what a backend says, not whether it is found out. It is on where
samples mix, for to look for that is the interface's part. Not in here, for it is no backend's affair: noise, its scale,
and the division by the nominal batch size.

This module is for the parent process, and imports no torch.

Functions take:
    backend: a subclass of `clipping.Backend`, or its name.
    device: "cpu" or "cuda", where models and batches are put.
    setup: (model, inputs, targets, loss_fn), of one case.
    clip: norms [B] -> factors [B], or the name of such a function.
    numbers: what the numbers of a dtype can hold, as `torch.finfo` says it.
"""

from __future__ import annotations

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
