"""Which popular models have a step that runs as one program, and why others do not.

The verdicts are those of `experiments.coverage`: exact means that the program's norms and sums equal autograd's. A type
of transformers is taken once, under its first head: of 138 types with several, 128 had one verdict for all; the others
differ where an encoder-decoder classifies. Mixtures of experts run in one kernel, transformers' default and the way
that `torch.compile` takes. A loop over the experts that have tokens is no program of any kind.
"""

from dpbench.conformance.coverage import COMPILED, LOOP, CoverageTrial, models
from dpbench.experiment import Excerpt, experiment_of

BACKENDS = (f"bk_mixed{COMPILED}",)


def cells(device: str) -> list[CoverageTrial]:
    first: dict[str, CoverageTrial] = {}
    for model, task in models():
        if task != LOOP:
            kind = model.partition("/")[2] or model
            first.setdefault(kind, CoverageTrial(model=model, task=task, backends=BACKENDS, device=device))
    return list(first.values())


def smoke(device: str) -> list[CoverageTrial]:
    return [cell for cell in cells(device) if cell.model in ("timm:test_vit", "tiny:causal/gpt2")]


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=("coverage", "coverage_reasons"),
    table=Excerpt(
        figure="coverage", rows=("Library", "Task"), cells=("Models", "Built", "Exact", "Refused", "Wrong", "Crashed")
    ),
)
