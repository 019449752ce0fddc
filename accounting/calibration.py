"""Find the noise, the steps, the epochs or the sample rate at which T steps have a target ε at δ, or a target risk.

See `accounting.inverse` for the method and its tightness.

Functions take:
    accountant: an accountant or its name.
    target_epsilon: the largest ε allowed.
    noise_multiplier, sample_rate, steps, delta: σ, q in (0, 1], T, δ in (0, 1]: all but the unknown are given.
"""

import math
from dataclasses import replace
from typing import Any

from accounting.base import Accountant
from accounting.inverse import UNKNOWNS, Calibration, Problem
from accounting.mechanism import ArgumentError, SubsampledGaussian, real, within
from accounting.registry import load_accountant

__all__ = ["UNKNOWNS", "Calibration", "calibrate", "calibrate_noise_multiplier"]


def calibrate(
    accountant: Accountant | str,
    unknown: str,
    *,
    target_epsilon: float | None = None,
    target_advantage: float | None = None,
    target_tpr: float | None = None,
    fpr: float = 0.01,
    delta: float,
    noise_multiplier: float = 1.0,
    sample_rate: float = 1.0,
    steps: float = 1,
    tolerance: float = 1e-3,
    **scheme: Any,
) -> Calibration:
    """The smallest noise multiplier, or the largest number of steps or epochs or sample rate, within the target.

    The target may be a risk (`accounting.risk`) instead of ε; the result then also has the ε.

    Args:
        unknown: one of `UNKNOWNS`; the argument of this name is ignored.
        target_epsilon: a finite number > 0; or one of the next two.
        target_advantage: of every attack on membership, in (0, 1).
        target_tpr: its true positive rate at the false positive rate `fpr`, in (fpr, 1).
        fpr: in (0, 1).
        tolerance: relative; see `accounting.inverse`. 0: to the last step, or to 1e-12.
        scheme: `sampling`, `adjacency`, `dataset_size` and `max_batch_size` of `SubsampledGaussian`.

    Raises:
        ArgumentError: a one-line ValueError that names the argument.
        NoAnswer: no value meets the target, or every value does; or the accountant has no bound here.
    """
    if unknown not in UNKNOWNS:
        raise ArgumentError("unknown", f"to be one of {', '.join(UNKNOWNS)}", unknown)
    targets = {"epsilon": target_epsilon, "advantage": target_advantage, "tpr": target_tpr}
    named = [name for name, value in targets.items() if value is not None]
    if len(named) != 1:
        raise ArgumentError("one target", "out of target_epsilon, target_advantage, target_tpr", named)
    target = real(f"target_{named[0]}", "to be a finite number > 0", targets[named[0]])
    if not 0 < target < math.inf:
        raise ArgumentError(f"target_{named[0]}", "to be a finite number > 0", targets[named[0]])
    within("delta", delta)
    if not 0 <= real("tolerance", "in [0, 1)", tolerance) < 1:
        raise ArgumentError("tolerance", "in [0, 1)", tolerance)
    if isinstance(accountant, str):
        accountant = load_accountant(accountant)
    given = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, **scheme}
    given |= {unknown: 1.0} if unknown in given else {}
    mechanism = SubsampledGaussian(**given)
    if target_epsilon is not None:
        return Problem(accountant, unknown, mechanism, steps, delta, target).solve(float(tolerance))
    if not accountant.plain:
        raise ArgumentError("target_epsilon", f"with {type(accountant).__name__}, which has no risk of its own", None)
    from accounting.membership import Risk, of_upper_bound  # imports scipy, which is slow

    meter = Risk(None if named[0] == "advantage" else fpr)
    problem = Problem(meter, unknown, mechanism, steps, delta, target, mu=meter.mu(target), symbol=meter.words)
    found = problem.solve(float(tolerance))
    spent = of_upper_bound(accountant.guarantee(found.mechanism, steps=found.steps, delta=delta))
    return replace(found, guarantee=replace(spent, detail={**spent.detail, named[0]: found.guarantee.epsilon}))


def calibrate_noise_multiplier(
    accountant: Accountant | str, *, target_epsilon: float, sample_rate: float, steps: float, delta: float, **more: Any
) -> float:
    """The smallest noise multiplier whose ε is at most the target; `more` arguments as for `calibrate`."""
    given = {"target_epsilon": target_epsilon, "sample_rate": sample_rate, "steps": steps, "delta": delta}
    return calibrate(accountant, "noise_multiplier", **given, **more).value
