"""The trials of a model's training step: timed, compared, simulated, checked, explained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dpbench.errors import one_of
from dpbench.trials.base import Trial
from dpbench.trials.packages import modules_of_backends, required_modules
from dpbench.trials.precision import profile_of

#: Sources (globs under the project's root) that a measurement of a training step depends on.
STEP_SOURCES = (
    *("clipping/**/*.py", "clipping/**/*.c", "clipping/**/*.h"),
    *("dpbench/measure/**/*.py", "dpbench/models/**/*.py"),
)
#: How steps run: as written, or as programs in one way of `clipping.program.graphs`, or each in its fastest way.
WAYS = ("eager", "traced", "replayed", "compiled", "best")


def modules_of_step(trial: Any) -> tuple[str, ...]:
    """The packages that a step imports.

    Args:
        trial: with a model, a backend or several, and perhaps data and a device.
    """
    digits = ("sklearn.datasets",) if getattr(trial, "data", None) == "digits" else ()
    # torch's profiler, which measures CPU memory, imports torch._inductor: two seconds
    profiler = ("torch._inductor",) if getattr(trial, "device", None) == "cpu" else ()
    backends = getattr(trial, "backends", None) or (trial.backend,)
    return ("torch", *profiler, *digits, *required_modules(trial.model), *modules_of_backends(backends))


@dataclass(frozen=True, kw_only=True)
class ModelTrial(Trial):
    """A trial of training steps of one model on one batch.

    `precision` is one of `dpbench.trials.precision`. `image_size` and `num_classes` may be None for a model that reads
    text. `seed` decides the weights and the data.
    """

    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    model: str
    batch_size: int
    device: str = "cpu"
    precision: str = "float32"
    image_size: int | None = 32
    num_classes: int | None = 10
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        profile_of(self.precision)

    def modules(self) -> tuple[str, ...]:
        return modules_of_step(self)


@dataclass(frozen=True, kw_only=True)
class BatchTrial(ModelTrial):
    """A trial of one backend. `memory_budget` is in bytes."""

    backend: str
    memory_budget: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepTrial(BatchTrial):
    """Verify one training step, time it, and measure its memory.

    At least `steps` steps are timed, unless `max_seconds` pass after two. `threads` is the number of threads of a CPU
    operation; None means all available CPUs.
    """

    kind: ClassVar[str] = "step"
    body: ClassVar[str] = "dpbench.measure.step:run"
    data: str = "digits"
    max_grad_norm: float = 1.0
    threads: int | None = None
    steps: int = 5
    max_seconds: float = 20.0


@dataclass(frozen=True, kw_only=True)
class OverheadTrial(ModelTrial):
    """The cost of clipping over ordinary training: one model, many backends, interleaved in one process.

    Each backend is verified and warmed up. In each of `rounds` rounds every backend then has a turn, in a random order,
    so that ratios can be computed within a round. Then each one's memory is measured. A backend whose turns would take
    more than `max_seconds` has fewer, but at least three, spread over the rounds. If a backend is refused, wrong or
    fails, its entry says so, and the others continue.

    `backends` are names or ``path/file.py:Class``; include `nonprivate`. All of them, ordinary training too, run in one
    `way` of `WAYS`, or are refused; "best" is the fastest way for each. `seed` decides the orders, too.
    """

    kind: ClassVar[str] = "overhead"
    body: ClassVar[str] = "dpbench.measure.overhead:run"
    backends: Sequence[str]
    data: str = "digits"
    max_grad_norm: float = 1.0
    threads: int | None = None
    rounds: int = 7
    max_seconds: float = 10.0
    timeout: float = 3600.0
    way: str = "eager"

    def __post_init__(self) -> None:
        super().__post_init__()
        if one_of("a way", self.way, WAYS) == "replayed" and not self.device.startswith("cuda"):
            raise ValueError(f"expected device=cuda for steps replayed as CUDA graphs, got {self.device}")
        if len(set(self.backends)) != len(self.backends) or not self.backends:
            raise ValueError(f"expected backends, each once, got {', '.join(self.backends) or 'none'}")
        if self.rounds < 1:
            raise ValueError(f"expected rounds of at least 1, got {self.rounds}")

    @property
    def compiled(self) -> bool:
        """True if steps run as programs."""
        return self.way != "eager"

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"compiled": self.compiled}

    def label(self) -> str:
        return f"{super().label()}, {len(self.backends)} backends{f', {self.way}' if self.compiled else ''}"


def with_way(trial: Mapping[str, Any]) -> Mapping[str, Any]:
    """A trial's fields with its way, if an old record says only whether steps were compiled, or nothing."""
    if trial["kind"] not in ("overhead", "training_step", "recommend"):
        return trial
    compiled = bool(trial.get("compiled"))
    return {"way": "best" if compiled else "eager", **trial, "compiled": compiled}


@dataclass(frozen=True, kw_only=True)
class RecommendTrial(OverheadTrial):
    """A race of all backends within a time limit (`dpbench.measure.recommend`), with as many rounds as fit.

    `until` is the end by `time.monotonic`, which all processes of a machine share; None means in a minute. `notes` is
    the path of a file for results so far; "" for none. None for `image_size` or `num_classes` means the model's own.
    """

    kind: ClassVar[str] = "recommend"
    body: ClassVar[str] = "dpbench.measure.recommend:run"
    image_size: int | None = None
    num_classes: int | None = None
    data: str = "synthetic"
    until: float | None = None
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class PeakTrial(BatchTrial):
    """The peak memory of one training step, and whether it fits in `memory_budget` (bytes).

    `simulated` uses fake tensors, which need neither memory nor device; otherwise it is measured on `device`.
    """

    kind: ClassVar[str] = "peak"
    body: ClassVar[str] = "dpbench.measure.memory:run"
    data: str = "synthetic"
    simulated: bool
    timeout: float = 300.0

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return not self.simulated


@dataclass(frozen=True, kw_only=True)
class LargestTrial(BatchTrial):
    """The largest batch whose step fits in `memory_budget` (bytes): a whole search, simulated, in one process.

    It starts at `batch_size`. It ends when the answer is known to `tolerance`, when a fitting batch leaves at most a
    share `unused` of the budget free, or after `max_seconds` with the best answer so far. None for `image_size` or
    `num_classes` means the model's own.
    """

    kind: ClassVar[str] = "largest"
    body: ClassVar[str] = "dpbench.measure.largest:run"
    alone: ClassVar[bool] = False
    max_batch_size: int = 16384
    tolerance: float = 0.02
    unused: float = 0.0
    max_seconds: float = 300.0
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class ConfirmTrial(BatchTrial):
    """Confirm the predicted largest batch, `batch_size`: verify the backend, then run two real steps.

    The first step has that batch. The second is one step of the search (`tolerance`, relative) larger if it fitted,
    else smaller. No batch exceeds `max_batch_size`. Nothing is timed, so simulations may run meanwhile.
    """

    kind: ClassVar[str] = "confirm"
    body: ClassVar[str] = "dpbench.measure.largest:confirm"
    beside: ClassVar[bool] = True
    data: str = "synthetic"
    max_batch_size: int = 16384
    tolerance: float = 0.02
    timeout: float = 120.0

    def second(self, *, fits: bool) -> int | None:
        """The batch size of the second step; None if the limit fits, or if not even one sample does.

        Args:
            fits: whether the first step did.
        """
        if fits:
            size = min(self.batch_size + max(1, int(self.tolerance * self.batch_size)), self.max_batch_size)
            return size if size > self.batch_size else None
        size = self.batch_size - max(1, int(self.tolerance / (1 + self.tolerance) * self.batch_size))
        return size if size > 0 else None


@dataclass(frozen=True, kw_only=True)
class CheckTrial(Trial):
    """Compare a backend with the microbatch oracle on difficult batches."""

    kind: ClassVar[str] = "check"
    body: ClassVar[str] = "dpbench.measure.check:run"
    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    model: str
    backend: str
    dtype: str = "float64"
    device: str = "cpu"
    image_size: int = 32
    batch_size: int = 3

    def modules(self) -> tuple[str, ...]:
        return (*modules_of_step(self), "sklearn.datasets")


@dataclass(frozen=True, kw_only=True)
class ExplainTrial(Trial):
    """The route of each use of each parameter, and its cost. None means the model's own size and number of classes.

    `measure` uses real tensors on `device`, with the seconds of each route and the peaks of a step; otherwise shapes
    alone.
    """

    kind: ClassVar[str] = "explain"
    body: ClassVar[str] = "dpbench.measure.explain:run"
    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    model: str
    batch_size: int
    image_size: int | None = None
    num_classes: int | None = None
    measure: bool = False
    device: str = "cpu"
    timeout: float = 300.0

    def modules(self) -> tuple[str, ...]:
        # the fake mode imports torch._dynamo in its constructor, over a second; the profiler: see above
        return ("torch", "torch._inductor" if self.measure else "torch._dynamo", *required_modules(self.model))
