"""Protect people who have several records: keep at most k records of each, and account for them as one group.

    kept = at_most(user_of_record, 4)
    engine = PrivacyEngine(model, sample_size=len(kept), group_size=4, ...)
    loader = engine.data_loader(torch.utils.data.Subset(dataset, kept))

The choice among a person's records depends on no other person's. So removing a person removes at most 4 records, and
changes nothing else. ε is for such groups (`accounting.groups`); each record is clipped by itself.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from accounting.mechanism import whole


def at_most(users: Sequence[Hashable], records: int, seed: int | None = None) -> list[int]:
    """Indices of the records to keep, ascending: a uniform choice of at most `records` of each user.

    Args:
        users: each record's user, [n].
        records: k, at least 1.
        seed: repeats the choice; from the operating system by default.

    Raises:
        ArgumentError: k is not a whole number >= 1.
    """
    most = whole("records", records, least=1)
    draw = np.random.default_rng(seed)
    own: dict[Hashable, list[int]] = {}
    for place, user in enumerate(users):
        own.setdefault(user, []).append(place)
    for user, places in own.items():
        if len(places) > most:
            own[user] = draw.choice(places, int(most), replace=False).tolist()
    return sorted(place for places in own.values() for place in places)
