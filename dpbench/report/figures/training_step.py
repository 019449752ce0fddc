"""The cost of whole private training steps relative to the plain step of the same optimizer, drawn as `overhead`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpbench.report import findings, style
from dpbench.report.captions import span
from dpbench.report.data.paired import entries
from dpbench.report.data.select import Record
from dpbench.report.figures import overhead
from dpbench.report.parts import FigureKind

KIND = "training_step"


def cell(record: Record) -> tuple[Any, ...]:
    """As for `overhead`, plus the engines, since ours and the others' are two trials."""
    return *overhead.cell(record), *record.trial["backends"]


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    optimizer = ", ".join(sorted({str(record.trial["optimizer"]) for record in records}))
    energy = sorted({str(record.result["energy"]) for record in records if "energy" in record.result})
    said = [
        "Time and peak memory of one whole training step, forward to optimizer, each library's noise included, beside "
        f"the plain step of the same optimizer ({optimizer}): an engine takes turns with that in one process, and "
        f"a ratio is of two turns of one round; {overhead.pairs(frame)}. Backends stand for their engines: ours is "
        "dpbench.PrivacyEngine. The axes are logarithmic.",
        *overhead.conditions(records, frame),
        *other_framework(records, frame),
    ]
    return said + ([f"Energy: {', '.join(energy)}."] if energy else [])


def other_framework(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    """Sentences on engines that are compared with their own framework's plain step; [] if there are none.

    Args:
        records: with the seconds of compiling.
        frame: of `table`.
    """
    if "plain_step_seconds" not in frame:
        return []
    at = ["model", "image_size", "batch_size"]
    torchs = frame.loc[frame.backend == "nonprivate", [*at, "step_seconds"]]
    rows: Any = frame[frame.plain_step_seconds.notna()].merge(torchs, "left", at, suffixes=("", "_torch")).itertuples()
    steps = [
        f"{style.model(row.model)} {style.duration(row.plain_step_seconds)} "
        f"(torch {'not timed' if style.missing(row.step_seconds_torch) else style.duration(row.step_seconds_torch)})"
        for row in rows
    ]
    found = [e.result for e in entries(records) if "plain" in e.result and "compile_seconds" in e.result]
    versions = sorted({" ".join(pair) for result in found for pair in result.get("versions", {}).items()})
    compiling = sorted(float(result["compile_seconds"]["private"]) for result in found)
    took = span(map(style.duration, compiling)) if compiling else "an unknown time"
    return [
        "§ The same model in jax, its gradients compared with the oracle's; jitted, and beside jax's jitted plain "
        f"step, not beside torch's. That step takes {', '.join(steps)}. Compiling the private one took {took}, not "
        "counted; samples go through vmap at once or one by one, whichever is faster; memory is what XLA plans, "
        f"not measured ({', '.join(versions)})."
    ]


FIGURE = FigureKind(
    doc="the whole private training step of every engine beside the plain one, interleaved in one process",
    kinds=(KIND,),
    cell=cell,
    by=("experiment", "precision", "threads", "optimizer"),
    table=overhead.table,
    text=overhead.text,
    caption=_caption,
    plot=overhead.plot,
    finding=findings.paired,
    setting=True,
    place=100,
)
