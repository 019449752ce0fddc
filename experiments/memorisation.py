"""What does a language model keep of a secret, and what does privacy cost it?

A small GPT-2 that has read public prose is adapted to private code by LoRA; in the code are numbers that are nowhere
else, 1, 4, 16 or 64 times each. How many bits of them does the model give away, and how well does it predict code that
it has not seen, after ordinary fine-tuning and at each ε? The code is `dpbench/integrations/tutorials/memorisation.py`.
"""

from __future__ import annotations

from dpbench.experiment import Experiment, grid
from dpbench.training import MemorisationTrial


def cells(device: str) -> list[MemorisationTrial]:
    return grid(MemorisationTrial, seed=[0, 1], target_epsilon=[None, 8.0, 1.0], device="cpu")


def smoke(device: str) -> list[MemorisationTrial]:
    small = {"records": 400, "public_records": 200, "epochs": 1, "public_epochs": 1}
    return grid(MemorisationTrial, target_epsilon=[None, 8.0], seed=0, device="cpu", **small)


EXPERIMENT = Experiment(
    name="memorisation",
    doc="what a fine-tuned language model gives away of a secret, by how often it was there and by epsilon",
    cells=cells,
    smoke=smoke,
    rounds=1,
    figures=("memorisation",),
)
