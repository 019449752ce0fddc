"""The trials of an accountant: compute ε, or calibrate the noise or the number of steps to an ε."""

from dataclasses import dataclass
from typing import ClassVar

from dpbench.trials.base import Trial


@dataclass(frozen=True, kw_only=True)
class _AccountingTrial(Trial):
    """A trial of one accountant, with `sampling` to `max_batch_size` as in `accounting.SubsampledGaussian`.

    `__post_init__` fills in the default `adjacency`, so that trial and record name it.
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
        from accounting.sampling import PROVED  # imports numpy, and `list` must be fast

        if self.adjacency == "" and self.sampling in PROVED:
            object.__setattr__(self, "adjacency", PROVED[self.sampling][0])

    def modules(self) -> tuple[str, ...]:
        return ("numpy", "scipy.special", *(("dp_accounting.pld",) if self.accountant == "pld" else ()))


@dataclass(frozen=True, kw_only=True)
class EpsilonTrial(_AccountingTrial):
    """ε of `steps` steps of the subsampled Gaussian mechanism at `delta`, by one accountant."""

    kind: ClassVar[str] = "epsilon"
    body: ClassVar[str] = "dpbench.measure.epsilon:run"
    noise_multiplier: float
    steps: int

    def label(self) -> str:
        return f"{super().label()}, {self.steps} steps"


@dataclass(frozen=True, kw_only=True)
class SweepTrial(EpsilonTrial):
    """A point of curves over σ, q and δ."""

    kind: ClassVar[str] = "epsilon_sweep"


@dataclass(frozen=True, kw_only=True)
class SchemeTrial(EpsilonTrial):
    """A bar or a point in a comparison of sampling schemes; `scheme` is its name in the figure."""

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
class TunedTrial(EpsilonTrial):
    """ε of the best of `runs` expected runs, with a number of runs from `distribution`; of one run if that is ""."""

    kind: ClassVar[str] = "epsilon_tuned"
    body: ClassVar[str] = "dpbench.measure.epsilon:tuned"
    runs: int
    distribution: str

    def label(self) -> str:
        drawn = f" ({self.distribution})" if self.distribution else ""
        return f"{super().label()}, σ {self.noise_multiplier:g}, {self.runs} runs{drawn}"

    def modules(self) -> tuple[str, ...]:
        return (*super().modules(), "dp_accounting.rdp")


@dataclass(frozen=True, kw_only=True)
class CalibrationTrial(_AccountingTrial):
    """The noise multiplier, or the number of steps, that one accountant allows at `target_epsilon`.

    `unknown` is "noise_multiplier" or "steps"; the field of that name is None.
    """

    kind: ClassVar[str] = "calibration"
    body: ClassVar[str] = "dpbench.measure.epsilon:calibrate"
    unknown: str
    target_epsilon: float
    noise_multiplier: float | None = None
    steps: int | None = None

    def label(self) -> str:
        return f"{super().label()}, {self.unknown} at ε {self.target_epsilon:g}"
