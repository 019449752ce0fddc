"""What can be measured: one frozen dataclass a kind of trial. No torch here; the parent reads and writes these.

A trial is data. Its identity is the hash of its canonical JSON, so that the same trial declared twice, or again
tomorrow, is the same trial. What it runs is named by `body`, a function ``body(trial) -> dict`` that is imported and
called in the trial's own process only (see `dpbench.server`); the dict is the record's ``result``. A body raises what
`dpbench.outcome` knows how to name.

An experiment may bring a kind of its own: subclass `Trial` at the top level of a module, with `kind` and `body`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self

from dpbench.precision import profile_of
from dpbench.reference import load_object, reference_to

#: Sources (globs under the project's root) whose change makes a measurement of a training step another measurement.
STEP_SOURCES = (
    *("clipping/**/*.py", "clipping/**/*.c", "clipping/**/*.h"),
    *("dpbench/measure/**/*.py", "dpbench/models/**/*.py", "dpbench/data.py"),
)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal texts.

    Raises:
        ValueError: for a float that is not finite, which JSON does not know.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _as_text(value: Any) -> Any:
    """A field of a trial such that every encoding has it."""
    if isinstance(value, list | tuple):
        return type(value)(map(_as_text, value))
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement, in a process of its own.

    `timeout` (seconds) bounds the whole trial and is no part of its identity: a longer one measures the same thing.
    """

    kind: ClassVar[str]
    body: ClassVar[str]
    sources: ClassVar[tuple[str, ...]] = ()
    timeout: float = 600.0

    def describe(self) -> dict[str, Any]:
        """`kind` and all fields, as they stand in a record: a path's byte that is not UTF-8 as its escape."""
        return {"kind": self.kind} | {f.name: _as_text(getattr(self, f.name)) for f in fields(self)}

    @cached_property
    def id(self) -> str:
        """16 hex digits: the hash of the canonical JSON of `kind` and all fields but `timeout`."""
        identity = {name: value for name, value in self.describe().items() if name != "timeout"}
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]

    @property
    def alone(self) -> bool:
        """Whether another trial at the same time would change what this one measures."""
        return True

    def modules(self) -> tuple[str, ...]:
        """Third-party modules that the trial uses: imported before the fork, and their versions fingerprinted."""
        return ()

    def label(self) -> str:
        """A few words for a person: what is measured."""
        shown = ("model", "backend", "accountant", "batch_size")
        words = [str(getattr(self, name)) for name in shown if hasattr(self, name)]
        return " ".join([self.kind, *words])

    def to_wire(self) -> dict[str, Any]:
        """As sent to the process that runs it: the reference of the class, and its fields."""
        return {"class": reference_to(type(self)), "fields": {f.name: getattr(self, f.name) for f in fields(self)}}

    @staticmethod
    def from_wire(message: Mapping[str, Any]) -> Trial:
        """The inverse of `to_wire`."""
        trial = load_object(message["class"])(**message["fields"])
        assert isinstance(trial, Trial)
        return trial

    def replace(self, **changes: Any) -> Self:
        """The same trial with some fields changed (as `dataclasses.replace`, without the cached id)."""
        return type(self)(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)


@dataclass(frozen=True, kw_only=True)
class _ModelTrial(Trial):
    """A trial of one model under one clipping backend."""

    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    model: str
    backend: str

    def modules(self) -> tuple[str, ...]:
        return _modules_of_step(self, self.model, (self.backend,))


def _modules_of_step(trial: Trial, model: str, backends: Iterable[str]) -> tuple[str, ...]:
    from dpbench.models import required_modules

    peer = ("opacus",) if any(backend.startswith("opacus") for backend in backends) else ()
    digits = ("sklearn.datasets",) if getattr(trial, "data", None) == "digits" else ()
    # torch's profiler, which watches the memory on a CPU, looks for torch._inductor, and so imports it: two seconds
    profiler = ("torch._inductor",) if getattr(trial, "device", None) == "cpu" else ()
    return ("torch", *profiler, *digits, *required_modules(model), *peer)


@dataclass(frozen=True, kw_only=True)
class _BatchTrial(_ModelTrial):
    """A trial of one training step on one batch; `memory_budget` is in bytes, `precision` one of `dpbench.precision`.

    `image_size` and `num_classes` may be None for a model that reads text.
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
class StepTrial(_BatchTrial):
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

    `backends` are names or ``path/file.py:Class``; `nonprivate` belongs among them. All run in one `precision`, one of
    `dpbench.precision`. `image_size` and `num_classes` may be None for a model that reads text. Seeds: `seed` is that
    of the weights, the data and the orders.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", tuple(self.backends))  # from JSON it comes as a list
        profile_of(self.precision)
        if len(set(self.backends)) != len(self.backends) or not self.backends:
            raise ValueError(f"expected backends, each once, got {', '.join(self.backends) or 'none'}")
        if self.rounds < 1:
            raise ValueError(f"expected rounds of at least 1, got {self.rounds}")

    def modules(self) -> tuple[str, ...]:
        return _modules_of_step(self, self.model, self.backends)

    def label(self) -> str:
        return f"{super().label()}, {len(self.backends)} backends"


@dataclass(frozen=True, kw_only=True)
class RecommendTrial(OverheadTrial):
    """The same within a time (seconds): no backend is opened after half of `within`, no round begun that ends after it.

    `fewest` steps at the least are run before any is timed. None for `image_size` or `num_classes`: the model's own.
    """

    kind: ClassVar[str] = "recommend"
    body: ClassVar[str] = "dpbench.measure.recommend:run"
    image_size: int | None = None
    num_classes: int | None = None
    data: str = "synthetic"
    within: float = 60.0
    fewest: int = 2


@dataclass(frozen=True, kw_only=True)
class PeakTrial(_BatchTrial):
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
class LargestTrial(_BatchTrial):
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
class _AccountingTrial(Trial):
    """A trial of one accountant; `sampling` to `max_batch_size` as `accounting.SubsampledGaussian` takes them.

    An `adjacency` that is not named is found at once, so that a trial and its record say which it is.
    """

    sources: ClassVar[tuple[str, ...]] = ("accounting/**/*.py", "dpbench/measure/epsilon.py")
    accountant: str
    sample_rate: float
    delta: float
    sampling: str = "poisson"
    adjacency: str = ""
    dataset_size: int | None = None
    max_batch_size: int | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        from accounting.sampling import PROVED

        if self.adjacency == "" and self.sampling in PROVED:
            object.__setattr__(self, "adjacency", PROVED[self.sampling][0])

    def modules(self) -> tuple[str, ...]:
        return ("numpy", "scipy.special", *(("dp_accounting.pld",) if self.accountant == "pld" else ()))


@dataclass(frozen=True, kw_only=True)
class EpsilonTrial(_AccountingTrial):
    """What one accountant says of `steps` steps of the subsampled Gaussian mechanism at `delta`."""

    kind: ClassVar[str] = "epsilon"
    body: ClassVar[str] = "dpbench.measure.epsilon:run"
    noise_multiplier: float
    steps: int

    def label(self) -> str:
        return f"{super().label()}, {self.steps} steps"


@dataclass(frozen=True, kw_only=True)
class SweepTrial(EpsilonTrial):
    """A point of curves along σ, q and δ."""

    kind: ClassVar[str] = "epsilon_sweep"


@dataclass(frozen=True, kw_only=True)
class SchemeTrial(EpsilonTrial):
    """A bar or a point of the sampling schemes side by side; `scheme` is its name in the figure."""

    kind: ClassVar[str] = "epsilon_scheme"
    scheme: str

    def label(self) -> str:
        return f"{super().label()}, {self.scheme}, {self.adjacency}, σ {self.noise_multiplier:g}"


@dataclass(frozen=True, kw_only=True)
class MapTrial(EpsilonTrial):
    """A cell of the map over (q, σ, T, δ)."""

    kind: ClassVar[str] = "epsilon_map"
    timeout: float = 20.0


@dataclass(frozen=True, kw_only=True)
class CalibrationTrial(_AccountingTrial):
    """The noise multiplier, or the number of steps, that one accountant allows at `target_epsilon`.

    `unknown` is "noise_multiplier" or "steps", and the field of that name is None.
    """

    kind: ClassVar[str] = "calibration"
    body: ClassVar[str] = "dpbench.measure.epsilon:calibrate"
    unknown: str
    target_epsilon: float
    noise_multiplier: float | None = None
    steps: int | None = None

    def label(self) -> str:
        return f"{super().label()}, {self.unknown} at ε {self.target_epsilon:g}"


@dataclass(frozen=True, kw_only=True)
class CheckTrial(_ModelTrial):
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
    model: str
    batch_size: int
    image_size: int | None = None
    num_classes: int | None = None
    measure: bool = False
    device: str = "cpu"
    timeout: float = 300.0

    def modules(self) -> tuple[str, ...]:
        from dpbench.models import required_modules

        # the fake mode imports torch._dynamo in its constructor, which takes a second and more; the profiler, see above
        return ("torch", "torch._inductor" if self.measure else "torch._dynamo", *required_modules(self.model))


_EPSILONS = (EpsilonTrial, SweepTrial, SchemeTrial, MapTrial)
_KINDS = (
    StepTrial,
    OverheadTrial,
    RecommendTrial,
    PeakTrial,
    LargestTrial,
    *_EPSILONS,
    CalibrationTrial,
    CheckTrial,
    ExplainTrial,
)
#: What each built-in kind runs.
BODIES = {trial.kind: trial.body for trial in _KINDS}
