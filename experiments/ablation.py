"""The worth of each optimisation of `bk_mixed` and of its planner: the backend with and without it.

One trial a model, in which all variants take turns in one process. Most of these optimisations run on a CPU only.
"""

from dpbench.experiment import CONVNEXT, GPT2, VIT, Excerpt, experiment_of, grid
from dpbench.trials import OverheadTrial
from dpbench.trials.backends import OWN_VARIANTS

BACKENDS = ("nonprivate", "bk_mixed", *OWN_VARIANTS)
IMAGES = {"cnn": 256, "resnet18": 32, VIT: 32, CONVNEXT: 16}


def cells(device: str) -> list[OverheadTrial]:
    each = {"backends": BACKENDS, "rounds": 15, "max_seconds": 20.0, "device": device}  # to tell 5 % from noise
    found = [trial for model, b in IMAGES.items() for trial in grid(OverheadTrial, model=model, batch_size=b, **each)]
    text = {"model": f"{GPT2}@128", "batch_size": 8, "image_size": None, "data": "synthetic"}
    return found + grid(OverheadTrial, **text, **each)


def smoke(device: str) -> list[OverheadTrial]:
    few = {"backends": BACKENDS, "batch_size": 4, "rounds": 1, "max_seconds": 0.1, "device": device}
    return grid(OverheadTrial, model="cnn", **few)


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("overhead",),
    table=Excerpt(
        figure="overhead",
        rows=("Backend",),
        across="Model",
        cells=("Time ratio", "Memory ratio"),
        where=lambda row: row["Backend"] != "Non-private",
    ),
)
