"""Privacy of people who have several records: at most so many of each are kept, and they count as one group.

    kept = at_most(user_of_record, 4)
    engine = PrivacyEngine(model, sample_size=len(kept), group_size=4, ...)
    loader = engine.data_loader(torch.utils.data.Subset(dataset, kept))

Which records of a person are kept depends on no other person's: to remove a person removes 4 records at most, and
changes nothing else; ε is of such groups (`accounting.groups`), in which each record is clipped by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from accounting.mechanism import whole


def at_most(users: Sequence[Hashable], records: int, seed: int | None = None) -> list[int]:
    """The places of the records that are kept, rising: of each user a uniform choice of `records` at most.

    Args:
        users: whose each record is, [n].
        records: k, at least 1.
        seed: to choose the same again; of the operating system by default.

    Raises:
        ArgumentError: k is no whole number >= 1.
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
