"""The stress test: the largest batch in 16 GiB, and the throughput, of every backend. Figure 3 of arXiv:2205.10683.

On CUDA both panels are measured, the throughput at the largest batch that fits in a 16 GiB allocator budget, as in the
paper. On a CPU the largest batch is *simulated* (fake tensors: no memory is taken, so a laptop draws the 16 GiB panel),
and the throughput of the smaller ResNets is measured at one batch, the same for all, with the backends taking turns in
one process. The batch is large enough to show what a backend costs, and the whole of it ends within eight minutes on
two cores. The two kinds of number never share a bar without a label.

`microbatch` loops over samples, and its memory grows by no more than the batch itself, so memory sets it no limit that
would say anything: its search ends where `LIMITS` says.
"""

from __future__ import annotations

from dpbench.experiment import Cell, Experiment, grid
from dpbench.trials import OverheadTrial
from dpbench.trials.max_batch import searches

BUDGET = 16 * 2**30
BACKENDS = ["nonprivate", "microbatch", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_mixed", "opacus_hooks"]
RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
VGGS = ["vgg11", "vgg13", "vgg16", "vgg19"]
LIMITS = {"microbatch": 256}


def in_turns(models: list[str], rounds: int = 7, max_seconds: float = 3.0) -> list[Cell]:
    """The throughput on a CPU: backends that are slow have fewer turns, but three.

    Args:
        models: to be timed.
        rounds: turns of a backend, at most.
        max_seconds: of a backend's turns together.
    """
    axes = {"model": models, "backends": [BACKENDS], "batch_size": 16}
    return [*grid(OverheadTrial, **axes, rounds=rounds, max_seconds=max_seconds)]


def cells(device: str) -> list[Cell]:
    found: list[Cell] = [*searches(device, RESNETS + VGGS, BACKENDS, budget=BUDGET, limits=LIMITS)]
    return found if device == "cuda" else found + in_turns(RESNETS[:3])


def smoke(device: str) -> list[Cell]:
    found: list[Cell] = [*searches(device, ["cnn"], BACKENDS, budget=2**29, limit=64, limits=LIMITS)]
    return found if device == "cuda" else found + in_turns(["cnn"], rounds=2, max_seconds=0.3)


EXPERIMENT = Experiment(
    name="stress_test",
    doc="largest batch in 16 GiB and throughput of every backend (Figure 3 of arXiv:2205.10683)",
    cells=cells,
    smoke=smoke,
    rounds=1,
    figures=("max_batch_throughput", "claims"),
)
