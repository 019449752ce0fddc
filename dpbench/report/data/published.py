"""Published values to compare with: `published.csv`, and the ε printed by Abadi et al.

Each row of the CSV has paper, figure, data set, model, method, batch size, quantity, value, unit, and the precision of
the value (exact in a table, or read off a figure).

Functions take:
    model, backend: our names.
    image_size: in pixels, or None.
    quantity: a column of the figure.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from dpbench.report import style

PAPER = "arXiv:2205.10683"
# The paper's names, if they differ from ours. bk_*, vmap and microbatch are not in its figures.
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
def _values() -> dict[tuple[str | None, ...], str]:
    text = (files("dpbench.report.data") / "published.csv").read_text(encoding="utf-8")
    fields = ("paper", "figure", "model", "method", "quantity")
    return {tuple(row[name] for name in fields): row["value"] for row in csv.DictReader(text.splitlines())}


def _number(*cell: str | None) -> float | None:
    """The number at (paper, figure, model, method, quantity), all in the paper's names."""
    text = _values().get(cell)
    return None if text is None or text == "OOM" else float(text)


def value(figure: str, quantity: str, model: str, backend: str) -> float | str | None:
    """The value in arXiv:2205.10683 for our model and backend: a number, 'OOM', or None without such a cell.

    Args:
        figure: "Table 4" and the like.
    """
    cell = (PAPER, figure, _MODELS.get(model, style.model(model)), _METHODS.get(backend), quantity)
    return "OOM" if _values().get(cell) == "OOM" else _number(*cell)


def ratio(quantity: str, model: str, backend: str) -> float | str | None:
    """A cell of the paper's Table 4 over the non-private cell of the same model: a number, 'OOM', or None."""
    ours, base = (value("Table 4", quantity, model, name) for name in (backend, "nonprivate"))
    if isinstance(ours, float) and isinstance(base, float):
        return ours / base
    return ours if ours == "OOM" else None


def throughput_ratio(model: str, image_size: int, backend: str, named: str | None = None) -> float | None:
    """Ordinary training's throughput over a method's, each at its own largest batch, in Figure 5 of arXiv:2210.00038.

    None without such a point, or for a throughput of 0, which means that a batch of one did not fit.

    Args:
        named: the figure's name of the model, if it differs from ours.
    """
    name = f"{named or style.model(model)}@{image_size}"
    methods = ("Non-DP", _THROUGHPUTS.get(backend))
    base, ours = (_number(BOOK_KEEPING, "Figure 5", name, method, "max_throughput_40GB") for method in methods)
    return base / ours if base and ours else None


class Beside(NamedTuple):
    """Published ratios of one method to ordinary training on one model; None if not shown.

    time_ratio: of seconds, or inverse of throughputs; memory_ratio: of peaks; max_batch: within `BUDGET`.
    """

    figure: str
    time_ratio: float | None = None
    memory_ratio: float | None = None
    max_batch: float | None = None


#: The memory for `max_batch`: the 40 GB GPU of arXiv:2210.00038.
BUDGET = 40 * 2**30
_VISION = {
    "timm:deit_tiny_patch16_224": "DeiT-tiny",
    "timm:deit_small_patch16_224": "DeiT-small",
    "timm:deit_base_patch16_224": "DeiT-base",
    "timm:convit_small": "ConViT-small",
    "timm:convit_base": "ConViT-base",
    "timm:crossvit_small_240": "CrossViT-small",
    "timm:crossvit_base_240": "CrossViT-base",
    "timm:beit_base_patch16_224": "BEiT-base",
    "timm:beit_large_patch16_224": "BEiT-large",
}
#: At E2E's padded sequence length, which the figure does not print.
_TEXT = {f"transformers:gpt2{size}": f"GPT2{size}" for size in ("", "-medium", "-large")}
_TOKENS = 100
_BY_SIZE = {"vgg11": "VGG11", "timm:beit_large_patch16_224": "BEiT-large"}
#: Its "BK" computes every norm as a ghost norm, as both of ours do for short sequences.
_BOOK_KEEPING = {
    "nonprivate": "Non-DP",
    "ghost": "Ghost",
    "bk_ghost": "BK",
    "bk_mixed": "BK",
    "fastdp": "BK",
    "opacus_hooks": "Opacus",
}


def beside(model: str, image_size: int | None, backend: str) -> Beside | None:
    """Values for this model and backend in Figure 4 of arXiv:2205.10683, or in Figure 4 or 5 of arXiv:2210.00038."""
    plain, tokens = style.without_length(model)
    if plain in _TEXT and backend in _BOOK_KEEPING and tokens == _TOKENS:
        name, method, figure = _TEXT[plain], _BOOK_KEEPING[backend], f"Figure 4 of {BOOK_KEEPING}"
        own, base = (_number(BOOK_KEEPING, "Figure 4", name, m, "throughput") for m in (method, "Non-DP"))
        largest = _number(BOOK_KEEPING, "Figure 4", name, method, "max_batch_size_40GB")
        return Beside(figure, time_ratio=base / own if base and own else None, max_batch=largest)
    if plain in _VISION and backend == "mixed_ghost":
        time, memory = (
            [_number(PAPER, "Figure 4", _VISION[plain], method, quantity) for method in ("Mixed", "Non-DP")]
            for quantity in ("time_per_epoch", "active_memory")
        )
        ratios = [own / base if own and base else None for own, base in (time, memory)]
        return Beside(f"Figure 4 of {PAPER}", time_ratio=ratios[0], memory_ratio=ratios[1])
    if plain in _BY_SIZE and image_size is not None:
        found = throughput_ratio(plain, image_size, backend, _BY_SIZE[plain])
        return None if found is None else Beside(f"Figure 5 of {BOOK_KEEPING}", time_ratio=found)
    return None


FLASH_DP = "arXiv:2507.01154"
FLASH_NORM = "github.com/JackyXiao98/opacus@765f5b4"


class Alone(NamedTuple):
    """A published time ratio to ordinary training, of a method that no backend here is."""

    source: str
    model: str
    method: str
    time_ratio: float


def alone() -> list[Alone]:
    """Ratios that stand in a row of their own: FlashNorm's on GPT-2, which is exact, and FlashDP's, which is not."""
    found = [
        Alone(FLASH_NORM, f"transformers:gpt2@{tokens}", f"flashnorm{after.replace(' BK', '_bk')}", value)
        for tokens in (4096, 32768)
        for after in ("", " BK")
        if (value := _number(FLASH_NORM, "README", f"GPT-2 T={tokens}", f"FlashNorm{after}", "time_ratio"))
    ]
    speed = _number(FLASH_DP, "Abstract", "Llama-13B", "FlashDP", "throughput_ratio")
    return found + ([Alone(FLASH_DP, "Llama-13B", "flashdp", 1 / speed)] if speed else [])
