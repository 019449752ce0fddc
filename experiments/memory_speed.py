"""Time and memory of one training step of every backend, against ordinary training: Table 4 of arXiv:2205.10683.

At batch 256 on CUDA, as in the paper. On a CPU at a smaller batch, the same for all backends of a model, chosen so that
the experiment ends within twenty minutes on two cores.
"""

from dpbench.experiment import Excerpt, experiment_of, grid
from dpbench.trials import StepTrial

BACKENDS = ["nonprivate", "microbatch", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_mixed", "opacus_hooks"]
MODELS = ["cnn", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "vgg11", "vgg13", "vgg16", "vgg19"]
#: Batch size on a CPU.
CPU_BATCHES = {256: ["cnn"], 32: ["vgg11", "vgg13", "vgg16", "vgg19", "resnet18"], 8: ["resnet34", "resnet50"]}


def cells(device: str) -> list[StepTrial]:
    if device == "cuda":
        return grid(StepTrial, model=MODELS, backend=BACKENDS, batch_size=256, device="cuda", steps=10)
    return [
        trial
        for batch_size, models in CPU_BATCHES.items()
        for trial in grid(StepTrial, model=models, backend=BACKENDS, batch_size=batch_size, steps=3, max_seconds=8.0)
    ]


def smoke(device: str) -> list[StepTrial]:
    return grid(StepTrial, model="cnn", backend=BACKENDS, batch_size=4, steps=2, max_seconds=1.0, device=device)


EXPERIMENT = experiment_of(
    __name__,
    rounds=2,
    figures=("memory_speed_table",),
    table=Excerpt(
        figure="memory_speed_table", rows=("Model", "B"), across="Backend", cells=("Time/step", "Peak memory")
    ),
)
