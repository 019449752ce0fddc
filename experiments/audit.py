"""Is training as private as it says? A lower bound on ε from one run on canaries, by backend; and five seeded faults.

A sound engine's bound is below the ε that it claims (with a confidence of 95 %: one trial in twenty may exceed it by
chance, were the bound tight, and it is not). Each seeded fault is found. Either is a `mismatch` in the records if not.
"""

from __future__ import annotations

from dpbench.experiment import Experiment, grid
from dpbench.training import FAULTS, AuditTrial

BACKENDS = ["microbatch", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed"]


def cells(device: str) -> list[AuditTrial]:
    sound = grid(AuditTrial, backend=BACKENDS, seed=[0, 1, 2], device="cpu")
    return sound + grid(AuditTrial, fault=list(FAULTS), seed=[0, 1, 2], device="cpu")


def smoke(device: str) -> list[AuditTrial]:
    return grid(AuditTrial, fault=["", "no_noise"], device="cpu")


EXPERIMENT = Experiment(
    name="audit",
    doc="a certified lower bound on epsilon by a one-run audit with canaries, sound and with five seeded faults",
    cells=cells,
    smoke=smoke,
    rounds=1,
    figures=("audit",),
)
