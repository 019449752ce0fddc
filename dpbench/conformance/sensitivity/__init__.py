"""How far can one record move the sum that is computed? Hard records, measured in units of C on any backend.

The theorem of DP-SGD wants ‖S(D ∪ x) - S(D)‖ ≤ C of the sums that leave a backend, which are formed in floating point.
`records` holds what goes wrong there as data: norms that cancel, squares that leave the range of numbers, sums that
round, constant inputs before a normalisation. `dpbench.measure.sensitivity` runs them.

This module is for the parent process, and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpbench.trials import STEP_SOURCES, Trial
from dpbench.trials.packages import modules_of_backends

__all__ = ["DTYPES", "FAILURES", "LIMITS", "OUTCOMES", "SensitivityTrial"]

#: dtype -> the most that one record of ours may move the sum by, in units of C. Autocast: of the forward pass.
LIMITS = {"float64": 1.01, "float32": 1.01, "bfloat16-autocast": 1.05, "bfloat16": 1.05, "float16": 1.05}
DTYPES = tuple(LIMITS)
#: What is wrong: the sum moves too far, it is no number, or an error does not say which record it is about.
FAILURES = ("exceeds", "not a number", "error")
#: What can be said of a case, the worst first. Refused: the record, by its place. Unsupported: any batch of the model.
OUTCOMES = (*FAILURES, "refused", "within", "unsupported")


@dataclass(frozen=True, kw_only=True)
class SensitivityTrial(Trial):
    """All hard records on one backend, in one of `DTYPES`."""

    kind: ClassVar[str] = "sensitivity"
    body: ClassVar[str] = "dpbench.measure.sensitivity:run"
    sources: ClassVar[tuple[str, ...]] = (*STEP_SOURCES, "dpbench/conformance/**/*.py")
    backend: str
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def alone(self) -> bool:
        return False

    def modules(self) -> tuple[str, ...]:
        return ("torch", *modules_of_backends((self.backend,)))

    def label(self) -> str:
        return f"{super().label()} {self.dtype}"
