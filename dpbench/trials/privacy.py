"""The kinds of trial that ask an accountant: of ε, or of the noise or the steps that an ε allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpbench.trials.base import Trial


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
        from accounting.sampling import PROVED  # brings numpy, and `list` answers at once

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
class TunedTrial(EpsilonTrial):
    """The best of `runs` runs on average, their number drawn by `distribution`; of one run where that is ""."""

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
