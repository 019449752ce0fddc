"""Reads a TOML file of phases: successive steps of different noise, sample rate, sampling or number.

delta = 1e-5             # fields above the phases hold for all of them
dataset_size = 60_000

[[phase]]
batch_size = 256
noise_multiplier = 1.1
epochs = 10

[[phase]]
sample_rate = 0.01
noise_multiplier = 2
steps = 500
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from accounting.varying import Part
from dpbench.cli import privacy
from dpbench.errors import UsageError, one_of

#: The fields of a phase, named as the options.
FIELDS = (
    *("noise_multiplier", "sample_rate", "batch_size", "dataset_size", "max_batch_size", "steps", "epochs"),
    *("group_size", "sampling", "adjacency"),
)


def read_phases(args: argparse.Namespace) -> tuple[list[Part], str | None]:
    """(the parts, δ as typed; the command line's δ overrides the file's).

    Raises:
        UsageError: no such file, no TOML, no phases, an unknown field, or options beside the file.
        ArgumentError: a value outside its domain.
    """
    beside = {name: None if name == "sampling" else getattr(args, name) for name in FIELDS}
    if given := [f"--{name.replace('_', '-')}" for name, value in beside.items() if value is not None]:
        raise UsageError(f"either {given[0]} or phases", args.phases)
    try:
        found = tomllib.loads(Path(args.phases).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"a file of phases ({error.strerror})", args.phases) from error
    except ValueError as error:  # invalid TOML or UTF-8
        raise UsageError(f"TOML in {args.phases}", " ".join(str(error).split())) from error
    phases = found.pop("phase", [])
    if not isinstance(phases, list) or not phases or not all(isinstance(phase, dict) for phase in phases):
        raise UsageError(f"one [[phase]] at least in {args.phases}", phases)
    delta = found.pop("delta", None)
    common = _fields(found)
    parts = [privacy.part(argparse.Namespace(**_defaults() | common | _fields(phase))) for phase in phases]
    if len({mechanism.adjacency for mechanism, _ in parts}) > 1:
        raise UsageError("one adjacency in all phases", ", ".join(mechanism.adjacency for mechanism, _ in parts))
    return parts, args.delta if args.delta is not None else None if delta is None else str(delta)


def _defaults() -> dict[str, Any]:
    return dict.fromkeys(FIELDS) | {"sampling": "poisson"}


def _fields(table: dict[str, Any]) -> dict[str, str]:
    """Every value as typed after an option."""
    return {one_of("a field of a phase", name, (*FIELDS, "delta")): str(value) for name, value in table.items()}
