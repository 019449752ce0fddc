"""The names of sampling schemes and adjacencies, and the pairs with proved bounds."""

#: Sampling schemes: name -> description.
SAMPLINGS = {
    "poisson": "Poisson sampling",
    "truncated_poisson": "Poisson sampling, batches cut to a physical maximum",
    "balls_and_bins": "balls and bins (random allocation: each record in one batch of an epoch)",
    "without_replacement": "batches of fixed size, drawn without replacement anew each step",
    "one_pass": "one pass an epoch over fixed batches (no amplification)",
    "shuffled": "one pass an epoch over shuffled batches",
}
#: Adjacencies: name -> description.
ADJACENCIES = {
    "add_remove": "adding or removing one record",
    "zero_out": "making one record's gradient zero",
    "replace_one": "replacing one record",
}
#: Adjacencies with proved bounds, by sampling. The first is the default.
PROVED = {
    "poisson": ("add_remove", "zero_out", "replace_one"),
    "truncated_poisson": ("add_remove", "zero_out", "replace_one"),
    "balls_and_bins": ("add_remove", "zero_out", "replace_one"),
    "without_replacement": ("add_remove", "zero_out", "replace_one"),
    "one_pass": ("zero_out", "replace_one"),
    "shuffled": ("zero_out", "replace_one"),
}
#: Every record is in one batch of an epoch; a skipped step does not shorten it.
BY_EPOCH = ("balls_and_bins", "one_pass", "shuffled")
#: Why there is no proved bound, by adjacency.
_UNPROVED = {"add_remove": "removing a record shifts every batch after it"}
#: (sampling, adjacency)
Scheme = tuple[str, str]
#: All pairs with a bound.
SCHEMES = frozenset((sampling, adjacency) for sampling, proved in PROVED.items() for adjacency in proved)
#: The scheme that every accountant supports.
HOME: Scheme = ("poisson", "add_remove")


def unproved(sampling: str, adjacency: str) -> str | None:
    """The adjacencies expected under this sampling, and why; None if this pair has bounds.

    Args:
        sampling: one of `SAMPLINGS`.
        adjacency: one of `ADJACENCIES`.
    """
    if (sampling, adjacency) in SCHEMES:
        return None
    return f"{' or '.join(PROVED[sampling])} with sampling {sampling} ({_UNPROVED[adjacency]})"
