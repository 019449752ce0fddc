"""The decision map: ghost norm or instantiated gradient, in each layer of eight models.

By the papers' rule and by ours. Nothing is computed: the step runs under fake tensors, and each use of a weight gives
T, d and p. arXiv:2205.10683 has such a table for VGG11 at 224 pixels.
"""

from dpbench.experiment import VIT, experiment_of
from dpbench.trials import ExplainTrial

#: (model, pixels, batch size)
MODELS = [
    ("vgg11", 32, 16),
    ("vgg11", 224, 16),
    ("resnet18", 32, 16),
    ("resnet18", 224, 16),
    (VIT, 32, 16),
    ("timm:beit_base_patch16_224", 224, 16),
    ("transformers:gpt2@128", None, 8),
    ("transformers:gpt2@1024", None, 4),
]


def cells(device: str) -> list[ExplainTrial]:
    return [ExplainTrial(model=model, image_size=size, batch_size=batch) for model, size, batch in MODELS]


def smoke(device: str) -> list[ExplainTrial]:
    return [ExplainTrial(model="cnn", image_size=32, batch_size=4), ExplainTrial(model="vgg11", batch_size=4)]


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("decision_map",))
