"""Published values that lie beside the measured ones: `published.csv`, and the ε that Abadi et al. printed.

Each row of the CSV names paper, figure, data set, model, method, batch size, quantity, value, unit, and how precisely
the value is known (exact in a table, or read off a figure).
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from dpbench.report import style

PAPER = "arXiv:2205.10683"
# The paper's names for what we name otherwise. bk_*, vmap and microbatch are not in its figures.
_METHODS = {
    "nonprivate": "Non-DP",
    "opacus_hooks": "Opacus",
    "fastgradclip": "FastGradClip",
    "ghost": "Ghost",
    "mixed_ghost": "Mixed",
}
BOOK_KEEPING = "arXiv:2210.00038"
_THROUGHPUTS = {"ghost": "Ghost", "bk_mixed": "BK-MixOpt", "opacus_hooks": "Opacus"}
_MODELS = {"cnn": "CNN 0.551M"}


class EpsilonPoint(NamedTuple):
    """A published ε at (sample_rate, noise_multiplier, delta)."""

    accountant: str
    setting: tuple[float, float, float]
    epochs: float
    epsilon: float
    label: str


_ABADI = (0.01, 4.0, 1e-5)
# Abadi et al., Deep Learning with Differential Privacy, CCS 2016, section 3.2 and Figure 2.
EPSILONS = (
    EpsilonPoint("moments", _ABADI, 100, 1.26, "1.26"),
    EpsilonPoint("moments", _ABADI, 400, 2.55, "2.55"),
    EpsilonPoint("strong", _ABADI, 100, 9.34, "9.34"),
)


@cache
def _values() -> dict[tuple[str, str, str, str, str], str]:
    text = (files("dpbench.report") / "published.csv").read_text(encoding="utf-8")
    return {
        (row["paper"], row["figure"], row["model"], row["method"], row["quantity"]): row["value"]
        for row in csv.DictReader(text.splitlines())
    }


def value(figure: str, quantity: str, model: str, backend: str) -> float | str | None:
    """What arXiv:2205.10683 printed for our model and backend: a number, 'OOM', or None where it has no such cell."""
    method = _METHODS.get(backend)
    if method is None:
        return None
    text = _values().get((PAPER, figure, _MODELS.get(model, style.model(model)), method, quantity))
    return text if text is None or text == "OOM" else float(text)


def throughput_ratio(model: str, image_size: int, backend: str) -> float | None:
    """Ordinary training's throughput over a method's, each at its own largest batch, in Figure 5 of arXiv:2210.00038.

    None where it has no such point, or a throughput of 0, which stands for a batch of one that did not fit.
    """
    name = f"{style.model(model)}@{image_size}"
    texts = [
        _values().get((BOOK_KEEPING, "Figure 5", name, method, "max_throughput_40GB"))
        for method in ("Non-DP", _THROUGHPUTS.get(backend, ""))
    ]
    base, ours = (0.0 if text is None else float(text) for text in texts)
    return base / ours if base and ours else None


def ratio(quantity: str, model: str, backend: str) -> float | str | None:
    """A cell of the paper's Table 4 over the non-private cell of the same model: a number, 'OOM', or None."""
    ours, base = (value("Table 4", quantity, model, name) for name in (backend, "nonprivate"))
    if isinstance(ours, float) and isinstance(base, float):
        return ours / base
    return ours if ours == "OOM" else None
