"""Run `epsilon` and `calibration` trials: one accountant's result, and its compute time."""

import contextlib
from typing import Any

import accounting
from accounting import Accountant, Guarantee, NoAnswer, SubsampledGaussian, load_accountant
from accounting.tuned import Tuned
from dpbench.trials import CalibrationTrial, EpsilonTrial, TunedTrial

#: Repeat a quick computation up to _TIMES or for _ENOUGH seconds: the first includes one-time costs of the process.
_TIMES, _ENOUGH = 4, 0.5


def run(trial: EpsilonTrial) -> dict[str, Any]:
    """The record's result: `epsilon` (may be infinite), `kind`, `detail`, `compute_seconds`, `all_seconds`.

    The first time is of this result. Each repetition takes one step more, since some accountants cache a result.

    Raises:
        accounting.ArgumentError: for a value outside its domain, or an unknown accountant.
        accounting.NoAnswer: if the accountant has none here.
    """
    return _timed(load_accountant(trial.accountant), trial)


def tuned(trial: TunedTrial) -> dict[str, Any]:
    """As `run`; if `distribution` is named, ε of the best of several runs.

    Raises:
        accounting.ArgumentError: for a value outside its domain.
        accounting.NoAnswer: if there is none here.
    """
    if not trial.distribution:
        return run(trial)
    return _timed(Tuned(trial.runs, trial.distribution), trial)


def _timed(accountant: Accountant, trial: EpsilonTrial) -> dict[str, Any]:
    mechanism = SubsampledGaussian(
        noise_multiplier=trial.noise_multiplier, sample_rate=trial.sample_rate, **_scheme(trial)
    )
    answer = accountant.guarantee(mechanism, steps=trial.steps, delta=trial.delta)
    seconds = [answer.detail["seconds"]]
    with contextlib.suppress(NoAnswer):  # a repetition has more steps than the trial
        while len(seconds) < _TIMES and sum(seconds) < _ENOUGH:
            again = accountant.guarantee(mechanism, steps=trial.steps + len(seconds), delta=trial.delta)
            seconds.append(again.detail["seconds"])
    return _told(answer) | {"compute_seconds": min(seconds), "all_seconds": seconds}


def calibrate(trial: CalibrationTrial) -> dict[str, Any]:
    """As `run`, for the largest ε within the target; also `value` of the unknown, `steps`, `evaluations`.

    A number of steps is exact; a noise multiplier has a relative error of at most 1e-4.

    Raises:
        accounting.ArgumentError: for a value outside its domain, or an unknown accountant.
        accounting.NoAnswer: if the target cannot be met, or the accountant has no answer.
    """
    given = {"noise_multiplier": trial.noise_multiplier, "sample_rate": trial.sample_rate, "steps": trial.steps}
    answer = accounting.calibrate(
        load_accountant(trial.accountant),
        trial.unknown,
        target_epsilon=trial.target_epsilon,
        delta=trial.delta,
        tolerance=0.0 if trial.unknown == "steps" else 1e-4,
        **{name: value for name, value in given.items() if value is not None},
        **_scheme(trial),
    )
    return _told(answer.guarantee) | {"value": answer.value, "steps": answer.steps, "evaluations": answer.evaluations}


def _scheme(trial: EpsilonTrial | CalibrationTrial) -> dict[str, Any]:
    return {name: getattr(trial, name) for name in ("sampling", "adjacency", "dataset_size", "max_batch_size")}


def _told(answer: Guarantee) -> dict[str, Any]:
    detail = {name: value for name, value in answer.detail.items() if name != "seconds"}
    return {"epsilon": answer.epsilon, "kind": answer.kind, "detail": detail}
