"""The kinds of trial: one frozen dataclass each. No torch: the parent process reads and writes these.

Functions take:
    trial: the trial, or its fields as a record describes it.
    ref: of a model, or of a backend.
    package: its name to import.
    value: as in JSON: of dicts, lists, strings, numbers, bools and None.

To add a kind in an experiment, subclass `Trial` at the top level of a module, with `kind` and `body`.
"""

from dpbench.trials.base import Trial, canonical_json
from dpbench.trials.privacy import CalibrationTrial, EpsilonTrial, MapTrial, SchemeTrial, SweepTrial, TunedTrial
from dpbench.trials.steps import (
    STEP_SOURCES,
    CheckTrial,
    ConfirmTrial,
    ExplainTrial,
    LargestTrial,
    OverheadTrial,
    PeakTrial,
    RecommendTrial,
    StepTrial,
)

__all__ = [
    "STEP_SOURCES",
    "CalibrationTrial",
    "CheckTrial",
    "ConfirmTrial",
    "EpsilonTrial",
    "ExplainTrial",
    "LargestTrial",
    "MapTrial",
    "OverheadTrial",
    "PeakTrial",
    "RecommendTrial",
    "SchemeTrial",
    "StepTrial",
    "SweepTrial",
    "Trial",
    "TunedTrial",
    "canonical_json",
]
