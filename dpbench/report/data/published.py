"""Published values to compare with: `published.csv`, and the ε printed by Abadi et al.

Each row of the CSV has paper, figure, data set, model (as `style.model` names it), batch size, quantity, unit and the
precision of the values (exact in a table, or read off a figure); then, as in a paper's table, a column for each method.

Functions take:
    model, backend: our names.
    image_size: in pixels, or None.
    quantity: a column of the figure.
"""

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from dpbench.report import style

PAPER, BOOK_KEEPING = "arXiv:2205.10683", "arXiv:2210.00038"
# The papers' names of our backends. bk_*, vmap and microbatch are not in the figures of the first.
_METHODS = {
    "nonprivate": "Non-DP",
    "opacus_hooks": "Opacus",
    "fastgradclip": "FastGradClip",
    "ghost": "Ghost",
    "mixed_ghost": "Mixed",
}
_THROUGHPUTS = {"ghost": "Ghost", "bk_mixed": "BK-MixOpt", "opacus_hooks": "Opacus"}
#: "BK" computes every norm as a ghost norm, as both of ours do for short sequences.
_TEXT = {"nonprivate": "Non-DP", "ghost": "Ghost", "opacus_hooks": "Opacus"}
_TEXT |= dict.fromkeys(("bk_ghost", "bk_mixed", "fastdp"), "BK")
_ABOUT = ("dataset", "batch_size", "unit", "precision")
#: E2E's padded sequence length, which the figure does not print.
_TOKENS = 100
#: The memory for `Beside.max_batch`: the 40 GB GPU of arXiv:2210.00038.
BUDGET = 40 * 2**30


#: Sample rate, noise multiplier and δ of Abadi et al., Deep Learning with Differential Privacy, CCS 2016, and what
#: section 3.2 and Figure 2 print there: (accountant, epochs, ε).
ABADI = (0.01, 4.0, 1e-5)
EPSILONS = (("moments", 100, 1.26), ("moments", 400, 2.55), ("strong", 100, 9.34))


@cache
def _values() -> dict[tuple[str | None, ...], float | str]:
    """(paper, figure, model, method, quantity) -> a number, or 'OOM'."""
    text = (files("dpbench.report.data") / "published.csv").read_text(encoding="utf-8")
    found: dict[tuple[str | None, ...], float | str] = {}
    for row in csv.DictReader(text.splitlines()):
        cell = [row.pop(name) for name in ("paper", "figure", "model", "quantity")]
        methods = {name: value for name, value in row.items() if name not in _ABOUT and value}
        for method, value in methods.items():
            found[*cell[:3], method, cell[3]] = value if value == "OOM" else float(value)
    return found


def _number(*cell: str | None) -> float | None:
    value = _values().get(cell)
    return value if isinstance(value, float) else None


def value(figure: str, quantity: str, model: str, backend: str) -> float | str | None:
    """The value in arXiv:2205.10683 for our model and backend: a number, 'OOM', or None without such a cell.

    Args:
        figure: "Table 4" and the like.
    """
    return _values().get((PAPER, figure, style.model(model), _METHODS.get(backend), quantity))


def ratio(quantity: str, model: str, backend: str) -> float | str | None:
    """A cell of the paper's Table 4 over the non-private cell of the same model: a number, 'OOM', or None."""
    ours, base = (value("Table 4", quantity, model, name) for name in (backend, "nonprivate"))
    if isinstance(ours, float):
        return ours / base if isinstance(base, float) else None
    return ours


def throughput_ratio(model: str, image_size: int | None, backend: str) -> float | None:
    """Ordinary training's throughput over a method's, each at its own largest batch, in Figure 5 of arXiv:2210.00038.

    None without such a point, or for a throughput of 0, which means that a batch of one did not fit.
    """
    cell, methods = f"{style.model(model)}@{image_size}", ("Non-DP", _THROUGHPUTS.get(backend))
    base, ours = (_number(BOOK_KEEPING, "Figure 5", cell, method, "max_throughput_40GB") for method in methods)
    return base / ours if base and ours else None


class Beside(NamedTuple):
    """Published ratios of one method to ordinary training on one model; None if not shown.

    time_ratio: of seconds, or inverse of throughputs; memory_ratio: of peaks; max_batch: within `BUDGET`.
    """

    figure: str
    time_ratio: float | None = None
    memory_ratio: float | None = None
    max_batch: float | None = None


def beside(model: str, image_size: int | None, backend: str) -> Beside | None:
    """Values for this model and backend in Figure 4 of arXiv:2205.10683, or in Figure 4 or 5 of arXiv:2210.00038."""
    plain, tokens = style.without_length(model)
    name = style.model(plain)
    if tokens == _TOKENS and backend in _TEXT:
        cell = BOOK_KEEPING, "Figure 4", name, _TEXT[backend]
        base, own = _number(*cell[:3], "Non-DP", "throughput"), _number(*cell, "throughput")
        if base:
            largest = _number(*cell, "max_batch_size_40GB")
            return Beside(f"Figure 4 of {BOOK_KEEPING}", time_ratio=base / own if own else None, max_batch=largest)
    if backend == "mixed_ghost":
        ratios = [
            own / base if own and base else None
            for quantity in ("time_per_epoch", "active_memory")
            for own, base in [[_number(PAPER, "Figure 4", name, method, quantity) for method in ("Mixed", "Non-DP")]]
        ]
        if any(ratios):
            return Beside(f"Figure 4 of {PAPER}", time_ratio=ratios[0], memory_ratio=ratios[1])
    found = throughput_ratio(plain, image_size, backend)
    return None if found is None else Beside(f"Figure 5 of {BOOK_KEEPING}", time_ratio=found)
