"""All that a GPU is to measure, most informative first: steps, norms, overhead, parts, peaks, largest batch.

Run it with ``--minutes``; the same command resumes. At most 100 trials, in stages:

- `steps`: the whole private training step of our engine and of the others, the README's table and first figure.
- `programs`: our engine's against the plain step, both as CUDA graphs, both compiled, and each in its best way.
- `DeviceTrial`: the device's peak performance.
- `norms`: every way to a norm against float64, and group norm at CUDA's limit, by precision.
- `overheads`: time and memory of backends against ordinary training, interleaved, by model and precision.
- `parts`: the engine's whole step in parts, against the plain step of the same optimizer.
- `profiles`: where the time of a step goes, with the traces.
- `peaks`: predicted against allocated and reserved memory.
- `largest`: the largest batch in 16 GiB, predicted and confirmed (of all models: `dpbench run stress_test`).

``--minutes 9`` completes the first stage and some of the rest. Batch sizes on CUDA let every backend run in 80 GB. On a
CPU all of it runs in miniature, as a check.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpbench.experiment import BERT, CONVNEXT, TINY_GPT2, UNTIED, UNTIED_GPT2, VIT, Cell, experiment_of, grid, ratios
from dpbench.trials import OverheadTrial, PeakTrial
from dpbench.trials.evidence import FAMILIES, DeviceTrial, NormsTrial, PartsTrial, ProfileTrial
from dpbench.trials.max_batch import searches
from dpbench.trials.whole_step import TrainingStepTrial

BACKENDS = ("nonprivate", "bk_mixed", "mixed_ghost", "opacus_ghost", "opacus_hooks", "vmap")
#: Engines of whole steps, the most informative first.
ENGINES = (("nonprivate", "bk_mixed"), ("nonprivate", "opacus_hooks", "opacus_ghost", "private_cnn", "fastdp"))
#: Predicted and measured peaks, each in its own process.
FORETOLD: dict[str, Any] = {"backend": ["nonprivate", "bk_mixed"], "simulated": [True, False]}
BUDGET = 16 * 2**30
#: Precisions of a step, and those in which a norm has its own arithmetic (autocast's is bfloat16's).
PRECISIONS = ("bfloat16-autocast", "float32", "tf32", "bfloat16")
ARITHMETICS = ("float32", "bfloat16", "tf32")


Model = dict[str, Any]


def _model(reference: str, batch_size: int, image_size: int | None = 32, num_classes: int = 10, **more: Any) -> Model:
    """The fields of a trial that name a model and its batch size; `image_size` is None for text."""
    shape = {"image_size": image_size, "num_classes": num_classes}
    return {"model": reference, "batch_size": batch_size, "data": "synthetic", **shape, **more}


FULL_GPT2 = _model(f"transformers:gpt2?{UNTIED}@1024", 8, None)
RESNET18 = _model("resnet18", 256)
#: On CUDA, the most informative first.
MODELS = (
    RESNET18,
    FULL_GPT2,
    _model("timm:vit_base_patch16_224", 64, 224, 1000),
    _model("resnet50", 256),
    _model("transformers:roberta@128", 64, None),
    _model("vgg11", 256),
)
#: The README's table.
TRAINED = (
    _model("resnet18", 512),
    _model(VIT, 512, optimizer="AdamW"),
    _model(f"{UNTIED_GPT2}@128", 128, None, optimizer="AdamW"),
    _model("resnet50", 256),
    _model(f"{BERT}@128", 128, None, optimizer="AdamW"),
    _model("cnn", 2048),
    _model("vgg11", 512),
    _model(CONVNEXT, 256, optimizer="AdamW"),
)
SMALL = (_model("resnet18", 8), _model(f"{TINY_GPT2}@16", 4, None), _model("vgg11", 8))
SMALLEST = (_model("cnn", 4), _model(f"{TINY_GPT2}@16", 4, None))


def _of(kind: type[Any], device: str, models: Iterable[Model], **axes: Any) -> list[Any]:
    """The trials of each model; lists are axes."""
    return [trial for model in models for trial in grid(kind, device=device, **model, **axes)]


def _norms(device: str, families: Iterable[str], precisions: Sequence[str] = ARITHMETICS, **options: Any) -> list[Cell]:
    """Every way to a norm, for these families."""
    return [*grid(NormsTrial, family=[*families], precision=[*precisions], device=device, **options)]


def _steps(
    device: str, models: Sequence[Model], engines: Iterable[Sequence[str]] = ENGINES, **options: Any
) -> list[Cell]:
    """The whole step of our engine against the plain one, on these models; then the others'."""
    shared: dict[str, Any] = {"rounds": 5, "max_seconds": 2.0, "timeout": 900.0} | options
    return [trial for names in engines for trial in _of(TrainingStepTrial, device, models, backends=names, **shared)]


def _programs(device: str, models: Sequence[Model], ways: Iterable[str], **options: Any) -> list[Cell]:
    """The whole step of our engine against the plain one, both as programs."""
    return [trial for way in ways for trial in _steps(device, models, ENGINES[:1], way=way, **options)]


def _overheads(device: str, models: Iterable[Model], precision: str, **options: Any) -> list[Cell]:
    """Every backend against ordinary training, on these models."""
    shared: dict[str, Any] = {"rounds": 9, "max_seconds": 4.0, "timeout": 900.0} | options
    return _of(OverheadTrial, device, models, backends=BACKENDS, precision=precision, **shared)


def cells(device: str) -> list[Cell]:
    if device == "cpu":
        return _in_miniature(SMALL, ("resnet18", "vgg11"), BUDGET, 16384)
    mixed, full, *others = PRECISIONS
    return [
        *_steps(device, TRAINED),
        *_programs(device, TRAINED, ["replayed"]),
        DeviceTrial(device=device),
        *_norms(device, ["group_norm"], ("float32", "bfloat16")),
        *_overheads(device, [RESNET18], mixed),
        *_overheads(device, [RESNET18], full),
        *_overheads(device, [FULL_GPT2], mixed),
        *_of(PartsTrial, device, [RESNET18], precision=mixed),
        *_of(ProfileTrial, device, [RESNET18], precision=mixed),
        *_programs(device, TRAINED[:3], ["compiled", "best"]),
        *_norms(device, [family for family in FAMILIES if family != "group_norm"]),
        *_norms(device, ["group_norm"], ("tf32",)),
        *_overheads(device, MODELS[2:], mixed),
        *_of(PartsTrial, device, [FULL_GPT2, MODELS[2]], precision=mixed),
        *_of(ProfileTrial, device, [FULL_GPT2], precision=mixed),
        *_overheads(device, MODELS[1:], full),
        *_of(PeakTrial, device, MODELS[:2], **FORETOLD),
        *searches(device, ("resnet18",), BACKENDS, budget=BUDGET),
        *[trial for precision in others for trial in _overheads(device, MODELS[:2], precision)],
        *_programs(device, TRAINED[3:], ["compiled", "best"]),
    ]


def smoke(device: str) -> list[Cell]:
    return _in_miniature(SMALLEST, ("cnn",), 2**29, 64, device, rounds=2, max_seconds=0.2)


def _in_miniature(
    models: Sequence[Model], searched: Iterable[str], budget: int, limit: int, device: str = "cpu", **options: Any
) -> list[Cell]:
    """Every stage, at sizes that a CPU runs in seconds, on one thread, which never waits for others on a busy machine.

    `options` are for the trials that take turns; `searched` are the models whose largest batch is searched.
    """
    return [
        *_steps(device, models[:1], threads=1, **options),
        *_programs(device, models[:1], ["replayed" if device == "cuda" else "traced"], threads=1, **options),
        DeviceTrial(device=device, sizes=(256, 1024), copied=2**26),
        *_norms(device, FAMILIES, small=True),
        *[trial for p in PRECISIONS[:2] for trial in _overheads(device, models, p, threads=1, **options)],
        *_of(PartsTrial, device, models[:1], threads=1),
        *_of(ProfileTrial, device, models[:1], threads=1),
        *_of(PeakTrial, device, models[:1], **FORETOLD),
        *searches(device, searched, BACKENDS, budget=budget, limit=limit),
    ]


def _is_brief(row: Mapping[str, str]) -> bool:
    """True for README's table."""
    return row["Backend"] in ("BK mixed", "Opacus hooks") and row.get("Precision") == "bfloat16-autocast"


EXPERIMENT = experiment_of(
    __name__,
    rounds=1,
    figures=(
        "training_step",
        "device",
        "norms",
        "overhead",
        "max_batch_throughput",
        "memory_accuracy",
        "parts",
        "profile",
    ),
    table=ratios("overhead", "Precision"),
    brief=replace(ratios("overhead", where=_is_brief), rows=("Model",)),
    in_order=True,
)
