"""Largest batch in 40 GiB and speed on language and vision models: Figures 4 and 5 of arXiv:2210.00038.

On CUDA everything is measured, with the throughput at the largest batch. On a CPU the largest batch is simulated, and
the time ratio of GPT-2 is measured at a small batch; the experiment `resolution` times VGG11 at 32 to 512 pixels.
Sequences have 100 tokens, the padded length of E2E; the figure does not give it.
"""

from typing import Any

from dpbench.experiment import Cell, MaxBatch, experiment_of, grid
from dpbench.trials import OverheadTrial, PeakTrial, StepTrial

BUDGET = 40 * 2**30
BACKENDS = ["nonprivate", "ghost", "bk_mixed", "opacus_hooks"]
TEXT: dict[str, Any] = {"image_size": None, "data": "synthetic"}
GPT2, TOKENS = "transformers:gpt2", 100
#: Model -> the batch size of the paper's throughput.
MODELS = {f"{GPT2}@{TOKENS}": 100, f"{GPT2}-medium@{TOKENS}": 50, f"{GPT2}-large@{TOKENS}": 20}
#: (model, pixels, backends): with Gram matrices of 50176 positions and more, VGG11 takes hours, even simulated.
IMAGES = [
    ("vgg11", 224, ["nonprivate", "bk_mixed", "opacus_hooks"]),
    ("vgg11", 384, ["nonprivate", "bk_mixed", "opacus_hooks"]),
    ("timm:beit_large_patch16_224", 224, BACKENDS),
]


def _search(device: str, model: str, backend: str, budget: int = BUDGET, limit: int = 4096, **fields: Any) -> MaxBatch:
    """Search for the largest batch in a budget (bytes); on CUDA also time its step."""
    one = {"model": model, "backend": backend, "batch_size": 8, "device": device}
    same: dict[str, Any] = one | {"memory_budget": budget} | fields
    probe = PeakTrial(simulated=device == "cpu", **same)
    then = StepTrial(max_seconds=15.0, **same) if device == "cuda" else None
    return MaxBatch(probe=probe, then=then, max_batch_size=limit, start=32)


def cells(device: str) -> list[Cell]:
    cuda = device == "cuda"
    found: list[Cell] = [_search(device, model, backend, **TEXT) for model in MODELS for backend in BACKENDS]
    for model, size, backends in IMAGES:
        shape: dict[str, Any] = {"image_size": size, "data": "synthetic"}
        found += [_search(device, model, backend, **shape) for backend in backends]
    timed = MODELS if cuda else {f"{GPT2}@{TOKENS}": 2}
    for model, batch_size in timed.items():
        one = {"model": model, "backends": (*BACKENDS, "fastdp"), "batch_size": batch_size, "device": device}
        found += grid(OverheadTrial, rounds=15 if cuda else 3, max_seconds=4.0, num_classes=None, **one, **TEXT)
    return found


def smoke(device: str) -> list[Cell]:
    model = f"{GPT2}@{TOKENS // 10}"
    few = [_search(device, model, backend, 2**32, 16, **TEXT) for backend in ("nonprivate", "bk_mixed")]
    return [*few, _search(device, "vgg11", "bk_mixed", 2**30, 16, image_size=224, data="synthetic")]


EXPERIMENT = experiment_of(__name__, rounds=1, figures=("beside_papers", "claims"))
