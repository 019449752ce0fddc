"""Time and memory of vision transformers under mixed ghost clipping: Figure 4 of arXiv:2205.10683.

The paper's models, at 224 pixels (CrossViT at 240) with 100 classes. On a CPU memory is simulated at one batch size for
all, and time is measured for the four models that end within a few minutes on two cores; on CUDA both are measured.
"""

from dpbench.experiment import Cell, experiment_of, grid
from dpbench.trials import OverheadTrial, PeakTrial

BACKENDS = ["nonprivate", "mixed_ghost", "bk_mixed"]
#: Model -> (pixels, batch size that is timed on a CPU or None).
MODELS = {
    "timm:deit_tiny_patch16_224": (224, 4),
    "timm:deit_small_patch16_224": (224, 2),
    "timm:crossvit_small_240": (240, 2),
    "timm:convit_small": (224, 2),
    "timm:beit_base_patch16_224": (224, None),
    "timm:deit_base_patch16_224": (224, None),
    "timm:convit_base": (224, None),
    "timm:crossvit_base_240": (240, None),
    "timm:beit_large_patch16_224": (224, None),
}
#: Batch size of simulated peaks, and of all measurements on CUDA.
BATCH = 16
CLASSES = 100


def cells(device: str) -> list[Cell]:
    cuda = device == "cuda"
    same = {"num_classes": CLASSES, "data": "synthetic", "device": device}
    found: list[Cell] = []
    for model, (size, on_cpu) in MODELS.items():
        batch_size = BATCH if cuda else on_cpu
        if batch_size is not None:
            one = {"model": model, "backends": tuple(BACKENDS), "batch_size": batch_size, "image_size": size}
            found += grid(OverheadTrial, rounds=15 if cuda else 3, max_seconds=4.0, **one, **same)
        if not cuda:
            peak = {"model": model, "backend": BACKENDS, "batch_size": BATCH, "image_size": size}
            found += grid(PeakTrial, simulated=True, **peak, **same)
    return found


def smoke(device: str) -> list[Cell]:
    one = {"model": "timm:deit_tiny_patch16_224", "image_size": 224, "num_classes": CLASSES, "data": "synthetic"}
    few = {"batch_size": 2, "rounds": 1, "max_seconds": 0.2, "device": device}
    timed = grid(OverheadTrial, backends=tuple(BACKENDS), **one, **few)
    return [*timed, *grid(PeakTrial, backend=BACKENDS, batch_size=2, simulated=True, device=device, **one)]


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("beside_papers", "claims"))
