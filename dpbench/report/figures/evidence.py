"""Tables without pictures: the device, norms against float64, counts and parts of a step, and profiles.

One table a stage, without pictures. Quantities that other experiments measure too (overhead, the largest batch, peaks)
have their figures there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import pandas as pd

from dpbench.records.reader import LeftOut, Record
from dpbench.report import readable, style
from dpbench.report.captions import span_of
from dpbench.report.data.statistics import Row, frame_of, in_order
from dpbench.report.parts import FigureKind
from dpbench.report.readable import BACKEND, BATCH, MODEL, of
from dpbench.report.style import missing

WHOLE, _COUNTS = "step", ("launches", "waits")
#: Part of a private step -> its words, and the corresponding part of a plain one.
PARTS = {
    "forward": ("forward", "forward"),
    "clip": ("backward, norms and clipped sum", "backward"),
    "finite": ("are the sums finite", None),
    "noise": ("noise, to .grad", None),
    "optimizer": ("optimizer", "optimizer"),
    "rest": ("rest", "rest"),
    WHOLE: ("the whole step", WHOLE),
}


def device_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each bandwidth (bytes/s), rate (flops/s) and latency (seconds of one), and for each fact."""
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


def _value(row: Any) -> str:
    if not missing(row.seconds):
        return style.duration(row.seconds)
    if missing(row.rate):
        return str(row.said)
    return f"{row.rate / 1e9:,.0f} GB/s" if row.unit == "B/s" else f"{row.rate / 1e12:.3g} Tflop/s"


_DEVICE: readable.Columns = {
    "What": lambda r: str(r.what).replace("_", " ") + of("precision", ", {}".format)(r),
    "": _value,
}


def norms_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each way to a norm, by precision profile: the largest relative error, its limit, whether it holds."""
    rows = [
        {"family": r.trial["family"], "precision": r.trial["precision"], "small": r.trial["small"], **row}
        for r in records
        for row in r.result.get("rows", [])
    ]
    columns = ("family", "operation", "sizes", "parameter", "route", "way", "precision", "error", "limit", "outcome")
    return frame_of(rows, (*columns, "evidence", "small"))


_NORMS: readable.Columns = {
    **{name.capitalize(): of(name) for name in ("operation", "sizes", "parameter")},
    "Route": lambda r: " ".join([r.route, *([r.way] if r.way else [])]),
    "Precision": of("precision"),
    "Largest error": of("error", lambda value: f"{float(value):.1e}", "–"),  # a record stores infinity as a word
    "Limit": of("limit", "{:.0e}".format),
    "Holds": lambda r: "yes" if r.outcome == "ok" else f"**{style.outcome(r.outcome)}**",
}


def _norms_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    said = [
        "Every way to a per-sample norm, and each clipped sum, beside autograd's in float64 of the very numbers that "
        "it was given (rounded to the profile's dtype): the largest relative error of any sample. A limit is what "
        "rounding in the profile explains; Triton's programs add up in float32 in every profile, and are held to that."
    ]
    if len(frame) and frame.small.astype(bool).all():
        said.append("Small sizes: of a CPU, or a smoke run.")
    return said


def _norms_finding(frame: pd.DataFrame) -> str:
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
    rows: list[Row] = []
    for record in (r for r in records if r.result):
        named = {name: record.trial[name] for name in ("model", "batch_size", "precision", "backend", "optimizer")}
        named |= {"tensors": record.result["tensors"], "counted": record.result["counted"]}
        steps = record.result["steps"]
        for part, (_, other) in PARTS.items():
            both = {"private": _part(steps["private"], part), "plain": _part(steps["plain"], other)}
            units = {f"{which}_{unit}": value for which, found in both.items() for unit, value in found.items()}
            rows.append(named | {"part": part} | units)
    columns = ("model", "batch_size", "precision", "backend", "optimizer", "tensors", "counted", "part")
    numbers = [f"{which}_{unit}" for unit in ("seconds", *_COUNTS) for which in ("private", "plain")]
    return frame_of(rows, (*columns, *numbers))


def _part(entry: dict[str, Any], name: str | None) -> Row:
    if name is None:
        return {}
    own = entry["parts"].values() if name == WHOLE else [entry["parts"][name]]
    counts = {unit: [part[unit] for part in own] for unit in _COUNTS}
    seconds = entry["step_seconds"] if name == WHOLE else entry["parts"][name]["seconds"]
    return {"seconds": median(seconds)} | {unit: None if None in of else sum(of) for unit, of in counts.items()}


def _both(unit: str, words: Callable[[Any], str]) -> Callable[[Any], str]:
    private, plain = (of(f"{which}_{unit}", words, "–") for which in ("private", "plain"))
    return lambda row: f"{private(row)} / {plain(row)}"


def _ratio(row: Any) -> str:
    if missing(row.plain_seconds) or missing(row.private_seconds) or not row.plain_seconds:
        return ""
    return style.times(row.private_seconds / row.plain_seconds)


_PARTS: readable.Columns = {
    **MODEL,
    **BATCH,
    "Precision": of("precision"),
    "Part": of("part", lambda part: PARTS[part][0]),
    "Time, private / plain": _both("seconds", style.duration),
    "Launches": _both("launches", "{:,g}".format),
    "Waits": _both("waits", "{:,g}".format),
    "Ratio": _ratio,
}


def _parts_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
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
    models = {f"{style.model(r.model)}: {r.tensors} tensors, {r.optimizer}" for r in readable.rows(frame)}
    return [*said, *(f"{line}." for line in sorted(models))]


def profile_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each of the largest operations of each backend; rank 0 is the whole step."""
    rows: list[Row] = []
    for record in records:
        files = record.result.get("files", {})
        shared = {name: record.trial[name] for name in ("model", "batch_size", "precision")}
        for backend, entry in record.result.get("backends", {}).items():
            if entry["outcome"] != "ok":
                left_out[f"{style.backend(backend).name}: {style.outcome(entry['outcome'])}"] += 1
                continue
            named = shared | {"backend": backend, "counted": record.result["counted"]}
            whole = {"rank": 0, "operation": "all", "calls": entry["operations"], "seconds": entry["device_seconds"]}
            whole |= {"share": 1.0, "launches": entry["launches"], "waits": entry["waits"]}
            rows.append(named | whole | {"trace": files.get(f"{backend.replace(':', '-')}.json.gz")})
            for rank, row in enumerate(entry["top"], 1):
                told = {name: row[name] for name in ("asked_by", "calls", "seconds", "share")}
                rows.append(named | {"rank": rank, "operation": row["name"]} | told)
    columns = ("model", "batch_size", "precision", "backend", "rank", "operation", "asked_by")
    return frame_of(rows, (*columns, "calls", "seconds", "share", "launches", "waits", "trace", "counted"))


_PROFILE: readable.Columns = {
    **MODEL,
    **BATCH,
    "Precision": of("precision"),
    **BACKEND,
    "Operation": lambda r: r.operation + of("asked_by", " ({})".format)(r),
    "Calls": of("calls", "{:,g}".format),
    "Time": of("seconds", style.duration),
    "Share": of("share", "{:.1%}".format),
    "Launches": of("launches", "{:,g}".format),
    "Waits": of("waits", "{:,g}".format),
    "Trace": of("trace"),
}


def _profile_caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    counted = Counter(frame.counted)
    said = [
        f"Where the time of one step goes, by torch.profiler: {', '.join(sorted(counted)) or 'nothing was seen'}. The "
        "profiler slows a step down: shares and counts are to be read here, and times beside each other."
    ]
    if frame.trace.notna().any():
        said.append("The traces lie beside the records, for chrome://tracing or ui.perfetto.dev.")
    return said


#: Column of what is counted in a step without a GPU -> its word.
_COUNTED = {"launches": "launches", "bytes": "bytes", "flops": "operations"}


def launches_table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each backend of each model; ratios are to ordinary training's."""
    rows: list[Row] = []
    for record in records:
        backends = record.result.get("backends", {})
        base = _counts(backends.get("nonprivate", {}))
        for backend, entry in backends.items():
            row: Row = {name: record.trial[name] for name in ("model", "batch_size")} | {"backend": backend}
            row["dtype"] = record.trial.get("dtype", "float32")
            if entry["outcome"] != "ok":
                row["note"] = style.outcome(entry["outcome"])
            counts = _counts(entry)
            row |= counts | {f"{name}_ratio": counts[name] / base[name] for name in counts if base.get(name)}
            rows.append(row)
    ratios = [f"{name}_ratio" for name in (*_COUNTED, "seconds")]
    frame = frame_of(rows, ("model", "batch_size", "dtype", "backend", *_COUNTED, "seconds", *ratios, "note"))
    return in_order(frame, "dtype", "model", "backend")


def _counts(entry: dict[str, Any]) -> dict[str, float]:
    if entry.get("outcome") != "ok":
        return {}
    moved = entry["bytes_read"] + entry["bytes_written"]
    found = {"launches": entry["launches"], "bytes": moved, "flops": entry["flops"]}
    return found | ({"seconds": entry["seconds"]} if "seconds" in entry else {})  # of records that have none


_LAUNCHES: readable.Columns = {
    **MODEL,
    **BATCH,
    "Dtype": of("dtype"),
    **BACKEND,
    "Launches": of("launches", "{:,.0f}".format, "note"),
    "Bytes": of("bytes", lambda count: f"{count / 1e9:,.2f} GB"),
    "Operations": of("flops", lambda count: f"{count / 1e12:,.3f} Tflop"),
    **{f"Ratio of {word}": of(f"{name}_ratio", style.times) for name, word in _COUNTED.items()},
    "Predicted": of("seconds", lambda seconds: f"{1e3 * seconds:,.1f} ms"),
    "Ratio of predicted": of("seconds_ratio", style.times),
}


_LAUNCHES_SAID = (
    "Counted without a GPU on tensors without values, not measured: one eager step (forward, backward, norms and "
    "clipped sum) with parameters and activations of one dtype, as it goes on a GPU of 80 GiB with Triton, routes "
    "chosen by formula. "
    "A launch is an operation of torch's or a Triton program; a GPU takes several kernels for some, such as a "
    "convolution's backward pass. A CUDA graph replays the same operations, without Python between them. "
    "Bytes: each operand and each result of an operation once, in no cache between two. Operations: of matrix "
    "products, convolutions and attention, 2 for a multiplication and an addition. "
    "Predicted times are floors, not measurements: each operation takes as long as its bytes (3.0 TB/s) or its "
    "operations (767, 400 and 52 Tflop/s in bfloat16, TF32 and float32), rates that copies and large products "
    "reached on an H100; Triton programs are taken to reach half, and unaligned rows of bfloat16 a fifth. The sum "
    "is of a step that is replayed as a CUDA graph. "
    "Models of transformers build their mask as they do in a step that is captured."
)


def _launches_finding(frame: pd.DataFrame) -> str:
    private = frame[(frame.backend != "nonprivate") & frame.launches_ratio.notna()]
    if private.empty:
        return ""
    best = str(private.groupby("backend").launches_ratio.median().idxmin())
    own = private[private.backend == best]
    told = [f"{span_of(own[f'{name}_ratio'], style.times)} the {word}" for name, word in _COUNTED.items()]
    said = f"{style.backend(best).name} takes {told[0]}, {told[1]} and {told[2]} of ordinary training"
    times = own.seconds_ratio.dropna()
    return said + (f", and of the predicted time {span_of(times, style.times)}." if len(times) else ".")


FIGURES = {
    "device": FigureKind(
        kinds=("device",),
        table=device_table,
        text=_DEVICE,
        caption="What the device can do at best: medians of repetitions. A copy counts the bytes read and the bytes "
        "written; a product is 2n³ operations, in float32 with TF32 off; a latency is of one operation on one number.",
    ),
    "norms": FigureKind(("norms",), norms_table, _NORMS, _norms_caption, finding=_norms_finding),
    "launches": FigureKind(("launches",), launches_table, _LAUNCHES, _LAUNCHES_SAID, finding=_launches_finding),
    "parts": FigureKind(("parts",), parts_table, _PARTS, _parts_caption),
    "profile": FigureKind(("profile",), profile_table, _PROFILE, _profile_caption),
}
