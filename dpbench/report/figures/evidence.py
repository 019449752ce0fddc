"""The tables of the experiment `evidence`: the device, norms against float64, parts of a step, and profiles.

One table a stage, without pictures. Quantities that other experiments measure too (overhead, the largest batch, peaks)
have their figures there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import pandas as pd

from dpbench.report import captions, readable, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.data.statistics import Row, count_failures, frame_of
from dpbench.report.parts import FigureKind
from dpbench.report.style import missing

#: Part of a private step -> the corresponding part of a plain one.
BESIDE = {
    "forward": "forward",
    "clip": "backward",
    "finite": None,
    "noise": None,
    "optimizer": "optimizer",
    "rest": "rest",
}
WHOLE = "step"
_WORDS = {
    "forward": "forward",
    "clip": "backward, norms and clipped sum",
    "finite": "are the sums finite",
    "noise": "noise, to .grad",
    "optimizer": "optimizer",
    "rest": "rest",
    WHOLE: "the whole step",
}


def device_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each bandwidth (bytes/s), rate (flops/s) and latency (seconds of one), and for each fact."""
    count_failures(records, left_out)
    rows: list[Row] = []
    for record in (r for r in records if r.result):
        found = record.result
        rows += [{"what": name, "said": str(value)} for name, value in (found["facts"] | found["versions"]).items()]
        rows += [{"what": r["what"], "rate": r["bytes_per_second"], "unit": "B/s"} for r in found["bandwidth"]]
        for r in found["products"]:
            what = f"product of two {r['size']:,}×{r['size']:,} matrices"
            rows.append({"what": what, "precision": r["precision"], "rate": r["flops_per_second"], "unit": "flop/s"})
        rows += [{"what": r["what"], "seconds": r["seconds"]} for r in found["latency"]]
    return frame_of(rows, ("what", "precision", "said", "rate", "unit", "seconds"))


def device_text(frame: pd.DataFrame) -> pd.DataFrame:
    """`device_table` for people."""
    return readable.texts(frame, {"What": _what, "": _value})


def _what(row: Any) -> str:
    return str(row.what).replace("_", " ") + ("" if missing(row.precision) else f", {row.precision}")


def _value(row: Any) -> str:
    if not missing(row.seconds):
        return style.duration(row.seconds)
    if missing(row.rate):
        return str(row.said)
    return f"{row.rate / 1e9:,.0f} GB/s" if row.unit == "B/s" else f"{row.rate / 1e12:.3g} Tflop/s"


def device_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The method."""
    said = [
        "What the device can do at best: medians of repetitions. A copy counts the bytes read and the bytes written; a "
        "product is 2n³ operations, in float32 with TF32 off; a latency is of one operation on one number."
    ]
    return captions.caption(said, records, left_out, setting=False)


def norms_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each way to a norm, by precision profile: the largest relative error, its limit, whether it holds."""
    left_out.update(f"{_family(r)}: {style.OUTCOMES.get(r.outcome, r.outcome)}" for r in records if not _has_rows(r))
    rows = [
        {"family": r.trial["family"], "precision": r.trial["precision"], "small": r.trial["small"], **row}
        for r in records
        for row in r.result.get("rows", [])
    ]
    columns = ("family", "operation", "sizes", "parameter", "route", "way", "precision", "error", "limit", "outcome")
    return frame_of(rows, (*columns, "evidence", "small"))


def _has_rows(record: Record) -> bool:
    return bool(record.result.get("rows"))


def _family(record: Record) -> str:
    return f"{record.trial['family']} in {record.trial['precision']}"


def norms_text(frame: pd.DataFrame) -> pd.DataFrame:
    """`norms_table` for people."""
    return readable.texts(
        frame,
        {
            "Operation": lambda r: r.operation,
            "Sizes": lambda r: r.sizes,
            "Parameter": lambda r: r.parameter,
            "Route": lambda r: " ".join([r.route, *([r.way] if r.way else [])]),
            "Precision": lambda r: r.precision,
            "Largest error": lambda r: _error(r.error),
            "Limit": lambda r: f"{r.limit:.0e}",
            "Holds": lambda r: "yes" if r.outcome == "ok" else f"**{style.OUTCOMES.get(r.outcome, r.outcome)}**",
        },
    )


def _error(value: Any) -> str:
    return "–" if missing(value) else f"{float(value):.1e}"  # a record stores infinity as a word


def norms_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The quantities compared."""
    said = [
        "Every way to a per-sample norm, and each clipped sum, beside autograd's in float64 of the very numbers that "
        "it was given (rounded to the profile's dtype): the largest relative error of any sample. A limit is what "
        "rounding in the profile explains; Triton's programs add up in float32 in every profile, and are held to that."
    ]
    if len(frame) and frame.small.astype(bool).all():
        said.append("Small sizes: of a CPU, or a smoke run.")
    return captions.caption(said, records, left_out, setting=False)


def norms_finding(frame: pd.DataFrame) -> str:
    """How many hold, and the one nearest to its limit."""
    if not len(frame):
        return ""
    held = int((frame.outcome == "ok").sum())
    known = frame[frame.error.notna()]
    if not len(known):
        return f"{held} of {len(frame)} hold."
    nearest: Any = known.iloc[int((known.error.astype(float) / known.limit.astype(float)).to_numpy().argmax())]
    where = " ".join(filter(None, [nearest.route, nearest.way, "in", nearest.precision]))
    return (
        f"{held} of {len(frame)} hold their limit; the nearest to it, or furthest beyond: {nearest.operation} "
        f"({nearest.sizes}), {where}, {float(nearest.error):.1e} of {nearest.limit:.0e}."
    )


def parts_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each part of a private step, with that of a plain one; seconds are medians of the steps."""
    count_failures(records, left_out)
    rows: list[Row] = []
    for record in (r for r in records if r.result):
        named = {name: record.trial[name] for name in ("model", "batch_size", "precision", "backend", "optimizer")}
        named |= {"tensors": record.result["tensors"], "counted": record.result["counted"]}
        steps = record.result["steps"]
        for part, other in (*BESIDE.items(), (WHOLE, WHOLE)):
            beside = _part(steps["plain"], other) if other else {}
            row = {
                f"{which}_{unit}": value
                for which, of in (("private", _part(steps["private"], part)), ("plain", beside))
                for unit, value in of.items()
            }
            rows.append(named | {"part": part} | row)
    units = ("seconds", "launches", "waits")
    columns = ("model", "batch_size", "precision", "backend", "optimizer", "tensors", "counted", "part")
    return frame_of(rows, (*columns, *(f"{which}_{unit}" for unit in units for which in ("private", "plain"))))


def _part(entry: dict[str, Any], name: str) -> Row:
    if name != WHOLE:
        part = entry["parts"][name]
        return {"seconds": median(part["seconds"]), "launches": part["launches"], "waits": part["waits"]}
    counts: Row = {}
    for unit in ("launches", "waits"):
        each = [part[unit] for part in entry["parts"].values()]
        counts[unit] = None if None in each else sum(each)
    return {"seconds": median(entry["step_seconds"]), **counts}


def parts_text(frame: pd.DataFrame) -> pd.DataFrame:
    """`parts_table` for people."""

    def of(r: Any, unit: str) -> str:
        told = [getattr(r, f"{which}_{unit}") for which in ("private", "plain")]
        words = style.duration if unit == "seconds" else "{:,g}".format
        return " / ".join("–" if missing(value) else words(value) for value in told)

    return readable.texts(
        frame,
        {
            "Model": lambda r: style.model(r.model),
            "B": lambda r: str(r.batch_size),
            "Precision": lambda r: r.precision,
            "Part": lambda r: _WORDS[r.part],
            "Time, private / plain": lambda r: of(r, "seconds"),
            "Launches": lambda r: of(r, "launches"),
            "Waits": lambda r: of(r, "waits"),
            "Ratio": _ratio,
        },
    )


def _ratio(row: Any) -> str:
    if missing(row.plain_seconds) or missing(row.private_seconds) or not row.plain_seconds:
        return ""
    return style.times(row.private_seconds / row.plain_seconds)


def parts_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The counted quantities."""
    counted = sorted(set(frame.counted))
    said = [
        "PrivacyEngine's whole step, part by part, beside the plain step of the same model, batch and optimizer "
        "(backward beside backward with norms and sums); medians of warm steps, and the parts add up to the step."
    ]
    if counted:
        said.append(f"Launches: {', '.join(counted)}, of one step.")
    if any("dispatches" in name for name in counted):
        said.append(
            "Nothing is launched on a CPU: where a GPU would wait, the host reads a number off a tensor here (an "
            "optimizer's counter of steps, which lies on the host everywhere, among them)."
        )
    rows: Any = frame.itertuples()
    models = {f"{style.model(r.model)}: {r.tensors} tensors, {r.optimizer}" for r in rows}
    return captions.caption([*said, *(f"{line}." for line in sorted(models))], records, left_out, setting=False)


def profile_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each of the largest operations of each backend; rank 0 is the whole step."""
    count_failures(records, left_out)
    rows = [row for record in records for row in _profile_rows(record, left_out)]
    named = ("model", "batch_size", "precision", "backend", "rank", "operation", "asked_by")
    return frame_of(rows, (*named, "calls", "seconds", "share", "launches", "waits", "trace", "counted"))


def _profile_rows(record: Record, left_out: LeftOut) -> Iterator[Row]:
    for backend, entry in record.result.get("backends", {}).items():
        if entry["outcome"] != "ok":
            left_out[f"{style.backend(backend).name}: {style.OUTCOMES.get(entry['outcome'], entry['outcome'])}"] += 1
            continue
        named = {name: record.trial[name] for name in ("model", "batch_size", "precision")} | {"backend": backend}
        named |= {"counted": record.result["counted"]}
        trace = record.result.get("files", {}).get(f"{backend.replace(':', '-')}.json.gz")
        whole = {name: entry[name] for name in ("launches", "waits")}
        whole |= {"operation": "all", "calls": entry["operations"], "seconds": entry["device_seconds"], "share": 1.0}
        yield named | {"rank": 0, "trace": trace} | whole
        for rank, row in enumerate(entry["top"], 1):
            told = {name: row[name] for name in ("asked_by", "calls", "seconds", "share")}
            yield named | {"rank": rank, "operation": row["name"]} | told


def profile_text(frame: pd.DataFrame) -> pd.DataFrame:
    """`profile_table` for people."""
    return readable.texts(
        frame,
        {
            "Model": lambda r: style.model(r.model),
            "B": lambda r: str(r.batch_size),
            "Precision": lambda r: r.precision,
            "Backend": lambda r: style.backend(r.backend).name,
            "Operation": lambda r: r.operation if missing(r.asked_by) else f"{r.operation} ({r.asked_by})",
            "Calls": lambda r: f"{r.calls:,g}",
            "Time": lambda r: style.duration(r.seconds),
            "Share": lambda r: f"{r.share:.1%}",
            "Launches": lambda r: "" if missing(r.launches) else f"{r.launches:,g}",
            "Waits": lambda r: "" if missing(r.waits) else f"{r.waits:,g}",
            "Trace": lambda r: "" if missing(r.trace) else str(r.trace),
        },
    )


def profile_caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The counted quantities, and where the traces are."""
    counted = Counter(frame.counted)
    said = [
        f"Where the time of one step goes, by torch.profiler: {', '.join(sorted(counted)) or 'nothing was seen'}. The "
        "profiler slows a step down: shares and counts are to be read here, and times beside each other.",
    ]
    if frame.trace.notna().any():
        said.append("The traces lie beside the records, for chrome://tracing or ui.perfetto.dev.")
    return captions.caption(said, records, left_out, setting=False)


def table_of(kind: str, doc: str, *, table: Any, text: Any, caption: Any, **more: Any) -> FigureKind:
    """A table of trials of one kind, without a picture.

    Args:
        kind: of trial.
        doc: the heading.
        table, text, caption, more: as `FigureKind` takes them.
    """
    return FigureKind(
        doc=doc,
        kinds=(kind,),
        cell=lambda record: record.id,
        facets={"experiment": (kind,)},
        table=table,
        text=text,
        caption=caption,
        plot=None,
        **more,
    )
