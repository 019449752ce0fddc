"""How the cost of clipping grows with the input: ratios to ordinary training, and seconds, against size.

Seconds are per sample, since the batch may shrink as the size grows. `growth_curves` draws the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dpbench.report import captions, readable, style
from dpbench.report.data import peaks, published
from dpbench.report.data.paired import COLUMNS, entries, paired_row
from dpbench.report.data.select import LeftOut, Record, grouped, newest_trial
from dpbench.report.data.statistics import Row, batch, count_failures, frame_of, in_order
from dpbench.report.drawing import growth_curves as growth_plot
from dpbench.report.drawing.growth_curves import Across
from dpbench.report.figures import overhead


@dataclass(frozen=True)
class Growth:
    """A figure of models measured at several sizes.

    across: the sizes, and the laws to compare with.
    of: a record's (model, size); a size of None belongs to another figure.
    """

    across: Across
    of: Callable[[Record], tuple[str, int | None]]

    def applies(self, records: Sequence[Record]) -> bool:
        """True if a model was measured at several sizes."""
        return bool(self._growing(records))

    def _growing(self, records: Iterable[Record]) -> set[str]:
        sizes: dict[str, set[int]] = {}
        for model, size in map(self.of, records):
            if size is not None:
                sizes.setdefault(model, set()).add(size)
        return {model for model, found in sizes.items() if len(found) > 1}

    def table(self, records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
        """A row for each (model, size, backend); `growth` is the exponent of the seconds from the previous size."""
        growing = self._growing(records)
        kept = [r for r in records if self.of(r)[0] in growing and self.of(r)[1] is not None]
        left_out["of a model that was measured at one size only"] += len(records) - len(kept)
        rows: list[Row] = []
        for (model, size), group in grouped(kept, self.of).items():
            newest = newest_trial(group, left_out)
            own = entries(newest)
            count_failures(own, left_out)
            by_backend = grouped(own, lambda r: r.trial["backend"])
            for backend, found in by_backend.items():
                row = {"model": model, self.across.size: size, "batch_size": batch(newest[0]), "backend": backend}
                row |= paired_row(found, by_backend.get("nonprivate", []))
                if "step_seconds" in row:
                    row["seconds_per_sample"] = row["step_seconds"] / row["batch_size"]
                    row["samples_per_second"] = 1 / row["seconds_per_sample"]
                if self.across.size == "image_size" and size is not None:
                    row["published_time_ratio"] = published.throughput_ratio(model, size, backend)
                rows.append(row)
        named = ("model", self.across.size, "batch_size", "backend", "seconds_per_sample", "samples_per_second")
        columns = tuple(dict.fromkeys((*named, "growth", *COLUMNS)))  # the batch size may be the size
        frame = in_order(frame_of(rows, columns), "model", self.across.size, "backend")
        for _, line in frame.dropna(subset="seconds_per_sample").groupby(["model", "backend"], sort=False):
            if self.across.rate:
                continue  # no law applies to it
            seconds, sizes = line.seconds_per_sample.astype(float), line[self.across.size].astype(float)
            slopes = (seconds / seconds.shift()).map(math.log) / (sizes / sizes.shift()).map(math.log)
            frame.loc[line.index, "growth"] = slopes.where(slopes.notna(), None)
        return frame

    def text(self, frame: pd.DataFrame) -> pd.DataFrame:
        """`table` for people."""
        sizes: dict[str, Callable[[Any], str]] = {"B": lambda r: str(r.batch_size)}
        if not self.across.rate:
            sizes = {self.across.unit.capitalize(): lambda r: str(getattr(r, self.across.size))} | sizes
            return readable.paired(frame, sizes)
        shown = readable.paired(frame, sizes)
        rates = ["" if style.missing(rate) else style.number(rate) for rate in frame.samples_per_second]
        shown.insert(3, "Samples/s", rates)
        return shown

    def caption(self, records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
        """The axes."""
        sizes = frame.groupby(self.across.size).batch_size.first()
        said = [
            f"Time and peak memory of one training step beside ordinary training, and {self.across.third_words}, "
            f"against {self.across.words}: all backends take turns in one process, and a ratio is of two turns of one "
            f"round; {overhead.pairs(frame)}."
        ]
        said += overhead.ways(records) + overhead.memory_source(frame) + peaks.said(records, frame)
        batches = ", ".join(f"{count} at {size}" for size, count in sizes.items())
        if not self.across.rate:
            said.append(f"Batch size {sizes.iloc[0]}." if sizes.nunique() == 1 else f"Batch size: {batches}.")
        said.append("A line ends where its backend was not run any further.")
        never = [
            f"{style.model(str(model))}, {style.backend(str(backend)).name} ({own.note.dropna().iloc[0]})"
            for (model, backend), own in frame.groupby(["model", "backend"], sort=False)
            if own.step_seconds.isna().all() and own.note.notna().any()
        ]
        if never:
            said.append(f"No number at any size: {'; '.join(never)}.")
        if frame.published_time_ratio.notna().any():
            said.append(
                f"Hollow: published, Figure 5 of {published.BOOK_KEEPING}, ratio of throughputs at each method's "
                "largest batch on its GPU."
            )
        chosen = [r for r in records if self.of(r)[0] in set(frame.model)]
        return captions.caption(said, chosen or records, left_out)

    def plot(self, frame: pd.DataFrame, caption: str) -> Figure:
        """Three panels a model, all against size."""
        return growth_plot.plot(frame, caption, self.across)


RESOLUTION = Growth(
    Across("image_size", "image size (pixels along an edge)", "pixels", "image", ((2, "∝ pixels²"),)),
    lambda record: (record.trial["model"], record.trial.get("image_size")),
)
THROUGHPUT = Growth(
    Across("batch_size", "batch size", "samples", "sample", (), rate=True),
    lambda record: (record.trial["model"], batch(record)),
)
SEQUENCE_LENGTH = Growth(
    Across("tokens", "sequence length (tokens)", "tokens", "sequence", ((1, "∝ T"), (2, "∝ T²"))),
    lambda record: style.without_length(record.trial["model"]),
)
