"""The look of backends, accountants, models and outcomes, the same in every figure and table.

Colours are Okabe-Ito's and Paul Tol's, distinct under the common colour-vision deficiencies. No figure relies on colour
alone: a bar has its backend's name beside it, a line has its own marker, and hatching always means simulated memory.

Functions take:
    reference: of a model, as in trials.
    ratio: any number.
    least, most: a number outside of this range is told as a power of ten.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd

import accounting
import clipping
from accounting.registry import TUNED_RUNS
from dpbench import experiment
from dpbench.trials.whole_step import JAX_PRIVACY


class Look(NamedTuple):
    """Display name, colour and marker."""

    name: str
    color: str
    marker: str


def _looks(known: Mapping[str, Any]) -> dict[str, Look]:
    return {name: Look(info.title, info.color, info.marker) for name, info in known.items() if info.title}


#: In the order of every figure.
BACKENDS = _looks(clipping.BACKENDS)
#: Engines of other frameworks, with a sign of their own: their ratios are to that framework's plain step.
OTHER_FRAMEWORKS = {JAX_PRIVACY: Look("jax_privacy §", "#007788", "v")}
#: Backends that do not clip per sample: after all others, with a sign of their own.
OTHER_MECHANISMS = _looks(clipping.FAMILIES)
#: The meaning of the sign, for captions.
OTHER_MECHANISM = "‡ another mechanism: the mean of so many samples is clipped (TF Privacy); exact by its definition"
# How much lighter (above 0) or darker each of `clipping.VARIANTS` is; others take the shade of one of them.
_SHADES = (0.35, -0.35, 0.6, 0.12, 0.47, 0.7, -0.55)
#: Each accountant before its variants, in the order of every figure.
_EVERY = _looks({**accounting.ACCOUNTANTS, **accounting.VARIANTS, **accounting.OF_SCHEMES})
ACCOUNTANTS = {
    name: look
    for base in (*accounting.ACCOUNTANTS, *accounting.OF_SCHEMES)
    for name, look in _EVERY.items()
    if name.partition(":")[0] == base
} | _looks(TUNED_RUNS)
_UNKNOWN = ("#000000", "|")

# The words for an outcome other than `ok`, in place of a number.
OUTCOMES = {
    "oom": "out of memory",
    "over_budget": "over budget",
    "unsupported": "unsupported",
    "mismatch": "mismatch: wrong gradient",
    "timeout": "timed out",
    "crash": "crashed",
    "error": "error",
}
# The look of a line of ε, by the kind of the accountant's result.
KINDS = {
    "upper_bound": ("-", "upper bound"),
    "lower_bound": ("shade", "lower bound"),
    "estimate": (":", "estimate (not a bound)"),
    "heuristic": ("--", "heuristic (not a bound)"),
}
SOURCES = {"cuda_allocator": "CUDA allocator", "cpu_allocator": "CPU allocator", "simulated": "simulated"}
#: The source of memory that XLA plans when it compiles a step; nothing is measured.
PLANNED = "xla"

INK, FAINT, GRID, FAILURE = "#222222", "#6B6B6B", "#E4E4E4", "#A51C1C"
# Settings of every figure. The fixed salt keeps the ids in an SVG the same from run to run.
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.2,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7.8,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "hatch.linewidth": 0.9,
    "text.parse_math": False,  # texts of a record are never mathematics
    "svg.hashsalt": "dpbench",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}

# Models with options, by their reference without sequence length; patch sizes after a slash.
_GPT2 = "transformers:gpt2?n_layer=2&n_embd=256&n_head=4&vocab_size=1024"
MODELS = {
    "timm:resnet18": "timm's ResNet18",
    "timm:vit_base_patch16_224": "ViT-B/16",
    "timm:vit_tiny_patch16_224": "ViT-tiny/16",
    experiment.VIT: "ViT-tiny/4",
    experiment.ROOTLESS_VIT: "ViT-tiny/4, root frozen",
    "timm:beit_base_patch16_224?patch_size=4&embed_dim=192&num_heads=3": "BEiT 12×192/4",
    experiment.CONVNEXT: "ConvNeXt-pico/2",
    "timm:deit_tiny_patch16_224": "DeiT-tiny",
    "timm:deit_small_patch16_224": "DeiT-small",
    "timm:deit_base_patch16_224": "DeiT-base",
    "timm:convit_small": "ConViT-small",
    "timm:convit_base": "ConViT-base",
    "timm:crossvit_small_240": "CrossViT-small",
    "timm:crossvit_base_240": "CrossViT-base",
    "timm:beit_base_patch16_224": "BEiT-base",
    "timm:beit_large_patch16_224": "BEiT-large",
    "transformers:gpt2": "GPT-2",
    f"transformers:gpt2?{experiment.UNTIED}": "GPT-2, untied",
    "transformers:roberta": "RoBERTa",
    "transformers:gpt2-medium": "GPT-2 medium",
    "transformers:gpt2-large": "GPT-2 large",
    "transformers:llama-block": "Llama-7B block",
    experiment.GPT2: "GPT-2 6×384",
    experiment.UNTIED_GPT2: "GPT-2 6×384, untied",
    _GPT2: "GPT-2 2×256",
    f"{_GPT2}&{experiment.UNTIED}": "GPT-2 2×256, untied",
    experiment.BERT: "BERT 6×384",
}

_FAMILIES = {"cnn": "CNN", "mlp": "MLP", "resnet": "ResNet", "vgg": "VGG"}
_FAMILIES |= {"resnext": "ResNeXt", "wide_resnet": "Wide ResNet"}


def backend(name: str) -> Look:
    """The look of a backend; an unknown one is black under its own name.

    A variant, ``base:variant``, has the marker of its base and a shade of its colour.
    """
    if known := BACKENDS.get(name) or OTHER_FRAMEWORKS.get(name):
        return known
    base, _, variant = name.partition(":")
    look = BACKENDS.get(base) or OTHER_MECHANISMS.get(base)
    if not look or not variant:
        return Look(name, *_UNKNOWN)
    named = f" of {variant} ‡" if base in OTHER_MECHANISMS else f", {variant.replace('_', ' ')}"
    variants = list(clipping.VARIANTS)
    shade = _SHADES[(variants.index(name) if name in variants else sum(variant.encode())) % len(_SHADES)]
    return Look(look.name + named, _shade(look.color, shade), look.marker)


def is_other_mechanism(name: str) -> bool:
    """True if a backend clips anything else than each sample's gradient."""
    return name.partition(":")[0] in OTHER_MECHANISMS


def _shade(color: str, amount: float) -> str:
    """The colour moved by a share of the way to white, or to black if negative."""
    end = 255 if amount > 0 else 0
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + abs(amount) * (end - part)):02X}" for part in parts)


def accountant(name: str) -> Look:
    """The look of an accountant; an unknown one is black under its own name."""
    return ACCOUNTANTS.get(name) or Look(name, *_UNKNOWN)


def accountant_key(name: str) -> int:
    """A sort key: the order of `ACCOUNTANTS`, unknown ones last."""
    known = list(ACCOUNTANTS)
    return known.index(name) if name in known else len(known)


def model(reference: str) -> str:
    """'resnet18' -> 'ResNet18', 'timm:vit_tiny' -> 'vit_tiny', 'my/net.py:make' -> 'net.py:make', and `MODELS`.

    The sequence length of a text model follows: 'gpt2, T=128'.
    """
    builtin = re.fullmatch(r"([a-z_]+?)(\d*)", reference)
    if builtin and builtin[1] in _FAMILIES:
        return _FAMILIES[builtin[1]] + builtin[2]
    plain, tokens = without_length(reference)
    name = MODELS.get(plain) or re.sub(r"^(timm|torchvision|transformers):", "", plain).rsplit("/", 1)[-1]
    return name if tokens is None else f"{name}, T={tokens}"


def shortened(words: str, longest: int) -> str:
    """A long name with its middle left out.

    Args:
        longest: number of characters.
    """
    end = longest // 2
    return words if len(words) <= longest else f"{words[: longest - end - 1]}…{words[-end:]}"


def without_length(reference: str) -> tuple[str, int | None]:
    """(the reference without the sequence length, that length): groups the sizes of a text model."""
    plain, _, tokens = reference.partition("@") if reference.startswith("transformers:") else (reference, "", "")
    if not re.fullmatch("[0-9]{1,18}", tokens):
        return reference, None
    plain = re.sub(r"(?<=[?&])(max_position_embeddings|n_positions)=\d+(&|$)", "", plain)
    return plain.rstrip("?&"), int(tokens)


def model_key(reference: str) -> tuple[object, ...]:
    """A sort key for models: built-in ones first, by family and then by size: ResNet18 before ResNet101."""
    plain, tokens = without_length(reference)
    split = enumerate(re.split("([0-9]{1,18})", plain))  # every second one is a number
    parts = tuple((bool(i % 2), int(part) if i % 2 else part) for i, part in split)
    return (":" in reference, parts, tokens or 0)


def backend_key(name: str) -> tuple[int, int, str]:
    """A sort key: the order of `BACKENDS`, each before its variants, unknown ones next, other mechanisms last."""
    base = name.partition(":")[0]
    place = list(BACKENDS).index(base) if base in BACKENDS else len(BACKENDS) + is_other_mechanism(name)
    size = name.partition(":")[2]
    return (place, int(size) if size.isdecimal() else 0, name)


def outcome(name: str) -> str:
    """The words for an outcome."""
    return OUTCOMES.get(name, name)


def missing(value: object) -> bool:
    """True if a table's cell is empty: None, NaN, NA or the empty string."""
    return value is None or value is pd.NA or value == "" or (isinstance(value, float) and math.isnan(value))


def size(count: float) -> str:
    """Bytes for people: '16 GiB', '312 MiB'."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds for people: '1.52 s', '612 ms', '85 µs'."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return number(seconds / factor) + " " + unit
    return number(seconds / 1e-6) + " µs"


def number(value: float) -> str:
    """Three significant digits, thousands set apart: '1,500', '12.3', '0.0123'."""
    if value and abs(value) < 1000:
        return f"{value:.3g}" if abs(value) < 1e-3 else f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:,.0f}"


def times(ratio: float) -> str:
    """A ratio for people: '1.52×'."""
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×" if ratio < 99.95 else f"{ratio:.0f}×"


def setting(name: str, value: Any) -> str:
    """A field's value for people: '16 GiB', '1e-5', 'SGD'."""
    if name == "memory_budget":
        return size(value)
    return plain(value) if isinstance(value, float) else str(value)


def power(value: float, least: float, most: float) -> str:
    """'1,500', and '2e-5' outside of a range."""
    if value and not least <= abs(value) < most:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:,g}"


def middle(values: Iterable[float]) -> float:
    """The middle of the distinct values."""
    known = sorted(set(values))
    return known[len(known) // 2]


def plain(value: float) -> str:
    """A parameter as typed: '0.01', '1e-5'."""
    return f"{value:g}".replace("e-0", "e-")
