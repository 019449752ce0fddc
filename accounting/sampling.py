"""How batches are drawn, and when datasets are neighbours; the pairs under which there are proved bounds."""

from __future__ import annotations

#: How a batch is drawn: name -> words.
SAMPLINGS = {
    "poisson": "Poisson sampling",
    "truncated_poisson": "Poisson sampling, batches cut to a physical maximum",
    "balls_and_bins": "balls and bins (random allocation: each record in one batch of an epoch)",
    "without_replacement": "batches of fixed size, drawn without replacement anew each step",
    "one_pass": "one pass an epoch over fixed batches (no amplification)",
    "shuffled": "one pass an epoch over shuffled batches",
}
#: When two datasets are neighbours: name -> words.
ADJACENCIES = {
    "add_remove": "adding or removing one record",
    "zero_out": "making one record's gradient zero",
    "replace_one": "replacing one record",
}
#: Under which adjacencies bounds are proved: sampling -> names. The first is meant where none is named.
PROVED = {
    "poisson": ("add_remove", "zero_out", "replace_one"),
    "truncated_poisson": ("add_remove", "zero_out", "replace_one"),
    "balls_and_bins": ("add_remove", "zero_out", "replace_one"),
    "without_replacement": ("add_remove", "zero_out", "replace_one"),
    "one_pass": ("zero_out", "replace_one"),
    "shuffled": ("zero_out", "replace_one"),
}
#: Under which every record is in one batch of an epoch, and a step that is skipped ends it no later.
BY_EPOCH = ("balls_and_bins", "one_pass", "shuffled")
#: Why a bound is not proved, wherever one is not: adjacency -> words.
_UNPROVED = {"add_remove": "removing a record shifts every batch after it"}
#: (sampling, adjacency)
Scheme = tuple[str, str]
#: All pairs with a bound.
SCHEMES = frozenset((sampling, adjacency) for sampling, proved in PROVED.items() for adjacency in proved)
#: (ε, detail)
#: Where every accountant is at home.
HOME: Scheme = ("poisson", "add_remove")


def unproved(sampling: str, adjacency: str) -> str | None:
    """Which adjacency was expected under this sampling, and why; None if there are bounds under this one.

    Args:
        sampling: one of `SAMPLINGS`.
        adjacency: one of `ADJACENCIES`.
    """
    if (sampling, adjacency) in SCHEMES:
        return None
    return f"{' or '.join(PROVED[sampling])} with sampling {sampling} ({_UNPROVED[adjacency]})"
