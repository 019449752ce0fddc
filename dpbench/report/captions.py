"""The sentences that all captions have: device, setting, records left out, mixed versions; and those of several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from dpbench.records.conditions import warnings
from dpbench.records.reader import PAIRED, LeftOut, Record, grouped
from dpbench.report import style
from dpbench.trials.packages import modules_of_backends


def whole(said: Sequence[str], records: Sequence[Record], left_out: LeftOut, setting: bool) -> str:
    """A caption: a paragraph of its own sentences, and those of every figure. Each warning is a line.

    Args:
        setting: whether torch, threads and precision matter to the numbers.
    """
    own = [words for words in said if not words.startswith("Warning:")]
    if any(map(style.is_other_mechanism, {name for record in records for name in backends_of(record)})):
        own.append(f"{style.OTHER_MECHANISM}.")
    left = [f"{count} {reason}" for reason, count in sorted(left_out.items()) if count]
    versions, older = mixed_versions(records)
    folder = max(records, key=lambda record: record.utc).environment.get("results_folder")
    lines = [
        " ".join(own),
        f"Device: {'; '.join(_where(records, setting))}.",
        f"Records that give no number here: {', '.join(left)}." if left else "No record is left out.",
    ]
    if older:
        lines.append(
            f"Warning: records of {versions} versions (of sources, libraries or machine) are mixed, {older} of "
            f"{len(records)} not of the newest; run again to make them one."
        )
    elif foreign := sum(record.environment.get("results_folder") != folder for record in records):
        lines.append(
            f"Warning: {foreign} of {len(records)} records came with this folder, perhaps of another machine; run "
            "all to make them one."
        )
    return "\n".join([*lines, *warnings(records), *(words for words in said if words.startswith("Warning:"))])


def _where(records: Sequence[Record], setting: bool) -> list[str]:
    where = [records[0].device]
    if len(nodes := _distinct(r.node for r in records)) > 1:
        where.append(f"on {len(nodes)} nodes ({join(nodes)}), every ratio within one of them")
    if setting:
        where.append(f"torch {join(_distinct(r.environment.get('torch') for r in records))}")
    if precisions := _distinct(r.trial.get("precision") for r in records):
        where.append(join(precisions))
    if setting:
        if sizes := _distinct(r.setting("image_size") for r in records):
            where.append(join(f"{size}×{size}" for size in sizes) + " inputs")
        timed = [r for r in records if r.kind in ("step", *PAIRED)]
        if threads := _distinct(r.setting("threads") for r in timed if r.setting("device") == "cpu"):
            where.append(f"{join(threads)} thread{'s' if threads != [1] else ''}")
        if timed:
            where.append(f"{join(_distinct(r.setting('data') for r in timed))} data")
    return where


def mixed_versions(records: Iterable[Record]) -> tuple[int, int]:
    """For trials with the same sources and libraries: (the most fingerprints, records not of the newest fingerprint).

    A fingerprint covers the libraries that a trial uses: a timm model, an Opacus backend and dp-accounting's `pld` each
    have their own.
    """
    most = older = 0
    for alike in grouped(records, libraries).values():
        newest = max(alike, key=lambda record: record.utc).edition
        most = max(most, len({record.edition for record in alike}))
        older += sum(record.edition != newest for record in alike)
    return most, older


def libraries(record: Record) -> tuple[str, str, bool]:
    """A key that is equal for trials with the same sources and libraries."""
    model = record.trial.get("model", "")
    with_peer = bool(_modules(tuple(backends_of(record)))) or record.trial.get("accountant") == "pld"
    return record.kind, model.partition(":")[0] if ":" in model else "", with_peer


_modules = functools.cache(modules_of_backends)


def backends_of(record: Record) -> Sequence[str]:
    """The backends of a trial."""
    return record.trial.get("backends") or [record.trial.get("backend", "")]


def rounds(counts: pd.Series[int], of: str = "rounds", why: str = "") -> str:
    """'median of 3 to 7 rounds, whiskers their range'.

    Args:
        counts: of the rounds of each number.
        of: what is counted, as a plural.
        why: the reason if they differ.
    """
    known = sorted(set(counts[counts > 0]))
    if not known:
        return f"no {of[:-1]} gave a number"
    if known == [1]:
        return f"one {of[:-1]}"
    return f"median of {span(known)} {of}{why if len(known) > 1 else ''}, whiskers their range"


def span(values: Iterable[object]) -> str:
    """'3', or '3 to 7'."""
    first, *_, last = [*values] * 2
    return f"{first}" if first == last else f"{first} to {last}"


def span_of(values: pd.Series[Any], words: Callable[[Any], str]) -> str:
    """'1.02 to 1.35', from the least to the greatest; one number if they are alike, '' without any.

    Args:
        words: from a number to its text.
    """
    known = values.dropna()
    return span(map(words, (known.min(), known.max()))) if len(known) else ""


def join(values: Iterable[object]) -> str:
    """'1, 2, 3'."""
    return ", ".join(map(str, values))


def settings(records: Iterable[Record], name: str) -> str:
    """The values of a field of the trials, as typed: '1e-5, 1e-6'."""
    return join(style.plain(value) for value in sorted({record.trial[name] for record in records}))


def _distinct(values: Iterable[object]) -> list[object]:
    return sorted(
        {value for value in values if value is not None}, key=lambda v: (v, "") if isinstance(v, int) else (0, str(v))
    )
