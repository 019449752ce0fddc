"""Hard records: how far one record moves a backend's computed sum, in units of C.

The theorem of DP-SGD requires ‖S(D ∪ x) - S(D)‖ ≤ C for a backend's sums, which are computed in floating point.
`records` has the hazards as data: norms that cancel, squares that overflow or underflow, sums that round, constant
inputs before a normalisation. `dpbench.measure.sensitivity` runs them.

This module is for the parent process, and imports no torch.
"""

from dataclasses import dataclass
from typing import ClassVar

from dpbench.trials import STEP_SOURCES
from dpbench.trials.backends import BackendTrial

__all__ = ["DTYPES", "FAILURES", "LIMITS", "OUTCOMES", "SensitivityTrial"]

#: dtype -> the largest allowed move of the sum by one record, in units of C. Autocast: of the forward pass.
LIMITS = {"float64": 1.01, "float32": 1.01, "bfloat16-autocast": 1.05, "bfloat16": 1.05, "float16": 1.05}
DTYPES = tuple(LIMITS)
#: Failures: the sum moves too far, it is no number, or an error does not name its record.
FAILURES = ("exceeds", "not a number", "error")
#: Results of a case, the worst first. Refused: the record, by its place. Unsupported: any batch of the model.
OUTCOMES = (*FAILURES, "refused", "within", "unsupported")


@dataclass(frozen=True, kw_only=True)
class SensitivityTrial(BackendTrial):
    """All hard records on one backend, in one of `DTYPES`."""

    kind: ClassVar[str] = "sensitivity"
    body: ClassVar[str] = "dpbench.measure.sensitivity:run"
    sources: ClassVar[tuple[str, ...]] = (*STEP_SOURCES, "dpbench/conformance/**/*.py")
    dtype: str = "float32"
    device: str = "cpu"

    def label(self) -> str:
        return f"{super().label()} {self.dtype}"
