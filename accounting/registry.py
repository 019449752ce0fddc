"""All accountants by name, with a one-line description and the style for figures. Add a row for a new one."""

import difflib
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from accounting.base import Accountant
from accounting.mechanism import ArgumentError


class AccountantInfo(NamedTuple):
    """The description of an accountant, available without importing it.

    Attributes:
        reference: module:class.
        doc: one line.
        title, color, marker: in figures; an empty title is the name, and an empty color black.
        arguments: of the class.
    """

    reference: str
    doc: str
    title: str = ""
    color: str = ""
    marker: str = ""
    arguments: Mapping[str, str] = MappingProxyType({})


ACCOUNTANTS: dict[str, AccountantInfo] = {
    "simple": AccountantInfo(
        "accounting.simple:Simple",
        "ε adds up over the steps (exact Gaussian step, exact amplification)",
        "simple composition",
        "#7F7F7F",
        "s",
    ),
    "strong": AccountantInfo(
        "accounting.strong:Strong",
        "strong composition (Dwork, Rothblum and Vadhan 2010), best split of δ",
        "strong composition",
        "#CC3311",
        "^",
    ),
    "moments": AccountantInfo(
        "accounting.moments:Moments",
        "moments accountant (Abadi et al. 2016), orders 1 to 32",
        "moments",
        "#2266AA",
        "o",
    ),
    "rdp": AccountantInfo(
        "accounting.rdp:Rdp",
        "Rényi differential privacy, best order of all, improved conversion",
        "RDP",
        "#44BB99",
        "D",
    ),
    "gdp": AccountantInfo(
        "accounting.gdp:Gdp",
        "Gaussian limit of many steps: an estimate (exact at sample rate 1)",
        "GDP",
        "#DDAA33",
        "v",
    ),
    "prv": AccountantInfo(
        "accounting.prv:Prv", "numerical composition, certified from both sides: the upper bound", "PRV", "#AA4499", "P"
    ),
    "pld": AccountantInfo(
        "accounting.pld:Pld", "privacy loss distribution of dp-accounting, connect-the-dots", "PLD", "#117733", "X"
    ),
    "best": AccountantInfo(
        "accounting.best:Best",
        "the smallest valid upper bound of all, beside the certified lower bound",
        "best valid bound",
        "#222222",
        "*",
    ),
}
#: name:variant -> description. `load_accountant` loads them; they are not listed.
VARIANTS: dict[str, AccountantInfo] = {
    "strong:exact": AccountantInfo(
        "accounting.strong:Strong",
        "with the exact Gaussian step everywhere",
        "strong, exact Gaussian step",
        "#EE7733",
        "<",
        arguments={"step": "exact"},
    ),
    "strong:published": AccountantInfo(
        "accounting.strong:Published",
        "as published in 2016: a heuristic, not an upper bound",
        "strong, as published in 2016",
        "#882255",
        "x",
    ),
    "strong:kov": AccountantInfo(
        "accounting.optimal_composition:Optimal", "optimal composition (Kairouz, Oh and Viswanath 2015)"
    ),
    "rdp:classic": AccountantInfo(
        "accounting.rdp:Rdp", "with the conversion of 2017, as in older tools", arguments={"conversion": "classic"}
    ),
    "rdp:whole": AccountantInfo("accounting.rdp:Whole", "with whole orders only; valid for discrete noise, too"),
    "prv:estimate": AccountantInfo(
        "accounting.prv:Estimate", "between its bounds, where the truth most likely is", "PRV", "#EE99AA", "p"
    ),
    "prv:lower": AccountantInfo(
        "accounting.prv:Lower", "its certified lower bound", "certified lower bound", "#6B6B6B", "|"
    ),
}
#: For one sampling scheme each. `load_accountant` loads them; they are not listed.
OF_SCHEMES: dict[str, AccountantInfo] = {
    "without_replacement": AccountantInfo(
        "accounting.without_replacement:WithoutReplacement",
        "Rényi bound of fixed batches, replacing one record (Wang, Balle and Kasiviswanathan 2019)",
        "Rényi, without replacement",
        "#332288",
        "d",
    ),
    "shuffled": AccountantInfo(
        "accounting.shuffled:ShuffledLowerBound",
        "certified lower bound of shuffled batches (Chua et al. 2024)",
        "certified lower bound, shuffled",
        "#6B6B6B",
        "|",
    ),
}


#: Styles of tuned runs (`accounting.tuned`) in figures, by distribution.
TUNED_RUNS: dict[str, AccountantInfo] = {
    f"tuned:{name}": AccountantInfo("accounting.tuned:Tuned", "", f"number of runs {name}", color, marker)
    for name, color, marker in (
        ("poisson", "#CC3311", "s"),
        ("geometric", "#2266AA", "o"),
        ("logarithmic", "#44BB99", "D"),
    )
}


def load_accountant(name: str) -> Accountant:
    """Load an accountant of `ACCOUNTANTS` or `OF_SCHEMES`, or a ``"name:variant"`` of `VARIANTS`.

    Args:
        name: such as "prv" or "rdp:classic".

    Raises:
        ArgumentError: unknown name; a one-line ValueError with all names, and the nearest.
    """
    known = {**ACCOUNTANTS, **VARIANTS, **OF_SCHEMES}
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"to be {close[0]!r}, or another " if close else "to be "
        raise ArgumentError("accountant", f"{hint}one of {', '.join(known)}", name)
    module, _, attribute = known[name].reference.partition(":")
    accountant: Accountant = getattr(importlib.import_module(module), attribute)(**known[name].arguments)
    return accountant
