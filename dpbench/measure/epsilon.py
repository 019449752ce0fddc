"""The body of an `epsilon` trial: what one accountant says, and how long it takes to say it."""

from __future__ import annotations

from typing import Any

from accounting import SubsampledGaussian, load_accountant
from dpbench.trials import EpsilonTrial


def run(trial: EpsilonTrial) -> dict[str, Any]:
    """The record's result: `epsilon` (may be infinite), `kind`, `detail`, `compute_seconds`.

    Raises:
        accounting.ArgumentError: for a value outside its domain, or an unknown accountant.
        accounting.NoAnswer: if the accountant has none here.
    """
    mechanism = SubsampledGaussian(noise_multiplier=trial.noise_multiplier, sample_rate=trial.sample_rate)
    guarantee = load_accountant(trial.accountant).guarantee(mechanism, steps=trial.steps, delta=trial.delta)
    detail = dict(guarantee.detail)
    seconds = detail.pop("seconds")
    return {"epsilon": guarantee.epsilon, "kind": guarantee.kind, "detail": detail, "compute_seconds": seconds}
