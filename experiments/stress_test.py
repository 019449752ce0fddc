"""The stress test: the largest batch in 16 GiB, and the throughput, of every backend: Figure 3 of arXiv:2205.10683.

The largest batch is *predicted*: simulated on the device's fake tensors, which takes no memory, so a laptop can draw
the 16 GiB panel. On CUDA two real steps then confirm each, in an allocator budget of 16 GiB. The throughput of some
ResNets is measured at one batch, the same for all, with the backends taking turns in one process. GPT-2 (124M),
RoBERTa-base and ViT-B/16 are searched only. All ends within ten minutes on a GPU. Bars label the two kinds of number.

`microbatch` loops over samples, so its memory hardly grows with the batch. Its search ends at the batch of `LIMITS`,
where a real step still takes seconds.
"""

from typing import Any

from dpbench.experiment import Cell, Excerpt, experiment_of, grid
from dpbench.trials import OverheadTrial
from dpbench.trials.max_batch import searches

BUDGET = 16 * 2**30
BACKENDS = ["nonprivate", "microbatch", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_mixed", "opacus_hooks"]
RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
VGGS = ["vgg11", "vgg13", "vgg16", "vgg19"]
LIMITS = {"microbatch": 64}
#: Models of full size, searched but not timed: `training_step` times them. Texts (GPT-2 of 124M, RoBERTa-base), images.
TEXTS = ["transformers:gpt2@1024", "transformers:roberta@128"]
LARGE = ["timm:vit_base_patch16_224"]
LARGE_LIMITS = LIMITS | {"microbatch": 8}
#: Device -> which models are timed, at which batch.
TIMED = {"cpu": (RESNETS[:3], 16), "cuda": (["resnet18", "resnet50"], 64)}


def _in_turns(device: str, models: list[str], batch_size: int, max_seconds: float = 3.0, **more: int) -> list[Cell]:
    """The throughput. Slow backends have fewer turns, but at least three."""
    axes: dict[str, Any] = {"model": models, "backends": [BACKENDS], "batch_size": batch_size, "device": device}
    return [*grid(OverheadTrial, **axes, max_seconds=max_seconds, **more)]


def cells(device: str) -> list[Cell]:
    found = searches(device, RESNETS + VGGS, BACKENDS, budget=BUDGET, limits=LIMITS)
    of: dict[str, Any] = {"budget": BUDGET, "limits": LARGE_LIMITS}
    found += searches(device, TEXTS, BACKENDS, image_size=None, **of)
    found += searches(device, LARGE, BACKENDS, image_size=224, num_classes=1000, **of)
    return [*found, *_in_turns(device, *TIMED[device])]


def smoke(device: str) -> list[Cell]:
    found = searches(device, ["cnn"], BACKENDS, budget=2**29, limit=64, limits=LIMITS)
    return [*found, *_in_turns(device, ["cnn"], 16, rounds=2, max_seconds=0.3)]


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("max_batch_throughput", "claims"),
    table=Excerpt(figure="max_batch_throughput", rows=("Model", "Memory"), across="Backend", cells=("Maximum batch",)),
)
