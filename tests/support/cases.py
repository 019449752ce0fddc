"""The conformance cases, and how each backend should answer them."""

from __future__ import annotations

from collections.abc import Iterable

from dpbench.conformance.cases import (
    BATCH,
    CASES,
    Case,
    cross_entropy,
    images,
    squared_error,
    tokens,
)
from dpbench.conformance.modules import HeadFirst, Reused, Skipping, Tied

__all__ = [
    "BATCH",
    "CASES",
    "FIFTEEN",
    "NOT_FOR",
    "PEERS",
    "Case",
    "HeadFirst",
    "Reused",
    "Skipping",
    "Tied",
    "cross_entropy",
    "images",
    "squared_error",
    "tokens",
]


FIFTEEN = (
    "linear 3-D",
    "conv2d groups",
    "conv2d circular",
    "conv_transpose2d",
    "instance norm",
    "layer norm over positions",
    "embedding padding_idx",
    "tied head",
    "self attention",
    "lstm",
    "windows",
    "keyword inputs",
    "frozen first layer",
    "hidden state with a gradient",
    "prelu by the fallback",
)
"""A case of each kind of rule, and of each thing that a backend itself has to see to."""


def not_for(refuses: Iterable[str], wrong: Iterable[str] = ()) -> dict[str, str]:
    return dict.fromkeys(refuses, "refuses") | dict.fromkeys(wrong, "wrong")


TAPE = ("fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed")
PEERS = ("opacus_hooks", "opacus_functorch", "opacus_ew", "opacus_ghost", "private_cnn", "fastdp", "opake")

BAGS = ("bag of words", "bag of words mean", "bag of words padding_idx")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
ATTENTION = ("self attention", "sequence first attention", "cross attention")
RECURRENT = ("lstm", "gru", "rnn")
BARE = ("vision transformer's parameters", "positions added in place")
NO_BATCH = ("positions", "types without a batch")
SEQUENCE_FIRST = ("sequence first", "as many steps as samples", "encoder, sequence first")
SAME = ("conv2d same", "conv2d same even kernel", "conv2d valid")
PADDING_MODE = ("conv2d circular", "conv2d reflect")
PADDING_IDX = ("embedding padding_idx", "embedding negative padding_idx")
GROUPS = ("conv1d strided", "conv2d groups", "conv2d depthwise")
BARE_USES = (
    "expanded like the data",
    "expanded like longer data",
    "a bias changed in place",
    "a product changed in place",
    "a spectrum of a parameter",
    "a power that is a parameter",
)
CUSTOM = ("a custom function beside another use", "a custom function from the second step on")
HIDDEN = (*CUSTOM, "a derivative of a derivative")
LATE = "samples mix: from the second step on"
MIXING = (
    "samples mix: statistics in training alone",
    "samples mix: a detached mean",
    "samples mix: rolled by two",
    "samples mix: rows in another order",
)
"""Backends must refuse these unless they run the model on each sample alone; the last needs a check of the graph."""
HOOKED = (
    *MIXING,
    "a custom function from the second step on",
    "a derivative of a derivative",
    "a bias changed in place",
)
HOOKED_WRONG = ("a custom function beside another use", LATE)
FULL_HOOKS = (
    "residual in place",
    "encoder, sequence first",
    "batch norm in eval mode",
    *BAGS,
    *BARE,
    *NO_BATCH,
    *ATTENTION,
    *RECURRENT,
)
NO_FORMULA = (*BAGS, *TRANSPOSED, *BARE, *NO_BATCH, *ATTENTION, "rms norm", "prelu by the fallback")
NO_FORMULA = (
    *NO_FORMULA,
    "bags of different sizes",
    "batch norm in eval mode",
    "weight norm",
    "shared across depth",
    "embedding of one id",
)

NOT_FOR: dict[str, dict[str, str]] = {
    **dict.fromkeys(("vmap", "opake"), not_for((*RECURRENT, "bags of different sizes", *HIDDEN))),
    **dict.fromkeys(TAPE, not_for((*HIDDEN, *MIXING[:-1], LATE))),  # they follow reordered rows
    "opacus_hooks": not_for(
        (*FULL_HOOKS, *HOOKED, "layer norm without bias"),
        wrong=(
            *PADDING_MODE,
            *PADDING_IDX,
            *HOOKED_WRONG,
            "bags of different sizes",
            "as many positions as samples",
            "penalised",
        ),
    ),
    "opacus_functorch": not_for(
        (*FULL_HOOKS, *HOOKED, "bags of different sizes"),
        wrong=(*HOOKED_WRONG, "as many positions as samples", "penalised"),
    ),
    "opacus_ew": not_for(
        (
            *NO_FORMULA,
            *SEQUENCE_FIRST,
            *MIXING,
            *CUSTOM,
            *BARE_USES,
            "conv3d everything",
            "keyword inputs",
            "as many positions as samples",
            "windows",
            "penalised",
        ),
        wrong=(*PADDING_IDX, "a derivative of a derivative", LATE),
    ),
    "opacus_ghost": not_for(
        (*FULL_HOOKS, *HOOKED, "layer norm without bias", "linear 4-D no bias", "reused", "tied head"),
        wrong=(
            *PADDING_MODE,
            *PADDING_IDX,
            *HOOKED_WRONG,
            "bags of different sizes",
            "as many positions as samples",
            "penalised",
        ),
    ),
    "private_cnn": not_for(
        (
            *NO_FORMULA,
            *SAME,
            *RECURRENT,
            "layer norm without bias",
            "linear 4-D no bias",
            "instance norm",
            "windows",
            "reused",
            "tied head",
            "keyword inputs",
            "positional inputs",
            "as many positions as samples",
        ),
        wrong=(*GROUPS, *PADDING_MODE, "conv3d everything", "penalised"),
    ),
    "fastdp": not_for(
        (
            *NO_FORMULA,
            *SAME,
            *RECURRENT,
            "conv3d",
            "conv3d everything",
            "windows",
            "as many positions as samples",
            "head registered first",
        ),
        wrong=(*GROUPS, *PADDING_MODE, "reused", "tied head", "penalised"),
    ),
}
"""Cases that a backend "refuses", or gets "wrong" and is detected. A case that starts to pass fails its test."""
