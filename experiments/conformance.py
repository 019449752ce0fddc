"""Exactness of each backend, ours and the peers', on every conformance case.

This does not measure speed: float64 and lower, small models, one round. It also shows how far a hard record moves the
sum. A peer that cannot be imported is left out, with its reason.
"""

from dpbench.conformance import ConformanceTrial
from dpbench.conformance.sensitivity import SensitivityTrial
from dpbench.experiment import Excerpt, experiment_of, grid
from dpbench.trials.backends import OURS, PEERS

CLIPPING = [name for name in (*OURS, *PEERS) if name != "nonprivate"]


def cells(device: str) -> list[ConformanceTrial | SensitivityTrial]:
    return [
        *grid(ConformanceTrial, backend=CLIPPING, device=device),
        *grid(SensitivityTrial, backend=CLIPPING, dtype=["float32", "bfloat16"], device=device),
    ]


def smoke(device: str) -> list[ConformanceTrial | SensitivityTrial]:
    return [ConformanceTrial(backend="vmap", device=device), SensitivityTrial(backend="vmap", device=device)]


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("scorecard",),
    table=Excerpt(
        figure="scorecard", rows=("case",), cells=(), where=lambda row: row["case"] == "in all", turned="Backend"
    ),
)
