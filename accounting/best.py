"""The smallest valid upper bound of all accountants, with the certified lower bound.

The smallest of several upper bounds is an upper bound if the choice depends on public parameters only, as here.
"""

from typing import Any, ClassVar

from accounting.base import Accountant, Guarantee
from accounting.mechanism import NoAnswer, SubsampledGaussian
from accounting.registry import ACCOUNTANTS, load_accountant
from accounting.sampling import SCHEMES, Scheme


class Best(Accountant):
    """ε of the accountant with the smallest upper bound.

    The detail holds its name (`accountant`), the certified `lower` bound and the `gap` if there is one, and the
    accountants without an answer.
    """

    supports: ClassVar[frozenset[Scheme]] = SCHEMES
    composes = True

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        answers, silent = {}, {}
        for name in ACCOUNTANTS:
            if name != "best":
                try:
                    answers[name] = load_accountant(name).guarantee(mechanism, steps=steps, delta=delta)
                except NoAnswer as error:
                    silent[name] = str(error)
        valid = {name: answer for name, answer in answers.items() if answer.kind == "upper_bound"}
        if not valid:
            raise NoAnswer("; ".join(f"{name}: {reason}" for name, reason in silent.items()))
        name = min(valid, key=lambda each: valid[each].epsilon)
        found = {"accountant": name, **self._lower(mechanism, steps, delta, valid[name])}
        if silent:
            found["no_answer"] = ", ".join(silent)
        return valid[name].epsilon, found

    @staticmethod
    def _lower(mechanism: SubsampledGaussian, steps: float, delta: float, best: Guarantee) -> dict[str, float]:
        try:
            lower = load_accountant("prv:lower").epsilon(mechanism, steps=steps, delta=delta)
        except NoAnswer:
            return {}
        return {"lower": lower, "gap": best.epsilon - lower}
