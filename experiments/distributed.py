"""Private against ordinary training in several processes: time and memory under DDP and FSDP2.

Weak scaling: the samples of a process stay the same. On a CPU a process has one thread, and communicates by gloo; more
processes than CPUs are marked as oversubscribed. On CUDA a process has a GPU; more processes than GPUs are an error.
"""

from dpbench.experiment import GPT2, VIT, Excerpt, experiment_of, grid
from dpbench.training import DistributedTrial

#: Model -> (samples of a process on a CPU, on CUDA).
IMAGES = {"cnn": (32, 1024), "resnet18": (8, 256), VIT: (8, 256)}
TEXTS = {f"{GPT2}@128": (2, 32)}


def cells(device: str) -> list[DistributedTrial]:
    cuda = device == "cuda"
    processes = [1, 2, 4, 8] if cuda else [1, 2, 4]
    found = []
    for model, sizes in {**IMAGES, **TEXTS}.items():
        size = {} if model in IMAGES else {"image_size": None, "num_classes": None}
        same = {"model": model, "batch_size": sizes[cuda], "device": device, **size}
        found += grid(DistributedTrial, processes=processes, spread=["ddp", "fsdp"], **same)
        found += grid(DistributedTrial, processes=processes[:2], spread=["ddp", "fsdp"], precision="mixed", **same)
    return found


def smoke(device: str) -> list[DistributedTrial]:
    few = {"model": "cnn", "batch_size": 2, "rounds": 2, "max_seconds": 0.2, "device": device}
    return grid(DistributedTrial, processes=[1, 2] if device == "cpu" else 1, spread=["ddp", "fsdp"], **few)


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("distributed",),
    table=Excerpt(
        figure="distributed",
        rows=("model", "spread", "precision", "batch_size", "processes"),
        cells=("throughput_ratio", "least", "greatest", "memory_ratio", "oversubscribed"),
        where=lambda row: row["backend"] == "bk_mixed",
    ),
)
