"""Launches, bytes and operations of a step on a GPU, on six models, counted without a GPU.

The experiment `evidence` times five of these models, with the same batches, on a GPU; the sixth is a block of a Llama.
Python's cost between two launches is not counted; `evidence` and `overhead` measure it.
"""

from dpbench.experiment import TINY_GPT2, Excerpt, experiment_of
from dpbench.trials.evidence import LaunchesTrial

BACKENDS = ("nonprivate", "bk_mixed", "mixed_ghost")
#: Of parameters and activations.
DTYPES = ("float32", "bfloat16")
#: (model, batch size, pixels, classes)
MODELS = (
    ("resnet18", 256, 32, 10),
    ("resnet50", 256, 32, 10),
    ("transformers:gpt2@1024", 8, None, None),
    ("timm:vit_base_patch16_224", 64, 224, 1000),
    ("transformers:roberta@128", 64, None, 2),
    ("transformers:llama-block@2048", 2, None, None),
)


def cells(device: str) -> list[LaunchesTrial]:
    return [
        LaunchesTrial(model=model, backends=BACKENDS, batch_size=b, image_size=size, num_classes=k, dtype=dtype)
        for dtype in DTYPES
        for model, b, size, k in MODELS
    ]


def smoke(device: str) -> list[LaunchesTrial]:
    return [
        LaunchesTrial(model="cnn", backends=BACKENDS, batch_size=4),
        LaunchesTrial(model=f"{TINY_GPT2}@16", backends=BACKENDS, batch_size=4, image_size=None),
    ]


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("launches",),
    table=Excerpt(
        figure="launches",
        rows=("Model", "B", "Dtype"),
        cells=("Ratio of launches", "Ratio of bytes", "Ratio of operations", "Ratio of predicted"),
        where=lambda row: row["Backend"] == "BK mixed",
    ),
)
