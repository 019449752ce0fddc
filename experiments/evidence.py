"""All GPU measurements, the most informative first. Run with ``--minutes``; the same command resumes.

At most 100 trials; `dpbench plan evidence` predicts the time of each. Stages:

- `steps`: the whole private training step of our engine and of the others, the README's table and first figure.
- `programs`: our engine's against the plain step, both as CUDA graphs, both compiled, and each in its best way.
- `DeviceTrial`: the device's peak performance.
- `norms`: every way to a norm against float64, group norm at CUDA's limit, the Triton programs, by precision.
- `overheads`: time and memory of backends against ordinary training, interleaved, by model and precision.
- `parts`: the engine's whole step in parts, against the plain step of the same optimizer.
- `profiles`: where the time of a step goes, with the traces.
- `peaks`: predicted against allocated and reserved memory.
- `largest`: the largest batch in 16 GiB, predicted and confirmed (of all models: `dpbench run stress_test`).

``--minutes 9`` completes the first stage and some of the rest. Batch sizes on CUDA let every backend run in 80 GB. On a
CPU all of it runs in miniature, as a check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpbench.experiment import Cell, Experiment, ratios
from dpbench.trials import OverheadTrial, PeakTrial
from dpbench.trials.evidence import FAMILIES, DeviceTrial, NormsTrial, PartsTrial, ProfileTrial
from dpbench.trials.max_batch import searches
from dpbench.trials.whole_step import TrainingStepTrial

BACKENDS = ("nonprivate", "bk_mixed", "mixed_ghost", "opacus_ghost", "opacus_hooks", "vmap")
#: Engines of whole steps, the most informative first.
ENGINES = (
    ("nonprivate", "bk_mixed"),
    ("nonprivate", "opacus_hooks", "opacus_ghost", "private_cnn", "fastdp"),
)
#: Backends with predicted and measured peaks, each in its own process.
FORETOLD = ("nonprivate", "bk_mixed")
BUDGET = 16 * 2**30
#: Precisions of a step, and those in which a norm has its own arithmetic (autocast's is bfloat16's).
PRECISIONS = ("bfloat16-autocast", "float32", "tf32", "bfloat16")
ARITHMETICS = ("float32", "bfloat16", "tf32")


@dataclass(frozen=True)
class Model:
    """A model and its batch size; `image_size` is None for text."""

    reference: str
    batch_size: int
    image_size: int | None = 32
    num_classes: int = 10
    optimizer: str = "SGD"

    def settings(self) -> dict[str, Any]:
        shape = {"image_size": self.image_size, "num_classes": self.num_classes}
        return {"model": self.reference, "batch_size": self.batch_size, "data": "synthetic"} | shape


GPT2 = Model("transformers:gpt2@1024", 8, None)
RESNET18 = Model("resnet18", 256)
#: On CUDA, the most informative first.
MODELS = (
    RESNET18,
    GPT2,
    Model("timm:vit_base_patch16_224", 64, 224, 1000),
    Model("resnet50", 256),
    Model("transformers:roberta@128", 64, None),
    Model("vgg11", 256),
)
_SMALL_BERT = "num_hidden_layers=6&hidden_size=384&num_attention_heads=6&intermediate_size=1536&vocab_size=4096"
#: The README's table.
TRAINED = (
    Model("resnet18", 512),
    Model("timm:vit_tiny_patch16_224?patch_size=4", 512, optimizer="AdamW"),
    Model("transformers:gpt2?n_layer=6&n_embd=384&n_head=6&vocab_size=4096@128", 128, None, optimizer="AdamW"),
    Model("resnet50", 256),
    Model(f"transformers:bert?{_SMALL_BERT}@128", 128, None, optimizer="AdamW"),
    Model("cnn", 2048),
    Model("vgg11", 512),
    Model("timm:convnext_pico?patch_size=2", 256, optimizer="AdamW"),
)
_TINY = "transformers:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=64@16"
SMALL = (Model("resnet18", 8), Model(_TINY, 4, None), Model("vgg11", 8))
SMALLEST = (Model("cnn", 4), Model(_TINY, 4, None))


def norms(device: str, families: Iterable[str], precisions: Iterable[str] = ARITHMETICS) -> list[NormsTrial]:
    """Every way to a norm, for these families.

    Args:
        families: of operations.
        precisions: names of profiles.
    """
    precisions = list(precisions)
    return [
        NormsTrial(family=family, precision=precision, device=device, small=device == "cpu")
        for family in families
        for precision in precisions
    ]


def steps(
    device: str, models: Iterable[Model], engines: Iterable[Sequence[str]] = ENGINES, **options: Any
) -> list[TrainingStepTrial]:
    """The whole step of our engine against the plain one, on these models; then the others'.

    Args:
        models: to train.
        engines: of each trial.
        options: other fields of the trials.
    """
    shared: dict[str, Any] = {"device": device, "rounds": 5, "max_seconds": 2.0, "timeout": 900.0} | options
    models = list(models)
    return [
        TrainingStepTrial(backends=names, optimizer=model.optimizer, **model.settings(), **shared)
        for names in engines
        for model in models
    ]


def programs(device: str, models: Iterable[Model], ways: Iterable[str], **options: Any) -> list[TrainingStepTrial]:
    """The whole step of our engine against the plain one, both as programs.

    Args:
        models: to train.
        ways: how both run.
        options: other fields of the trials.
    """
    return [trial for way in ways for trial in steps(device, models, ENGINES[:1], way=way, **options)]


def overheads(device: str, models: Iterable[Model], precisions: Sequence[str], **options: Any) -> list[OverheadTrial]:
    """Every backend against ordinary training, on these models.

    Args:
        models: to time.
        precisions: names of profiles.
        options: other fields of the trials.
    """
    shared: dict[str, Any] = {"device": device, "rounds": 9, "max_seconds": 4.0, "timeout": 900.0} | options
    return [
        OverheadTrial(backends=BACKENDS, precision=precision, **model.settings(), **shared)
        for precision in precisions
        for model in models
    ]


def parts(device: str, models: Iterable[Model], precision: str, **options: Any) -> list[PartsTrial]:
    """The engine's step in parts, on these models.

    Args:
        models: to time.
        precision: the name of a profile.
        options: other fields of the trials.
    """
    return [PartsTrial(device=device, precision=precision, **model.settings(), **options) for model in models]


def profiles(device: str, models: Iterable[Model], precision: str, **options: Any) -> list[ProfileTrial]:
    """Where the time of a step goes, on these models.

    Args:
        models: to profile.
        precision: the name of a profile.
        options: other fields of the trials.
    """
    return [ProfileTrial(device=device, precision=precision, **model.settings(), **options) for model in models]


def peaks(device: str, models: Iterable[Model], precision: str, backends: Sequence[str] = FORETOLD) -> list[PeakTrial]:
    """Peaks, simulated and measured, on these models.

    Args:
        models: to measure.
        precision: the name of a profile.
        backends: of the steps.
    """
    return [
        PeakTrial(backend=backend, device=device, simulated=simulated, precision=precision, **model.settings())
        for model in models
        for backend in backends
        for simulated in (True, False)
    ]


def largest(device: str, models: Iterable[str], budget: int = BUDGET, limit: int = 16384) -> Sequence[Cell]:
    """The largest batch of every backend, on these models.

    Args:
        models: references.
        budget: bytes.
        limit: the most samples.
    """
    return searches(device, models, BACKENDS, budget=budget, limit=limit)


def cells(device: str) -> list[Cell]:
    if device == "cpu":
        return in_miniature(SMALL, ("resnet18", "vgg11"), BUDGET, 16384)
    mixed, full, *others = PRECISIONS
    first = ("kernels", "group_norm")
    return [
        *steps(device, TRAINED),
        *programs(device, TRAINED, ["replayed"]),
        DeviceTrial(device=device),
        *norms(device, first, ("float32", "bfloat16")),
        *overheads(device, [RESNET18], [mixed, full]),
        *overheads(device, [GPT2], [mixed]),
        *parts(device, [RESNET18], mixed),
        *profiles(device, [RESNET18], mixed),
        *programs(device, TRAINED[:3], ["compiled", "best"]),
        *norms(device, [family for family in FAMILIES if family not in first]),
        *norms(device, first, ("tf32",)),
        *overheads(device, MODELS[2:], [mixed]),
        *parts(device, [GPT2, MODELS[2]], mixed),
        *profiles(device, [GPT2], mixed),
        *overheads(device, MODELS[1:], [full]),
        *peaks(device, MODELS[:2], full),
        *largest(device, ("resnet18",)),
        *overheads(device, MODELS[:2], others),
        *programs(device, TRAINED[3:], ["compiled", "best"]),
    ]


def smoke(device: str) -> list[Cell]:
    return in_miniature(SMALLEST, ("cnn",), 2**29, 64, device, rounds=2, max_seconds=0.2)


def in_miniature(
    models: Sequence[Model], searched: Iterable[str], budget: int, limit: int, device: str = "cpu", **options: Any
) -> list[Cell]:
    """Every stage, at sizes that a CPU runs in seconds, on one thread, which never waits for others on a busy machine.

    Args:
        models: to measure.
        searched: models whose largest batch is searched.
        budget: bytes.
        limit: the most samples.
        options: other fields of the overhead trials.
    """
    return [
        *steps(device, models[:1], threads=1, **options),
        *programs(device, models[:1], ["replayed" if device == "cuda" else "traced"], threads=1, **options),
        DeviceTrial(device=device, sizes=(256, 1024), copied=2**26),
        *(trial.replace(small=True) for trial in norms(device, FAMILIES)),
        *overheads(device, models, PRECISIONS[:2], threads=1, **options),
        *parts(device, models[:1], "float32", threads=1),
        *profiles(device, models[:1], "float32", threads=1),
        *peaks(device, models[:1], "float32"),
        *largest(device, searched, budget, limit),
    ]


def _is_brief(row: Mapping[str, str]) -> bool:
    """True for README's table."""
    return row["Backend"] in ("BK mixed", "Opacus hooks") and row.get("Precision") == "bfloat16-autocast"


EXPERIMENT = Experiment(
    name="evidence",
    doc="what a GPU is to give, most telling first: whole steps, exact norms, overhead, parts, peaks, largest batch",
    cells=cells,
    smoke=smoke,
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
    excerpts={
        "table": ratios("overhead", "Precision"),
        "brief": replace(ratios("overhead", where=_is_brief), rows=("Model",)),
    },
    in_order=True,
)
