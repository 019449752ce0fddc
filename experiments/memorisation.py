"""What a language model memorises of a secret, and the cost of privacy.

A small GPT-2 that was trained on public prose is adapted to private code by LoRA. The code holds secret numbers, 1, 4,
16 or 64 times each. Measures how many bits of them the model reveals, and how well it predicts unseen code, after
ordinary fine-tuning and at each ε. The code is `dpbench/integrations/tutorials/memorisation.py`.
"""

from dpbench.experiment import Excerpt, experiment_of, grid
from dpbench.training import MemorisationTrial


def cells(device: str) -> list[MemorisationTrial]:
    return grid(MemorisationTrial, seed=[0, 1], target_epsilon=[None, 8.0, 1.0], device="cpu")


def smoke(device: str) -> list[MemorisationTrial]:
    small = {"records": 400, "public_records": 200, "epochs": 1, "public_epochs": 1}
    return grid(MemorisationTrial, target_epsilon=[None, 8.0], seed=0, device="cpu", **small)


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("memorisation",),
    table=Excerpt(figure="memorisation", rows=("times",), across="fine-tuning", cells=("exposure",)),
)
