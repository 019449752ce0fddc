"""The cost of private against ordinary training: every backend and every peer on 12 models, interleaved.

One trial a model, in one process; ratios are within a round. On a CPU it uses the batch sizes of the README's table and
ends in about half an hour on two cores; on CUDA batches are larger. A much slower backend has fewer turns, but at
least three (see `OverheadTrial`). At 1024 tokens only backends that end in reasonable time run; `sequence_length` has
longer ones.
"""

from dpbench.experiment import BERT, CONVNEXT, GPT2, TINY_GPT2, UNTIED_GPT2, VIT, experiment_of, grid, ratios
from dpbench.trials import OverheadTrial
from dpbench.trials.backends import OURS, PEERS

#: The last is TF Privacy's microbatches of four samples, which is not per-sample clipping.
ALL = (*OURS, *PEERS, "tf_microbatch:4")
LONG = ("nonprivate", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed", "opacus_ghost", "fastdp")

BEIT = "timm:beit_base_patch16_224?patch_size=4&embed_dim=192&num_heads=3"

#: Images of 32x32: model -> (batch size on a CPU, on CUDA).
IMAGES = {
    "cnn": (256, 2048),
    "resnet18": (32, 256),
    "resnet50": (16, 256),
    "vgg11": (32, 256),
    "wide_resnet": (8, 256),
    "resnext": (8, 256),
    VIT: (32, 256),
    BEIT: (32, 256),
    CONVNEXT: (32, 256),
}
#: Text: (model, backends, batch size on a CPU, on CUDA, seconds for a backend's turns on a CPU).
TEXTS = ((f"{UNTIED_GPT2}@128", ALL, 8, 64, 8.0), (f"{BERT}@128", ALL, 8, 64, 8.0), (f"{GPT2}@1024", LONG, 4, 16, 30.0))


def cells(device: str) -> list[OverheadTrial]:
    cuda = device == "cuda"
    rounds = {"rounds": 15 if cuda else 7, "max_seconds": 8.0, "device": device}
    found = []
    for model, batch_sizes in IMAGES.items():
        found += grid(OverheadTrial, model=model, backends=ALL, batch_size=batch_sizes[cuda], **rounds)
    for model, backends, on_cpu, on_cuda, seconds in TEXTS:
        own = rounds if cuda else rounds | {"max_seconds": seconds}
        text = {"model": model, "backends": backends, "batch_size": on_cuda if cuda else on_cpu}
        found += grid(OverheadTrial, image_size=None, data="synthetic", **text, **own)
    return found


def smoke(device: str) -> list[OverheadTrial]:
    some = ("nonprivate", "vmap", "mixed_ghost", "bk_mixed", "opacus_ghost", "fastdp", "tf_microbatch:4")
    few = {"backends": some, "batch_size": 4, "rounds": 2, "max_seconds": 0.2, "device": device}
    images = grid(OverheadTrial, model="cnn", **few)
    return images + grid(OverheadTrial, model=f"{TINY_GPT2}@16", image_size=None, data="synthetic", **few)


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("overhead", "claims"), table=ratios("overhead"))
