"""The conformance cases, and how each backend should answer them."""

from collections.abc import Iterable

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

BARE_USES = (
    "expanded like the data",
    "expanded like longer data",
    "a bias changed in place",
    "a product changed in place",
    "a spectrum of a parameter",
    "a power that is a parameter",
)
CUSTOM = ("a custom function beside another use", "a custom function from the second step on")
TWICE = "a derivative of a derivative"
LATE = "samples mix: from the second step on"
MIXING = (
    LATE,
    "samples mix: statistics in training alone",
    "samples mix: a detached mean",
    "samples mix: rolled by two",
    "samples mix: rows in another order",
)
"""Backends must refuse these unless they run the model on each sample alone; the last needs a check of the graph."""
GROUPS = ("conv1d strided", "conv2d groups", "conv2d depthwise")
PADDING_MODE = ("conv2d circular", "conv2d reflect")
PADDING_IDX = ("embedding padding_idx", "embedding negative padding_idx")
HOOKS = not_for(
    (*MIXING, CUSTOM[1], TWICE, "self attention", "lstm"),
    wrong=(CUSTOM[0], "as many positions as samples", "penalised"),
)
WRONG_HOOKS = not_for((), wrong=(*PADDING_MODE, *PADDING_IDX, "bags of different sizes"))
NO_FORMULA = ("conv_transpose2d", "self attention", "prelu by the fallback", "windows")

NOT_FOR: dict[str, dict[str, str]] = {
    **dict.fromkeys(("vmap", "opake"), not_for(("lstm", "gru", "rnn", "bags of different sizes", *CUSTOM, TWICE))),
    **dict.fromkeys(TAPE, not_for((TWICE, *MIXING[:-1]))),  # rows are followed
    "opacus_hooks": HOOKS | WRONG_HOOKS,
    "opacus_functorch": HOOKS,
    "opacus_ew": not_for((*NO_FORMULA, *MIXING, *CUSTOM, "keyword inputs"), wrong=(*PADDING_IDX, TWICE)),
    "opacus_ghost": HOOKS | WRONG_HOOKS | not_for(("tied head",)),
    "private_cnn": not_for(
        (*NO_FORMULA, *MIXING, "lstm", "instance norm", "tied head", "keyword inputs", CUSTOM[1], TWICE),
        wrong=(*GROUPS, *PADDING_MODE, "conv3d everything", "penalised", CUSTOM[0]),
    ),
    "fastdp": not_for(
        (*NO_FORMULA, *MIXING, "lstm", CUSTOM[1]),
        wrong=(*GROUPS, *PADDING_MODE, "reused", "tied head", "penalised", CUSTOM[0], TWICE),
    ),
}
"""Cases that a backend "refuses", or gets "wrong" and is detected: of a peer those of `FIFTEEN` and all wrong ones.

A case that starts to pass fails its test.
"""
