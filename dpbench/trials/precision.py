"""Precision profiles: in which formats of numbers a training step computes. No torch here.

A trial of a step says its profile, and ordinary training beside it runs in the same. How torch is made to obey one, and
what its switches really were, is `dpbench.measure.precision`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpbench.errors import one_of


@dataclass(frozen=True)
class Profile:
    """How a step computes.

    Attributes:
        name: as a trial, `--only precision=...` and captions say it.
        doc: what it means, in one line.
        dtype: of parameters and of floating inputs; a dtype's name in torch.
        autocast: to which dtype torch.autocast casts products around the forward pass and the losses; None for off.
        tf32: whether CUDA's products and convolutions of float32 round their operands to TF32.
    """

    name: str
    doc: str
    dtype: str
    autocast: str | None = None
    tf32: bool = False


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("float32", "all in float32, TF32 off in cuBLAS and in cuDNN", "float32"),
        Profile("tf32", "float32, whose products and convolutions round to TF32 (CUDA alone)", "float32", tf32=True),
        Profile(
            "bfloat16-autocast",
            "parameters in float32, the forward pass and the losses under torch.autocast to bfloat16",
            "float32",
            autocast="bfloat16",
        ),
        Profile("bfloat16", "parameters and inputs in bfloat16", "bfloat16"),
        Profile("float16", "parameters and inputs in float16", "float16"),
        Profile("float64", "parameters and inputs in float64", "float64"),
    )
}
#: Kinds of trial that have a profile, and once had a dtype.
STEPS = ("step", "overhead", "recommend", "peak", "largest")


def profile_of(name: str) -> Profile:
    """The profile of this name.

    Args:
        name: as a trial has it.

    Raises:
        UsageError: in one line, if there is none.
    """
    return PROFILES[one_of("a precision", name, PROFILES)]


def with_profile(trial: Mapping[str, Any]) -> Mapping[str, Any]:
    """A trial's fields with its profile, where it was recorded before there were any, and says a dtype instead.

    On CUDA float32 then ran with TF32 as torch has it by default, in convolutions alone: that is no profile.

    Args:
        trial: as a record describes it.
    """
    if trial["kind"] not in STEPS or "dtype" not in trial:
        return trial
    fields = {name: value for name, value in trial.items() if name != "dtype"}
    dtype = str(trial["dtype"])
    mixed = dtype == "float32" and trial.get("device") == "cuda"
    return fields | {"precision": "float32, TF32 in convolutions" if mixed else dtype}
