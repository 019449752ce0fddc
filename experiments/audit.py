"""Audit of the engine's privacy claims: two adversaries, by backend and by form of batches, and seeded faults.

A sound engine must pass every run (a test as tight as possible would fail with probability 1e-4), and every fault must
be found; otherwise the record says `mismatch`. Faults are seeded where batches come in padded pieces, because some
concern how pieces are combined.

Batches of half the data (q = 0.5) serve the test of each release, which counts errors and assumes nothing about the
noise: they give enough records to tell 0.95 of the noise from all of it. ε is then large, and the guesses of one run
say little.
"""

from typing import Any

from dpbench.experiment import experiment_of, grid
from dpbench.training import FAULTS, FORMS, AuditTrial

BACKENDS = ["microbatch", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed"]
TARGETS = [(backend, "whole") for backend in BACKENDS] + [("bk_mixed", form) for form in FORMS if form != "whole"]
SEEDS = list(range(5))
LARGE: dict[str, Any] = {"canaries": 2000, "sample_rate": 0.5, "steps": 80, "target_epsilon": 100.0}


def cells(device: str) -> list[AuditTrial]:
    sound = []
    for i, (backend, form) in enumerate(TARGETS):  # separate seeds, because one seed draws the same noise for all
        sound += grid(AuditTrial, backend=backend, form=form, seed=list(range(10 * i, 10 * i + 10)), device="cpu")
    sound += grid(AuditTrial, seed=list(range(10)), device="cpu", **LARGE)
    faults = grid(AuditTrial, fault=list(FAULTS), form="padded", seed=SEEDS, device="cpu")
    return sound + faults + grid(AuditTrial, fault="less_noise", seed=SEEDS, device="cpu", **LARGE)


def smoke(device: str) -> list[AuditTrial]:
    return grid(AuditTrial, fault=["", "no_noise"], device="cpu")


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("audit",))
