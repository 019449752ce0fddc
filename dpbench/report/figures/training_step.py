"""The cost of whole private training steps relative to the plain step of the same optimizer, drawn as `overhead`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpbench.report import captions, findings, readable
from dpbench.report.data import peaks
from dpbench.report.data.select import LeftOut, Record
from dpbench.report.figures import overhead
from dpbench.report.parts import FigureKind

KIND = "training_step"


def cell(record: Record) -> tuple[Any, ...]:
    """As for `overhead`, plus the engines, since ours and the others' are two trials."""
    return *overhead.cell(record), *record.trial["backends"]


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people."""
    return readable.paired(frame, {"B": lambda r: str(r.batch_size)})


def caption(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The meaning of the ratios."""
    optimizer = ", ".join(sorted({str(record.trial["optimizer"]) for record in records}))
    energy = sorted({str(record.result["energy"]) for record in records if "energy" in record.result})
    said = [
        "Time and peak memory of one whole training step, forward to optimizer, each library's noise included, beside "
        f"the plain step of the same optimizer ({optimizer}): an engine takes turns with that in one process, and "
        f"a ratio is of two turns of one round; {overhead.pairs(frame)}. Backends stand for their engines: ours is "
        "dpbench.PrivacyEngine. The axes are logarithmic."
    ]
    said += overhead.ways(records) + overhead.memory_source(frame) + overhead.alone(frame) + peaks.said(records, frame)
    if energy:
        said.append(f"Energy: {', '.join(energy)}.")
    if absent := overhead.nowhere(frame):
        said.append(f"No number on any model: {', '.join(absent)}.")
    return captions.caption(said, records, left_out)


FIGURE = FigureKind(
    doc="the whole private training step of every engine beside the plain one, interleaved in one process",
    kinds=(KIND,),
    cell=cell,
    facets=dict.fromkeys(("experiment", "precision", "threads", "optimizer", "compiled"), (KIND,)),
    table=overhead.table,
    text=text,
    caption=caption,
    plot=overhead.plot,
    finding=findings.paired,
    place=100,
)
