"""Further trials of the experiment `evidence`: the device, norms, a step's parts, a profile.

No torch, as in `dpbench.trials`; the bodies are in `dpbench.measure`, a module a kind. `small` selects a miniature for
a CPU or a smoke run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpbench.errors import one_of
from dpbench.trials.base import Trial
from dpbench.trials.precision import profile_of
from dpbench.trials.steps import STEP_SOURCES, ModelTrial, modules_of_step

__all__ = ["FAMILIES", "DeviceTrial", "NormsTrial", "PartsTrial", "ProfileTrial"]

#: Families of a `NormsTrial`: the uses of a parameter, and group norm.
FAMILIES = ("linear", "convolution", "embedding", "normalisation", "group_norm")


@dataclass(frozen=True, kw_only=True)
class DeviceTrial(Trial):
    """Measure the device's best bandwidth, matrix-product rates, and times of a launch and a wait.

    `sizes` are those of square matrices; `copied` is in bytes, and exceeds the caches.
    """

    kind: ClassVar[str] = "device"
    body: ClassVar[str] = "dpbench.measure.device:run"
    sources: ClassVar[tuple[str, ...]] = (
        *(f"dpbench/measure/{name}.py" for name in ("device", "bench", "counters", "precision", "timing")),
        *(f"clipping/accel/{name}.py" for name in ("cuda", "cuda_programs", "reading_programs")),
    )
    device: str = "cpu"
    sizes: Sequence[int] = (1024, 4096, 8192)
    copied: int = 2**30
    timeout: float = 120.0

    def modules(self) -> tuple[str, ...]:
        return ("torch",)


@dataclass(frozen=True, kw_only=True)
class NormsTrial(Trial):
    """Every way to a per-sample norm of one family of operations, compared with autograd's norms in float64."""

    kind: ClassVar[str] = "norms"
    body: ClassVar[str] = "dpbench.measure.norms:run"
    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    family: str
    precision: str = "float32"
    device: str = "cpu"
    small: bool = False
    seed: int = 0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        profile_of(self.precision)
        one_of("a family", self.family, FAMILIES)

    def modules(self) -> tuple[str, ...]:
        return ("torch",)

    def label(self) -> str:
        return f"{self.kind} {self.family}, {self.precision}"


@dataclass(frozen=True, kw_only=True)
class _StepTrial(ModelTrial):
    """A trial that looks into steps. `threads` is the number of threads of a CPU operation; None means all CPUs."""

    data: str = "synthetic"
    threads: int | None = None
    steps: int = 5
    timeout: float = 300.0

    def label(self) -> str:
        return f"{super().label()}, {self.precision}"


@dataclass(frozen=True, kw_only=True)
class PartsTrial(_StepTrial):
    """The parts of a step of `dpbench.PrivacyEngine`, and of the plain step of the same optimizer.

    `optimizer` is a name in torch.optim; `backend` is the engine's.
    """

    kind: ClassVar[str] = "parts"
    body: ClassVar[str] = "dpbench.measure.parts:run"
    sources: ClassVar[tuple[str, ...]] = (*STEP_SOURCES, "dpbench/engine/**/*.py")
    backend: str = "bk_mixed"
    optimizer: str = "AdamW"


@dataclass(frozen=True, kw_only=True)
class ProfileTrial(_StepTrial):
    """A profile of `steps` steps of each backend: its largest operations, its launches, and the trace as a file.

    A trace of more than `most_bytes` (compressed) is dropped.
    """

    kind: ClassVar[str] = "profile"
    body: ClassVar[str] = "dpbench.measure.profile:run"
    backends: Sequence[str] = ("nonprivate", "bk_mixed")
    steps: int = 2
    most_bytes: int = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class LaunchesTrial(Trial):
    """Launches, bytes and operations of one step of each backend, counted on tensors without values.

    `image_size` and `num_classes` may be None for a model that reads text.
    """

    kind: ClassVar[str] = "launches"
    body: ClassVar[str] = "dpbench.measure.launches:run"
    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    alone: ClassVar[bool] = False
    model: str
    backends: Sequence[str]
    batch_size: int
    image_size: int | None = 32
    num_classes: int | None = 10
    dtype: str = "float32"
    timeout: float = 300.0

    def modules(self) -> tuple[str, ...]:
        return ("torch._dynamo", *modules_of_step(self))
