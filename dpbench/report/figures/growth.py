"""How the cost of clipping grows with the input or the batch: ratios to ordinary training, and seconds, against size.

Seconds are per sample, since the batch may shrink as the size grows. The panel of seconds also shows the slopes of
simple laws.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record
from dpbench.report import findings, readable, style
from dpbench.report.captions import join
from dpbench.report.data import published
from dpbench.report.data.statistics import PAIRED_COLUMNS, batch, in_order, utilisation_said
from dpbench.report.drawing.sheet import MARGIN, REFERENCE, grid, legend, logarithmic, sign
from dpbench.report.figures import overhead
from dpbench.report.parts import FigureKind
from dpbench.report.readable import rows

_TICKS = [digit * 10.0**power for power in range(-2, 4) for digit in (1, 1.5, 2, 3, 5, 7)]


@dataclass(frozen=True)
class Growth:
    """A figure of models measured at several sizes.

    size: the column of the size along the x axis; words: of that axis; unit, sample: what it counts, and in what.
    of: a record's (model, size); a size of None belongs to another figure.
    laws: (exponent, words) of the lines to compare the seconds with.
    rate: the third panel shows samples per second instead of seconds per sample.
    """

    size: str
    words: str
    unit: str
    sample: str
    of: Callable[[Record], tuple[str, int | None]]
    laws: tuple[tuple[float, str], ...] = ()
    rate: bool = False

    def growing(self, records: Sequence[Record]) -> set[str]:
        """The models that were measured at several sizes."""
        sizes = {self.of(record) for record in records}
        models = [model for model, size in sizes if size is not None]
        return {model for model in models if models.count(model) > 1}

    def table(self, records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
        """A row for each (model, size, backend); `growth` is the exponent of the seconds from the previous size."""
        growing = self.growing(records)
        kept = [r for r in records if self.of(r)[0] in growing and self.of(r)[1] is not None]
        left_out["of a model that was measured at one size only"] += len(records) - len(kept)
        known = {overhead.cell(record): self.of(record) for record in kept}
        frame = overhead.table(kept, left_out)
        cells = zip(frame.model, frame.batch_size, frame.image_size, strict=True)
        frame[["model", self.size]] = [known[cell] for cell in cells]
        frame["seconds_per_sample"] = frame.step_seconds.astype(float) / frame.batch_size.astype(float)
        frame["samples_per_second"] = 1 / frame.seconds_per_sample
        frame[["published_time_ratio", "published_memory_ratio"]] = None  # those are of one size
        if self.size == "image_size":
            published_ratio = published.throughput_ratio
            frame["published_time_ratio"] = [published_ratio(r.model, r.image_size, r.backend) for r in rows(frame)]
        named = ("model", self.size, "batch_size", "backend", "seconds_per_sample", "samples_per_second")
        columns = dict.fromkeys((*named, "growth", *PAIRED_COLUMNS))  # the batch size may be the size
        frame = in_order(frame.reindex(columns=list(columns)), "model", self.size, "backend")
        if not self.rate:  # no law applies to a rate
            logs = frame[["seconds_per_sample", self.size]].astype(float).map(math.log).dropna()
            steps = logs.groupby([frame.model, frame.backend]).diff()
            frame["growth"] = (steps.seconds_per_sample / steps[self.size]).reindex(frame.index)
        return frame

    def text(self, frame: pd.DataFrame) -> pd.DataFrame:
        """`table` for people."""
        if not self.rate:
            return readable.paired(frame, {self.unit.capitalize(): readable.of(self.size), **readable.BATCH})
        rate = {"Samples/s": readable.of("samples_per_second", style.number)}
        return readable.paired(frame, {**readable.BATCH, **readable.BACKEND, **rate})

    def caption(self, records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
        """The axes."""
        third = f"{self.sample}s per second" if self.rate else f"seconds per {self.sample}"
        said = [
            f"Time and peak memory of one training step beside ordinary training, and {third}, against {self.words}: "
            "all backends take turns in one process, and a ratio is of two turns of one round; "
            f"{overhead.pairs(frame)}.",
            *overhead.ways(records),
            *overhead.memory_source(frame),
            *utilisation_said(records, frame),
        ]
        sizes = frame.groupby(self.size).batch_size.first()
        batches = join(f"{count} at {size}" for size, count in sizes.items())
        if not self.rate:
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
        return said

    def plot(self, frame: pd.DataFrame, caption: str) -> Figure:
        """A row of panels for each model, with time ratio, memory ratio and seconds against size."""
        models = list(dict.fromkeys(frame.model))
        room = {"head": 0.5, "foot": 0.5, "left": 0.48, "right": MARGIN, "gap": 0.6, "above": 0.27}
        figure, panels = grid(caption, 3 * len(models), 3, 2.15, **room)
        for index, model in enumerate(models):
            own = frame[frame.model == model]
            time, memory, third = panels[3 * index : 3 * index + 3]
            time.annotate(
                style.model(model), (0, 1), (-26, 19), "axes fraction", "offset points", fontsize=9.5, weight="bold"
            )
            self._ratios(time, own, "time_ratio", "Time ratio to non-private")
            self._ratios(memory, own, "memory_ratio", "Peak memory ratio to non-private")
            self._seconds(third, own)
            for axes in (time, memory, third):
                sizes = sorted(set(own[self.size]))
                logarithmic(axes.xaxis, form=_size, at=sizes)
                axes.set(xlim=(sizes[0] / 1.25, sizes[-1] * 1.25), xlabel=self.words)
        drawn = frame if frame.step_seconds.isna().all() else frame[frame.step_seconds.notna()]
        signs = [sign(style.backend(name)) for name in sorted(set(drawn.backend), key=style.backend_key)]
        legend(figure, signs, right=True, ncols=9, columnspacing=1.0, handletextpad=0.5)
        return figure

    def _ratios(self, axes: Axes, own: pd.DataFrame, column: str, title: str) -> None:
        axes.set_title(title, fontsize=8.6, weight="normal")
        known = own.reindex(columns=[column, f"{column}_low", f"{column}_high", f"published_{column}"]).astype(float)
        low, high = min(0.9, known.min().min()) / 1.06, max(1.5, known.max().max()) * 1.12
        measured = set(own.backend[own.step_seconds.notna()])
        failed = own[own.step_seconds.isna() & own.backend.isin(measured)]  # the caption names the others
        if len(failed):  # leave room above the lines for their names
            high *= (high / low) ** (0.07 * failed[self.size].value_counts().max())
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        few = ticks if len(ticks) < 9 else [t for t in ticks if t not in (1.5, 7)]
        logarithmic(axes.yaxis, form="{x:g}×", at=few)
        axes.set_ylim(low, high)
        axes.axhline(1, **REFERENCE)
        for backend, line in own[own.backend != "nonprivate"].groupby("backend", sort=False):
            self._line(axes, str(backend), line, column)
        for at, here in failed.groupby(self.size, sort=False):
            last = at == max(own[self.size])
            looks: dict[str, Any] = {"fontsize": 6.8, "color": style.FAILURE, "ha": "right" if last else "center"}
            place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            for index, backend in enumerate(here.backend):
                name, offset = f"✕ {style.backend(backend).name}", (6 if last else 0, -9 - 9 * index)
                axes.annotate(name, (float(str(at)), 1), offset, **place, **looks)

    def _seconds(self, axes: Axes, own: pd.DataFrame) -> None:
        title = f"Throughput ({self.sample}s per second)" if self.rate else f"Time per {self.sample}"
        axes.set_title(title, fontsize=8.6, weight="normal")
        column = "samples_per_second" if self.rate else "seconds_per_sample"
        known = own[column].dropna().astype(float)
        low, high = (known.min() / 2, known.max() * 1.5) if len(known) else (0.5, 1.5)
        form = "{x:g}" if self.rate else lambda value, _: f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"
        logarithmic(axes.yaxis, (1.0, 2.0, 5.0) if high / low < 200 else (1.0,), form)
        axes.set_ylim(low, high)
        for backend, line in own.groupby("backend", sort=False):
            self._line(axes, str(backend), line, column)
        base = own[(own.backend == "nonprivate") & own.seconds_per_sample.notna()]
        if len(base) < 2:
            return
        start, end = float(base[self.size].iloc[0]), float(base[self.size].iloc[-1])
        last = 0.6 * float(base.seconds_per_sample.iloc[-1])
        for exponent, words in self.laws:
            first = max(start, end * (low / last) ** (1 / exponent))
            at = first * (end / first) ** 0.4
            ys = [last * (x / end) ** exponent for x in (first, at, end)]
            axes.plot([first, at, end], ys, color=style.FAINT, linewidth=0.9, linestyle=(0, (1, 1.6)), zorder=1.5)
            looks: dict[str, Any] = {"fontsize": 7.2, "color": style.FAINT, "va": "top"}
            axes.annotate(words, (at, ys[1]), (3, -2), textcoords="offset points", **looks)

    def _line(self, axes: Axes, backend: str, line: pd.DataFrame, column: str) -> None:
        look = style.backend(backend)
        ends = [column, f"{column}_low", f"{column}_high", f"published_{column}"]
        known = line.reindex(columns=ends).astype(float).set_axis(line[self.size].astype(float))
        value, low, high, told = (known[name] for name in ends)
        # sizes at which it failed are gaps in the line
        axes.plot(known.index, value, color=look.color, marker=look.marker, zorder=3)
        axes.vlines(known.index, low, high, color=look.color, linewidth=1.0, zorder=2.8)
        hollow: dict[str, Any] = {"linestyle": "", "markersize": 7, "markerfacecolor": "white", "zorder": 3.5}
        axes.plot(told.dropna().index, told.dropna(), color=look.color, marker=look.marker, **hollow)


def _size(value: float, _: int) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _figure(growth: Growth, *by: str) -> FigureKind:
    return FigureKind(
        kinds=("overhead",),
        cell=overhead.cell,
        by=("experiment", "precision", "threads", *by),
        table=growth.table,
        text=growth.text,
        caption=growth.caption,
        plot=growth.plot,
        applies=lambda records: bool(growth.growing(records)),
        finding=findings.paired,
        setting=True,
    )


RESOLUTION = Growth(
    size="image_size",
    words="image size (pixels along an edge)",
    unit="pixels",
    sample="image",
    of=lambda record: (record.trial["model"], record.trial.get("image_size")),
    laws=((2, "∝ pixels²"),),
)
THROUGHPUT = Growth(
    size="batch_size",
    words="batch size",
    unit="samples",
    sample="sample",
    of=lambda record: (record.trial["model"], batch(record)),
    rate=True,
)
SEQUENCE_LENGTH = Growth(
    size="tokens",
    words="sequence length (tokens)",
    unit="tokens",
    sample="sequence",
    of=lambda record: style.without_length(record.trial["model"]),
    laws=((1, "∝ T"), (2, "∝ T²")),
)
FIGURES = {
    "resolution": _figure(RESOLUTION),
    "sequence_length": _figure(SEQUENCE_LENGTH),
    "throughput": _figure(THROUGHPUT, "image_size"),
}
