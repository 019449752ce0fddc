"""The cost of private training by image size: VGG11 and a ViT at 32 to 512 pixels.

Figure 5 of arXiv:2210.00038 shows this for VGG11, at the largest batch of each method. Here the batch falls as images
grow, equally for all, so that the experiment ends in a quarter of an hour on two cores. A convolution's Gram matrices
grow with the fourth power of the edge in pixels: backends that always need them run up to 64 pixels, and at 512 pixels
only those that end in reasonable time.
"""

from dpbench.experiment import experiment_of, grid, ratios
from dpbench.trials import OverheadTrial

VIT = "timm:vit_tiny_patch16_224"
BACKENDS = ("nonprivate", "fastgradclip", "mixed_ghost", "bk_mixed", "opacus_hooks", "opacus_ghost")
WITH_GRAMS = (*BACKENDS, "ghost", "bk_ghost")
LARGEST = ("nonprivate", "mixed_ghost", "bk_mixed", "opacus_hooks")
#: Pixels along an edge -> (batch size on a CPU, on CUDA).
SIZES = {32: (16, 256), 64: (8, 128), 128: (4, 64), 224: (4, 32), 512: (2, 8)}


def _backends(model: str, size: int) -> tuple[str, ...]:
    """The backends that are fast enough for images of this size."""
    if model == VIT or size <= 64:  # a ViT's positions are patches: 1025 of them at 512 pixels
        return WITH_GRAMS
    return BACKENDS if size < 512 else LARGEST


def cells(device: str) -> list[OverheadTrial]:
    cuda = device == "cuda"
    rounds = {"rounds": 15 if cuda else 5, "max_seconds": 4.0, "device": device}
    found = []
    for model in ("vgg11", VIT):
        for size, batch_sizes in SIZES.items():
            one = {"model": model, "backends": _backends(model, size), "image_size": size}
            found += grid(OverheadTrial, batch_size=batch_sizes[cuda], **one, **rounds)
    return found


def smoke(device: str) -> list[OverheadTrial]:
    some = ("nonprivate", "mixed_ghost", "bk_mixed")
    few = {"backends": some, "batch_size": 2, "rounds": 2, "max_seconds": 0.2, "device": device}
    return grid(OverheadTrial, model="cnn", image_size=[16, 32, 64], **few)


EXPERIMENT = experiment_of(
    __name__, rounds=1, figures=("resolution", "beside_papers", "claims"), table=ratios("resolution", "Pixels")
)
