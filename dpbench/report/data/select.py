"""Selects the records of a figure: one device, the newest of each trial and round, one setting.

No record is dropped silently: records left out are counted by reason, and the caption gives the counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from dpbench.records.reader import LeftOut, Record, by_device, grouped, newest, newest_trial, newest_version, read

__all__ = ["LeftOut", "Record", "by_device", "facets", "grouped", "kept", "newest", "newest_trial", "read"]


def kept(records: Sequence[Record], cell: Callable[[Record], Hashable], left_out: LeftOut) -> list[Record]:
    """The records of a figure: the newest of each trial and round, of the newest version of each cell.

    Args:
        cell: from a record to its cell.
    """
    return newest_version(newest(records, left_out), cell, left_out)


def facets(
    records: Sequence[Record], fields: Mapping[str, Sequence[str]]
) -> Iterator[tuple[dict[str, Any], list[Record]]]:
    """Split records so that each part has one value of every field: (the part's distinguishing values, its records).

    A record of a kind to which a field does not apply, or with None in that field, belongs to every part. Only fields
    with several values appear in the dict.

    Args:
        fields: field -> kinds of trial to which it applies.
    """
    settings = [tuple(r.setting(f) if r.kind in kinds else None for f, kinds in fields.items()) for r in records]
    distinct = set(settings)
    columns = [{setting[place] for setting in distinct} - {None} for place in range(len(fields))]
    values = [sorted(found, key=lambda value: (str(type(value)), value)) or [None] for found in columns]
    parts: dict[frozenset[Any], dict[str, Any]] = {}
    for chosen in itertools.product(*values):
        part = frozenset(s for s in distinct if all(own in (None, one) for own, one in zip(s, chosen, strict=True)))
        if part and not any(part < other for other in parts):
            parts = {other: label for other, label in parts.items() if not other < part}
            named = zip(fields, chosen, values, strict=True)
            parts.setdefault(part, {field: one for field, one, several in named if len(several) > 1})
    for part, label in parts.items():
        yield label, [record for record, setting in zip(records, settings, strict=True) if setting in part]
