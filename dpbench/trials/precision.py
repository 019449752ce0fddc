"""Precision profiles: the number formats in which a training step computes. No torch.

A trial of a step names its profile, and ordinary training beside it uses the same. `dpbench.measure.precision` applies
a profile to torch, and reads torch's actual switches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpbench.errors import one_of


@dataclass(frozen=True)
class Profile:
    """How a step computes.

    Attributes:
        name: as in trials, `--only precision=...` and captions.
        doc: its meaning, in one line.
        dtype: of parameters and floating-point inputs; a dtype's name in torch.
        autocast: torch.autocast's dtype for the forward pass and the losses; None for off.
        tf32: whether CUDA's float32 products and convolutions round their operands to TF32.
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
#: Kinds of trial with a profile, which formerly had a dtype.
STEPS = ("step", "overhead", "recommend", "peak", "largest")


def profile_of(name: str) -> Profile:
    """Return the profile of this name.

    Args:
        name: as in a trial.

    Raises:
        UsageError: an unknown name.
    """
    return PROFILES[one_of("a precision", name, PROFILES)]


def with_profile(trial: Mapping[str, Any]) -> Mapping[str, Any]:
    """A trial's fields with its profile, if an old record names a dtype instead.

    On CUDA float32 then used TF32 in convolutions alone, torch's default, which is no profile.
    """
    if trial["kind"] not in STEPS or "dtype" not in trial:
        return trial
    fields = {name: value for name, value in trial.items() if name != "dtype"}
    dtype = str(trial["dtype"])
    mixed = dtype == "float32" and trial.get("device") == "cuda"
    return fields | {"precision": "float32, TF32 in convolutions" if mixed else dtype}
