"""Simulated against measured peak memory of a step: every backend, for each part of the step.

The stress test shows simulated peaks where there is no device, and searches for the largest batch start from them, so
their accuracy matters. Batches are small, so that activations do not hide an error and all ends in minutes.
"""

from dpbench.experiment import experiment_of, grid
from dpbench.trials import PeakTrial
from dpbench.trials.backends import OURS, PEERS

#: Batch size -> models.
BATCHES = {32: ["cnn"], 8: ["vgg11", "resnet18"], 4: ["resnet50", "wide_resnet", "resnext"]}


def cells(device: str) -> list[PeakTrial]:
    same = {"backend": [*OURS, *PEERS], "simulated": [True, False], "device": device}
    return [t for size, models in BATCHES.items() for t in grid(PeakTrial, model=models, batch_size=size, **same)]


def smoke(device: str) -> list[PeakTrial]:
    some = ["nonprivate", "mixed_ghost", "bk_mixed"]
    return grid(PeakTrial, model="cnn", backend=some, simulated=[True, False], batch_size=4, device=device)


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("memory_accuracy",))
