"""How far one record moves the computed sum: hard records on every backend, ours and the peers', by dtype.

This does not measure speed: small models, one round. A peer that cannot be imported is left out, with its reason.
"""

from dpbench.conformance.sensitivity import DTYPES, SensitivityTrial
from dpbench.experiment import Excerpt, experiment_of, grid
from dpbench.trials.backends import OURS, PEERS

CLIPPING = [name for name in (*OURS, *PEERS) if name != "nonprivate"]


def cells(device: str) -> list[SensitivityTrial]:
    return grid(SensitivityTrial, backend=CLIPPING, dtype=list(DTYPES), device=device)


def smoke(device: str) -> list[SensitivityTrial]:
    return grid(SensitivityTrial, backend=["bk_mixed", "opacus_ghost"], dtype="float32", device=device)


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("sensitivity",),
    table=Excerpt(figure="sensitivity", rows=("Backend",), across="Dtype", cells=("Furthest",)),
)
