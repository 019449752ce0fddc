"""Joins largest batches predicted by simulated searches with the real steps that confirm them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpbench.report.data.select import Record
from dpbench.report.data.statistics import Row, batch

SEARCH, CONFIRM = "largest", "confirm"
CONFIRMED = "confirmed"


def as_peaks(records: Iterable[Record]) -> list[Record]:
    """Convert each probe of a search in one trial, and each confirming step, to a record of a peak; keep other records.

    A trial without a probe ended as a whole, at its own batch size.
    """
    found = []
    for record in records:
        if record.kind not in (SEARCH, CONFIRM):
            found.append(record)
            continue
        simulated = {"kind": "peak", "confirms": record.kind == CONFIRM, "simulated": record.kind == SEARCH}
        trial = dict(record.trial) | simulated
        if record.outcome != "ok":
            found.append(dataclasses.replace(record, trial=trial))
        for probe in record.result.get("probes", ()):
            memory = probe.get("memory") or ({"peak_bytes": probe["peak_bytes"]} if "peak_bytes" in probe else None)
            changes: dict[str, Any] = {
                "trial": trial | {"batch_size": probe["batch_size"]},
                "outcome": "ok" if probe["fits"] else "oom" if memory is None else "over_budget",
                "result": {} if memory is None else {"memory": memory},
            }
            found.append(dataclasses.replace(record, **changes))
    return found


def joined(rows: Sequence[Row], probes: Iterable[Sequence[Record]]) -> list[Row]:
    """The rows of `max_batch_throughput.table`, with each prediction and its confirmation in one row.

    Args:
        rows: one for each (model, backend, memory).
        probes: of each row.
    """
    known: dict[tuple[str, str], dict[str, tuple[Row, Sequence[Record]]]] = {}
    for row, own in zip(rows, probes, strict=True):
        confirms = any(record.trial.get("confirms") for record in own)
        known.setdefault((row["model"], row["backend"]), {})[CONFIRMED if confirms else row["memory"]] = row, own
    found = []
    for of in known.values():
        if CONFIRMED in of and "simulated" in of:
            found.append(_joined(*of.pop("simulated"), *of.pop(CONFIRMED)))
        found += [row for row, _ in of.values()]
    return found


def _joined(foretold: Row, simulated: Sequence[Record], row: Row, measured: Sequence[Record]) -> Row:
    size = foretold.get("max_batch_size")
    row = row | {"memory": CONFIRMED, "foretold_max_batch_size": size}
    if row.get("max_batch_size") and "fails_at" not in row and "fails_at" in foretold:
        row["max_batch_note"] = "foretold too low: more may fit"
    own, real = _peaks(simulated), _peaks(measured)
    if common := own.keys() & real.keys():
        row["foretold_peak_error"] = own[max(common)] / real[max(common)] - 1
    return row


def _peaks(records: Iterable[Record]) -> Mapping[int, int]:
    return {batch(r): r.result["memory"]["peak_bytes"] for r in records if r.result.get("memory")}


def said(frame: Any) -> list[str]:
    """A sentence that compares predicted batches with the confirming steps; [] without any."""
    told = frame[frame.foretold_max_batch_size.notna()]
    if not len(told):
        return []
    seen = told[told.max_batch_size.notna()]
    off = [float(r.max_batch_size / r.foretold_max_batch_size - 1) for r in seen.itertuples()]
    words = f"{sum(each == 0 for each in off)} of {len(told)} batches stand as foretold"
    if any(off):
        words += f", the confirmed others differ by {min(off):+.1%} to {max(off):+.1%}"
    errors = [float(error) for error in told.foretold_peak_error.dropna()]
    if errors:
        words += f"; foretold peaks are {min(errors):+.1%} to {max(errors):+.1%} off the measured ones"
    return [words + "."]
