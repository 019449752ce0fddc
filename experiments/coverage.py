"""The models on which each backend is exact: every family of timm, torchvision and transformers.

Small models in float64 and train mode; one trial a model, with every backend in turn. `dpbench.conformance.coverage`
lists the models.
"""

from dpbench.conformance.coverage import CoverageTrial, models
from dpbench.experiment import Excerpt, experiment_of

BACKENDS = ("bk_mixed", "ghost", "opacus_hooks", "opacus_ghost")


def cells(device: str) -> list[CoverageTrial]:
    return [CoverageTrial(model=model, task=task, backends=BACKENDS, device=device) for model, task in models()]


def smoke(device: str) -> list[CoverageTrial]:
    small = ("timm:test_vit", "tiny:causal/gpt2", "tiny:masked/bert")
    return [
        CoverageTrial(model=model, task=task, backends=("bk_mixed", "opacus_hooks"), device=device)
        for model, task in models()
        if model in small
    ]


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("coverage", "coverage_reasons"),
    table=Excerpt(
        figure="coverage",
        rows=("Backend",),
        cells=("Models", "Built", "Exact", "Refused", "Wrong", "Crashed"),
        where=lambda row: row["Library"] == "all libraries",
    ),
)
