"""Launches, bytes, operations and predicted times of private and ordinary steps, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd

from dpbench.report import captions, readable, style
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.data.statistics import Row, count_failures, frame_of, in_order
from dpbench.report.figures import evidence
from dpbench.report.style import missing

_WORDS = {"launches": "launches", "bytes": "bytes", "flops": "operations"}


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """A row for each backend of each model; ratios are to ordinary training's."""
    count_failures(records, left_out)
    rows: list[Row] = []
    for record in records:
        backends = record.result.get("backends", {})
        base = _counts(backends.get("nonprivate", {}))
        for backend, entry in backends.items():
            row: Row = {name: record.trial[name] for name in ("model", "batch_size")} | {"backend": backend}
            row["dtype"] = record.trial.get("dtype", "float32")
            if entry["outcome"] != "ok":
                row["note"] = style.OUTCOMES.get(entry["outcome"], entry["outcome"])
            counts = _counts(entry)
            row |= counts | {f"{name}_ratio": counts[name] / base[name] for name in counts if base.get(name)}
            rows.append(row)
    ratios = [f"{name}_ratio" for name in (*_WORDS, "seconds")]
    frame = frame_of(rows, ("model", "batch_size", "dtype", "backend", *_WORDS, "seconds", *ratios, "note"))
    return in_order(frame, "dtype", "model", "backend")


def _counts(entry: dict[str, Any]) -> dict[str, float]:
    if entry.get("outcome") != "ok":
        return {}
    moved = entry["bytes_read"] + entry["bytes_written"]
    found = {"launches": entry["launches"], "bytes": moved, "flops": entry["flops"]}
    return found | ({"seconds": entry["seconds"]} if "seconds" in entry else {})  # of records that have none


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people."""
    return readable.texts(
        frame,
        {
            "Model": lambda r: style.model(r.model),
            "B": lambda r: str(r.batch_size),
            "Dtype": lambda r: str(r.dtype),
            "Backend": lambda r: style.backend(r.backend).name,
            "Launches": lambda r: str(r.note) if missing(r.launches) else f"{r.launches:,.0f}",
            "Bytes": lambda r: "" if missing(r.bytes) else f"{r.bytes / 1e9:,.2f} GB",
            "Operations": lambda r: "" if missing(r.flops) else f"{r.flops / 1e12:,.3f} Tflop",
            **{f"Ratio of {word}": partial(_ratio, name=f"{name}_ratio") for name, word in _WORDS.items()},
            "Predicted": lambda r: "" if missing(r.seconds) else f"{1e3 * r.seconds:,.1f} ms",
            "Ratio of predicted": partial(_ratio, name="seconds_ratio"),
        },
    )


def _ratio(row: Any, name: str) -> str:
    value = getattr(row, name)
    return "" if missing(value) else style.times(value)


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """What was counted, and what not."""
    said = [
        "Counted without a GPU on tensors without values, not measured: one eager step (forward, backward, norms and "
        "clipped sum) with parameters and activations of one dtype, as it goes on a GPU of 80 GiB with Triton, routes "
        "chosen by formula.",
        "A launch is an operation of torch's or a Triton program; a GPU takes several kernels for some, such as a "
        "convolution's backward pass. A CUDA graph replays the same operations, without Python between them.",
        "Bytes: each operand and each result of an operation once, in no cache between two. Operations: of matrix "
        "products, convolutions and attention, 2 for a multiplication and an addition.",
        "Predicted times are floors, not measurements: each operation takes as long as its bytes (3.0 TB/s) or its "
        "operations (767, 400 and 52 Tflop/s in bfloat16, TF32 and float32), rates that copies and large products "
        "reached on an H100; Triton programs are taken to reach half, and unaligned rows of bfloat16 a fifth. The sum "
        "is of a step that is replayed as a CUDA graph.",
        "Models of transformers build their mask as they do in a step that is captured.",
    ]
    return captions.caption(said, records, left_out, setting=False)


def finding(frame: pd.DataFrame) -> str:
    """The ratios of the private backend with the fewest launches."""
    private = frame[(frame.backend != "nonprivate") & frame.launches_ratio.notna()]
    if private.empty:
        return ""
    best = str(private.groupby("backend").launches_ratio.median().idxmin())
    own = private[private.backend == best]
    told = [f"{_span(own[f'{name}_ratio'])} the {word}" for name, word in _WORDS.items()]
    said = f"{style.backend(best).name} takes {told[0]}, {told[1]} and {told[2]} of ordinary training"
    times = own.seconds_ratio.dropna()
    return said + (f", and of the predicted time {_span(times)}." if len(times) else ".")


def _span(ratios: Any) -> str:
    return " to ".join(dict.fromkeys(map(style.times, (ratios.min(), ratios.max()))))


FIGURE = evidence.table_of(
    "launches",
    "launches, bytes and operations of a step on a GPU, counted without one",
    table=table,
    text=text,
    caption=caption,
    finding=finding,
    place=275,
)
