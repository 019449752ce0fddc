"""Throughput against the batch size: the batch from which on a step is as fast as it gets.

All backends run at each batch size in one process. In a small batch, reading the weights and the fixed cost of a step
weigh more, so ratios to ordinary training hold for one batch size only.
"""

from dpbench.experiment import experiment_of, grid, ratios
from dpbench.trials import OverheadTrial

BACKENDS = ("nonprivate", "vmap", "mixed_ghost", "bk_mixed", "opacus_hooks", "opacus_ghost")
#: Model -> batch sizes on a CPU, on CUDA.
SIZES = {"cnn": ([2, 8, 32, 128, 512], [32, 128, 512, 2048, 8192]), "resnet18": ([1, 4, 16, 32], [16, 64, 256, 1024])}


def cells(device: str) -> list[OverheadTrial]:
    cuda = device == "cuda"
    rounds = {"rounds": 15 if cuda else 5, "max_seconds": 2.0, "device": device}
    return [
        trial
        for model, sizes in SIZES.items()
        for trial in grid(OverheadTrial, model=model, backends=BACKENDS, batch_size=sizes[cuda], **rounds)
    ]


def smoke(device: str) -> list[OverheadTrial]:
    some = ("nonprivate", "mixed_ghost", "bk_mixed")
    few = {"rounds": 2, "max_seconds": 0.2, "device": device}
    return grid(OverheadTrial, model="cnn", backends=some, batch_size=[2, 4, 8], **few)


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("throughput",), table=ratios("throughput"))
