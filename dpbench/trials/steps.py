"""The kinds of trial that run a training step of a model: timed, beside others, simulated, checked, explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpbench.trials.base import Trial
from dpbench.trials.packages import modules_of_backends, required_modules
from dpbench.trials.precision import profile_of

#: Sources (globs under the project's root) whose change makes a measurement of a training step another measurement.
STEP_SOURCES = (
    *("clipping/**/*.py", "clipping/**/*.c", "clipping/**/*.h"),
    *("dpbench/measure/**/*.py", "dpbench/models/**/*.py"),
)


@dataclass(frozen=True, kw_only=True)
class ModelTrial(Trial):
    """A trial of one model under one clipping backend."""

    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    model: str
    backend: str

    def modules(self) -> tuple[str, ...]:
        return modules_of_step(self, self.model, (self.backend,))


def modules_of_step(trial: Trial, model: str, backends: Iterable[str]) -> tuple[str, ...]:
    """The packages that a step of `model` under `backends` imports.

    Args:
        trial: whose data and device count, if it has them.
        model: a reference.
        backends: names, or references to files.
    """
    digits = ("sklearn.datasets",) if getattr(trial, "data", None) == "digits" else ()
    # torch's profiler, which watches the memory on a CPU, looks for torch._inductor, and so imports it: two seconds
    profiler = ("torch._inductor",) if getattr(trial, "device", None) == "cpu" else ()
    return ("torch", *profiler, *digits, *required_modules(model), *modules_of_backends(backends))


@dataclass(frozen=True, kw_only=True)
class BatchTrial(ModelTrial):
    """A trial of one training step on one batch.

    `memory_budget` is in bytes, `precision` one of `dpbench.trials.precision`. `image_size` and `num_classes` may be
    None for a model that reads text.
    """

    batch_size: int
    device: str = "cpu"
    precision: str = "float32"
    image_size: int | None = 32
    num_classes: int | None = 10
    seed: int = 0
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        profile_of(self.precision)


@dataclass(frozen=True, kw_only=True)
class StepTrial(BatchTrial):
    """Verify, then time, then take the memory of one training step.

    At least `steps` steps are timed, unless `max_seconds` have passed after two. `memory_budget` is in bytes.
    `threads` is the number of threads of a CPU operation; None means every CPU that the process may use.
    """

    kind: ClassVar[str] = "step"
    body: ClassVar[str] = "dpbench.measure.step:run"
    data: str = "digits"
    max_grad_norm: float = 1.0
    threads: int | None = None
    steps: int = 5
    max_seconds: float = 20.0


@dataclass(frozen=True, kw_only=True)
class OverheadTrial(Trial):
    """What clipping costs beside ordinary training: one model, many backends, interleaved in one process.

    Each backend is verified and warmed up; then in each of `rounds` rounds every backend has a turn, in an order of
    the round's own, so that ratios can be taken within a round; then each one's memory is taken. A backend for which
    `rounds` turns would take more than `max_seconds` has fewer, spread over the rounds, but three. One that is refused,
    wrong or fails has an entry that says so, and the others go on.

    `backends` are names or ``path/file.py:Class``; `nonprivate` belongs among them. `compiled`: all of them, ordinary
    training too, run as graphs in the way that is fastest for each (`clipping.program.graphs`). All run in one
    `precision`, one of `dpbench.trials.precision`. `image_size` and `num_classes` may be None for a model that reads
    text. Seeds: `seed` is that of the weights, the data and the orders.
    """

    kind: ClassVar[str] = "overhead"
    body: ClassVar[str] = "dpbench.measure.overhead:run"
    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    model: str
    backends: Sequence[str]
    batch_size: int
    device: str = "cpu"
    precision: str = "float32"
    image_size: int | None = 32
    num_classes: int | None = 10
    data: str = "digits"
    max_grad_norm: float = 1.0
    seed: int = 0
    threads: int | None = None
    rounds: int = 7
    max_seconds: float = 10.0
    timeout: float = 3600.0
    compiled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", tuple(self.backends))  # from JSON it comes as a list
        profile_of(self.precision)
        if len(set(self.backends)) != len(self.backends) or not self.backends:
            raise ValueError(f"expected backends, each once, got {', '.join(self.backends) or 'none'}")
        if self.rounds < 1:
            raise ValueError(f"expected rounds of at least 1, got {self.rounds}")

    def modules(self) -> tuple[str, ...]:
        return modules_of_step(self, self.model, self.backends)

    def label(self) -> str:
        compiled = ", compiled" if self.compiled else ""
        return f"{super().label()}, {len(self.backends)} backends{compiled}"


@dataclass(frozen=True, kw_only=True)
class RecommendTrial(OverheadTrial):
    """A race of all within a time (`dpbench.measure.recommend`): rounds as they fit.

    `until`: when it is to be done, by `time.monotonic`, which all processes of a machine share; None: in a minute.
    `notes`: the path of a file for what is known by now; "" for none. None for `image_size` or `num_classes`: the
    model's own.
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

    `simulated`: by fake tensors, with no memory and no device taken; else measured on `device`.
    """

    kind: ClassVar[str] = "peak"
    body: ClassVar[str] = "dpbench.measure.memory:run"
    data: str = "synthetic"
    simulated: bool
    timeout: float = 300.0

    @property
    def alone(self) -> bool:
        return not self.simulated


@dataclass(frozen=True, kw_only=True)
class LargestTrial(BatchTrial):
    """The largest batch whose step fits in `memory_budget` (bytes): the whole search, simulated, in one process.

    `batch_size` is where it begins. It ends when it knows the answer to `tolerance`, when a fitting batch fills the
    budget but for `unused` (a share of it), or after `max_seconds`, with what is known by then. None for `image_size`
    or `num_classes`: the model's own.
    """

    kind: ClassVar[str] = "largest"
    body: ClassVar[str] = "dpbench.measure.largest:run"
    image_size: int | None = 32
    num_classes: int | None = 10
    max_batch_size: int = 16384
    tolerance: float = 0.02
    unused: float = 0.0
    max_seconds: float = 300.0
    timeout: float = 600.0

    @property
    def alone(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class ConfirmTrial(BatchTrial):
    """Whether the largest batch that was foretold, `batch_size`, is one: verify the backend, then run two real steps.

    The first step has that batch; the second is one step of the search (`tolerance`, relative) larger if it fitted, or
    smaller if it did not. No batch is larger than `max_batch_size`. Nothing is timed, so simulations may run meanwhile.
    """

    kind: ClassVar[str] = "confirm"
    body: ClassVar[str] = "dpbench.measure.confirm:run"
    data: str = "synthetic"
    max_batch_size: int = 16384
    tolerance: float = 0.02
    timeout: float = 120.0

    @property
    def beside(self) -> bool:
        return True

    def second(self, *, fits: bool) -> int | None:
        """The batch size of the second step; None if there is none: the limit fits, or not even one sample does.

        Args:
            fits: whether the first step did.
        """
        if fits:
            size = min(self.batch_size + max(1, int(self.tolerance * self.batch_size)), self.max_batch_size)
            return size if size > self.batch_size else None
        size = self.batch_size - max(1, int(self.tolerance / (1 + self.tolerance) * self.batch_size))
        return size if size > 0 else None


@dataclass(frozen=True, kw_only=True)
class CheckTrial(ModelTrial):
    """A backend against the microbatch oracle, on batches that are hard to get right."""

    kind: ClassVar[str] = "check"
    body: ClassVar[str] = "dpbench.measure.check:run"
    dtype: str = "float64"
    device: str = "cpu"
    image_size: int = 32
    batch_size: int = 3


@dataclass(frozen=True, kw_only=True)
class ExplainTrial(Trial):
    """The route of each use of each parameter, and what it costs. None: the model's own size and number of classes.

    `measure`: on real tensors on `device`, with the seconds of each route and the peaks of a step; else from shapes.
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
        # the fake mode imports torch._dynamo in its constructor, which takes a second and more; the profiler, see above
        return ("torch", "torch._inductor" if self.measure else "torch._dynamo", *required_modules(self.model))
