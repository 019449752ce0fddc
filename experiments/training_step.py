"""The cost of a whole private step, forward to optimizer: our engine, Opacus', private_CNN's and fastDP's.

Others are measured at their best: on GPT-2 with an untied head, on a ViT with its root's parameters frozen (on all of
it too), with position ids as inputs, and fastDP with its `origin_params`.

Two trials for each model and optimizer, each in a process, with the plain step taking turns: our engine, and the
others. Noise is included, each library's default. Memory placement by the C library differs between processes, and
ratios differ more between processes than within one. Our trial is short and best run in three processes, which are
pooled (``--rounds 3 --only "backends=('nonprivate', 'bk_mixed')" --only way=eager``).

Models that are also written in jax have a third trial: jax_privacy beside jax's plain step. Our engine is also measured
against the plain step in parts, for one model of each kind, and with both as programs: on CUDA in each way, and each in
its best; on a CPU each in its best, of transformers and small steps. Models of full size run on CUDA only. On two cores
it takes half an hour; `--minutes` divides it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dpbench.experiment import (
    BERT,
    CONVNEXT,
    GPT2,
    ROOTLESS_VIT,
    UNTIED,
    UNTIED_GPT2,
    VIT,
    Cell,
    experiment_of,
    grid,
    ratios,
)
from dpbench.trials.evidence import PartsTrial
from dpbench.trials.whole_step import TrainingStepTrial

OURS = ("nonprivate", "bk_mixed")
OTHERS = ("nonprivate", "opacus_hooks", "opacus_ghost", "private_cnn", "fastdp")
JAX = ("nonprivate", "jax_privacy")
#: Model -> (optimizer, batch size on a CPU, on CUDA).
IMAGES = {
    "mlp": ("SGD", 256, 2048),
    "cnn": ("SGD", 256, 2048),
    "resnet18": ("SGD", 64, 512),
    "resnet50": ("SGD", 32, 256),
    "vgg11": ("SGD", 64, 512),
    VIT: ("AdamW", 64, 512),
    ROOTLESS_VIT: ("AdamW", 64, 512),
    CONVNEXT: ("AdamW", 32, 256),
}
#: Steps so small that Python is much of their cost.
SMALL = {"cnn": ("SGD", 32, 256), "timm:resnet18": ("SGD", 16, 128), "timm:vit_tiny_patch16_224": ("AdamW", 16, 128)}
TEXTS = {f"{name}@128": ("AdamW", 16, 128) for name in (GPT2, UNTIED_GPT2, BERT)}
FULL_GPT2 = "transformers:gpt2"
#: With a tied head, which Opacus' ghost clipping, private_CNN and fastDP refuse.
TIED = (f"{GPT2}@128", f"{FULL_GPT2}@1024")
#: Models that are written in jax, too.
IN_JAX = ("mlp", "cnn", "resnet18", f"{GPT2}@128")
#: Models of full size (GPT-2 of 124M, RoBERTa-base, ViT-B/16).
LARGE_TEXTS = {f"{name}@1024": ("AdamW", 0, 8) for name in (FULL_GPT2, f"{FULL_GPT2}?{UNTIED}")}
LARGE_TEXTS["transformers:roberta@128"] = "AdamW", 0, 64
LARGE_IMAGES = {"timm:vit_base_patch16_224": ("AdamW", 0, 64)}
#: Models whose steps are also measured as programs on a CPU.
IN_ITS_BEST = (VIT, f"{GPT2}@128", f"{BERT}@128")
#: Models whose steps are measured in parts.
IN_PARTS = ("cnn", "resnet18", VIT, f"{GPT2}@128")


def cells(device: str) -> list[Cell]:
    cuda = device == "cuda"
    programs = ["replayed", "compiled", "best"] if cuda else ["best"]
    found: list[Cell] = []
    text = {"image_size": None, "data": "synthetic"}
    large = {"image_size": 224, "num_classes": 1000, "data": "synthetic"}
    groups: list[Any] = [(IMAGES, {}), (TEXTS, text), (SMALL, {})]
    groups += [(LARGE_TEXTS, text), (LARGE_IMAGES, large)] if cuda else []
    for models, more in groups:
        for model, (optimizer, on_cpu, on_cuda) in models.items():
            of = {"model": model, "batch_size": on_cuda if cuda else on_cpu, "optimizer": optimizer, "device": device}
            of |= more
            alone = models is SMALL or model in TIED
            in_jax = models is not SMALL and model in IN_JAX
            engines = [OURS, *([] if alone else [OTHERS]), *([JAX] if in_jax else [])]
            rounds = 15 if cuda or models is SMALL else 7
            found += grid(TrainingStepTrial, backends=engines, rounds=rounds, max_seconds=12.0, **of)
            if model in IN_PARTS and models is not SMALL:
                found += grid(PartsTrial, steps=7, **of)
            if cuda or models is SMALL or model in IN_ITS_BEST:
                found += grid(TrainingStepTrial, backends=OURS, way=programs, rounds=15, max_seconds=12.0, **of)
    return found


def smoke(device: str) -> list[Cell]:
    few = {"model": "cnn", "batch_size": 4, "device": device}
    way = "replayed" if device == "cuda" else "traced"
    return [
        *grid(TrainingStepTrial, backends=[OURS, OTHERS, JAX], rounds=2, max_seconds=0.2, optimizer="AdamW", **few),
        *grid(TrainingStepTrial, backends=OURS, way=way, rounds=2, max_seconds=0.2, optimizer="AdamW", **few),
        *grid(PartsTrial, steps=2, **few),
    ]


def _is_usual(row: Mapping[str, str]) -> bool:
    """True for an eager step of a usual size beside torch's: README has room for models that most libraries take."""
    small = {("CNN", "32"), ("timm's ResNet18", "16"), ("ViT-tiny/16", "16")}
    others = {"GPT-2 6×384, T=128", "GPT-2, T=1024", "ViT-tiny/4", "MLP", "ResNet18, copying"}
    usual = row["Model"] not in others and (row["Model"], row["B"]) not in small
    return usual and row.get("Way", "eager") == "eager" and not row["Backend"].startswith("jax")


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("training_step", "parts", "claims"),
    table=ratios("training_step", "Optimizer", "Way"),
    brief=replace(ratios("training_step", where=_is_usual), rows=("Model",)),
)
