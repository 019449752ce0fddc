"""Maximum batch size in a memory budget, and throughput (Figure 3 of arXiv:2205.10683)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import pandas as pd
from matplotlib.figure import Figure

from dpbench.records.reader import LeftOut, Record, entries, grouped, newest_trial
from dpbench.report import captions, findings, readable, style
from dpbench.report.data import published, statistics
from dpbench.report.data.statistics import Row
from dpbench.report.drawing import bars
from dpbench.report.drawing.bars import Bar, Block, Panel
from dpbench.report.parts import FigureKind
from dpbench.report.readable import between, of
from dpbench.report.style import missing
from dpbench.trials.outcome import DOES_NOT_FIT

# The paper's figure is for 16 GB: any budget from 16e9 bytes to 16 GiB matches.
_PAPER_BUDGET = range(16_000_000_000, 16 * 2**30 + 1)
_SIZES = (
    *("model", "backend", "memory", "budget_bytes", "max_batch_size", "fails_at", "max_batch_note", "peak_bytes"),
    *("foretold_max_batch_size", "foretold_peak_error", "published_max_batch_size"),
)
_SPEEDS = (
    *("batch_size", "images_per_second", "images_per_second_low", "images_per_second_high", "rounds"),
    *("throughput_note", "published_images_per_second", "time_ratio", "time_ratio_low", "time_ratio_high"),
    *("max_norm_error", "max_grad_error", "ghost", "instantiated", "fallback", "model_flops_utilisation"),
)
COLUMNS = (*_SIZES, *_SPEEDS)


def cell(record: Record) -> tuple[object, ...]:
    """The key of records that add to the same number: all interleaved backends, or one backend."""
    if record.kind == "overhead":
        return record.kind, record.trial["model"]
    return record.kind, *record.cell, record.trial.get("simulated")


def table(records: Sequence[Record], left_out: LeftOut) -> pd.DataFrame:
    """The largest batch in the memory budget, and images per second.

    Args:
        records: `peak`, `step` and `overhead` records of one device and one setting (so of one memory budget at most).

    Returns:
        A row for each (model, backend, memory), where `memory` is 'simulated', 'measured', 'confirmed' (predicted, and
        confirmed by real steps), or empty without a search. `foretold_peak_error`: predicted / measured - 1. A time
        ratio is to ordinary training in the same process, if they were interleaved.
    """
    records = as_peaks(entries(records))
    models = {r.trial["model"] for r in records if statistics.is_probe(r)}
    if models:  # steps of other models belong to another figure
        others = [r for r in records if r.trial["model"] not in models]
        left_out["of a model without a search"] += len(others)
        records = [r for r in records if r.trial["model"] in models]
    wrong = {r.cell for r in records if r.outcome == "mismatch"}
    searched = {r.cell for r in records if r.kind == "peak"}
    # A search's own probes decide; a timed step shows that its batch fits only if there was no search.
    probes = grouped(
        (r for r in records if statistics.is_probe(r) and (r.kind == "peak" or r.cell not in searched)),
        lambda r: (r.cell, bool(r.trial.get("simulated"))),
    )
    found = [_max_batch(cell, group, simulated, cell in wrong) for (cell, simulated), group in probes.items()]
    sizes = _with_confirmed(found, probes.values())
    steps = grouped((r for r in records if r.kind in ("step", "overhead")), lambda r: r.cell)
    speeds = [
        _throughput(cell, group, steps.get((cell[0], "nonprivate"), []), left_out) for cell, group in steps.items()
    ]
    keys = ["model", "backend"]
    frame = statistics.frame_of(sizes, _SIZES).merge(
        statistics.frame_of(speeds, (*keys, *_SPEEDS)), on=keys, how="outer"
    )
    return statistics.in_order(frame, "model", "backend", "memory")


def _max_batch(cell: tuple[str, str], probes: list[Record], simulated: bool, wrong: bool) -> Row:
    """The search's result: the largest batch that fits below the smallest one that does not."""
    budget = probes[0].trial["memory_budget"]
    row: Row = {"model": cell[0], "backend": cell[1], "budget_bytes": budget}
    row["memory"] = "simulated" if simulated else "measured"
    if budget in _PAPER_BUDGET and probes[0].trial.get("image_size") == 32:
        row["published_max_batch_size"] = published.value("Figure 3", "max_batch_size_16GB", *cell)
    if wrong:  # wrong elsewhere in these records: its memory is not that of a clipped gradient
        return row | {"max_batch_note": style.OUTCOMES["mismatch"]}
    too_large = [r for r in probes if r.outcome in DOES_NOT_FIT]
    fails_at = min((statistics.batch(r) for r in too_large), default=math.inf)
    fits = [r for r in probes if r.outcome == "ok" and statistics.batch(r) < fails_at]
    failures = [r for r in probes if r.outcome not in ("ok", *DOES_NOT_FIT)]
    if too_large:
        row["fails_at"] = fails_at
    if not fits:
        return row | {
            "max_batch_note": statistics.why(failures or [r for r in too_large if statistics.batch(r) == fails_at])
        }
    best = max(fits, key=statistics.batch)
    size = statistics.batch(best)
    row |= {"max_batch_size": size, "peak_bytes": best.result["memory"]["peak_bytes"]}
    if failures:
        row["max_batch_note"] = f"search ended: {statistics.why(failures)}"
    elif not too_large:
        row["max_batch_note"] = "not limited by memory up to there"
    elif fails_at - size > max(1, 0.02 * size):
        row["max_batch_note"] = f"search unfinished: {fails_at} does not fit"
    return row


def _throughput(cell: tuple[str, str], steps: list[Record], ordinary: list[Record], left_out: LeftOut) -> Row:
    """Images per second at the largest timed batch, and the ratio to ordinary training if interleaved."""
    row: Row = {"model": cell[0], "backend": cell[1], "rounds": 0}
    good = statistics.good_rounds(steps)
    if not good:
        return row | {"throughput_note": statistics.why([r for r in steps if r.outcome != "ok"])}
    latest = max(good, key=lambda r: r.utc).kind  # alone or interleaved, as timed last
    size = max(statistics.batch(r) for r in good if r.kind == latest)
    good = newest_trial([r for r in good if statistics.batch(r) == size], left_out)
    if good[0].trial["device"] == "cuda" and good[0].trial.get("image_size") == 32:
        row["published_images_per_second"] = published.value("Figure 3", "max_throughput", *cell)
    if latest == "overhead":
        paired = statistics.paired_row(good, [r for r in ordinary if r.id == good[0].id])
        row |= {name: paired.get(name) for name in ("time_ratio", "time_ratio_low", "time_ratio_high")}
    rates = [size / seconds for seconds in statistics.turns(good).values()]
    exact = {name: value for name, value in statistics.exactness(good).items() if name != "tolerance"}
    row["model_flops_utilisation"] = statistics.utilisation(good, size / median(rates))
    return row | {"batch_size": size, "rounds": len(rates)} | statistics.spread("images_per_second", rates) | exact


def text(frame: pd.DataFrame) -> pd.DataFrame:
    """`table` for people."""
    columns: readable.Columns = {
        **readable.MODEL,
        **readable.BACKEND,
        "Memory": of("memory", str, "–"),
        "Maximum batch": lambda r: max_batch(r.max_batch_size, r.fails_at, r.max_batch_note),
        "Foretold": of("foretold_max_batch_size", "{:,}".format),
        "Its peak": of("foretold_peak_error", "{:+.1%}".format),
        "Published": of("published_max_batch_size", "{:,g}".format),
        "Images/s": of("images_per_second", style.number, "throughput_note"),
        "Range": between("images_per_second_low", "images_per_second_high", style.number),
        **readable.UTILISATION,
        "Rounds": of("rounds"),
        "Time ratio": of("time_ratio", style.times),
        "At B": of("batch_size"),
        "Published images/s": of("published_images_per_second", "{:,g}".format),
        **readable.EXACTNESS,
    }
    return readable.texts(frame, columns, ("Foretold", "Its peak", "MFU"))


def max_batch(size: Any, fails_at: Any, note: Any, memory: str = "") -> str:
    """'1,500', '≥ 16,384, not limited by memory up to there', or the reason for a missing number.

    Args:
        size, fails_at, note: of the search.
        memory: how it was taken, in parentheses.
    """
    if missing(size):
        return "–" if missing(note) else str(note)
    words = f"{'≥ ' if missing(fails_at) else ''}{size:,}{memory}"
    return words if missing(note) else f"{words}, {note}"


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> list[str]:
    sizes, speeds = frame.dropna(subset="max_batch_size"), frame.dropna(subset="images_per_second")
    said = [f"After Figure 3 of {published.PAPER}."]
    if len(sizes):
        said.append(f"Budget: {captions.join(map(style.size, sorted(set(sizes.budget_bytes))))}.")
        memory = {"measured": "measured", "simulated": "simulated under fake tensors (hatched), not measured"}
        memory["confirmed"] = "foretold by such a simulation, and confirmed by two real steps, there and 2 % beside it"
        said.append(f"Memory: {'; '.join(memory[source] for source in sorted(set(sizes.memory)))}.")
        said += foretold_said(frame)
        if frame.published_max_batch_size.notna().any():
            said.append("Published: read off that figure (±10), for its 16 GB GPU.")
        if (sizes.fails_at.isna()).any():
            said.append("≥: the largest batch that was tried fits.")
        if _unfinished(frame).any():
            said.append("†: the search did not end; the table says where.")
    if len(speeds):
        at = (
            "the batch size beside it" if speeds.batch_size.nunique() > 1 else f"batch size {speeds.batch_size.iloc[0]}"
        )
        said.append(f"Throughput: {at} over the median step time; {captions.rounds(speeds['rounds'])}.")
    said += statistics.utilisation_said(records, frame)
    if frame.time_ratio.notna().any():
        said.append("×: time of a step beside ordinary training's, the backends in turn in one process.")
    if frame.published_images_per_second.notna().any():
        said.append("Published throughput: from that figure (±9), on its GPU at its maximum batch.")
    return said


def _unfinished(frame: pd.DataFrame) -> pd.Series[bool]:
    """True for rows with a batch size from an unfinished search."""
    return frame.max_batch_size.notna() & frame.max_batch_note.fillna("").str.match("search (unfinished|ended)")


def plot(frame: pd.DataFrame, caption: str) -> Figure:
    """The panels that have records; below, models with memory alone."""
    frame = frame.assign(again=frame.duplicated(["model", "backend"]), unfinished=_unfinished(frame))
    sized = frame.max_batch_size.notna() | frame.max_batch_note.notna()
    timed = frame[frame.images_per_second.notna() | frame.throughput_note.notna()].model
    both = frame.model.isin(timed if len(timed) else frame.model)
    sizes = [_size_bar(row) for row in readable.rows(frame)]
    batches = frame.batch_size.dropna().unique()

    def block(chosen: pd.Series[bool], *, speeds: bool) -> Block:
        rows = readable.rows(frame[chosen])
        panels = []
        if sized.any() or not speeds:  # without numbers, a panel gives the reason
            known = frame.budget_bytes.dropna()
            budget = f" in {style.size(known.iloc[0])}" if len(known) else ""
            panels.append(
                Panel(f"Maximum batch size{budget}", "samples", [_size_bar(row) for row in rows], beside=sizes)
            )
        if speeds:
            at = f" at batch size {batches[0]}" if len(batches) == 1 else ""
            own = [_speed_bar(row, with_batch=len(batches) != 1) for row in rows]
            panels.append(Panel(f"Throughput{at}", "images per second", own))
        several = frame.memory.nunique() > 1
        return Block([bars.Row(style.model(r.model), r.backend, _label(r, several)) for r in rows], panels)

    above = block(both, speeds=bool(len(timed)))
    others = list(dict.fromkeys(frame[~both].model))
    middle = len(others) - len(others) // 2
    halves = [others[:middle], others[middle:]]
    below = [block(frame.model.isin(half), speeds=False) for half in halves if half]
    return bars.bars(above.rows, above.panels, caption, below=below)


def _label(row: Any, several: bool) -> str:
    """The name of a row; a backend's second row has its source of memory alone."""
    if several and row.again:
        return str(row.memory)
    return style.backend(row.backend).name + (" (simulated)" if several and row.memory == "simulated" else "")


def _size_bar(row: Any) -> Bar:
    told = row.foretold_max_batch_size
    at_least = missing(row.fails_at) and not row.unfinished

    def text(size: int) -> str:
        beside = "" if missing(told) or told == size else f" (foretold {told:,})"
        return f"{'≥ ' if at_least else ''}{size:,}{' †' if row.unfinished else ''}{beside}"

    simulated = row.memory == "simulated"
    return bars.bar(row, "max_batch_size", text, "max_batch_note", simulated=simulated, at_least=at_least)


def _speed_bar(row: Any, with_batch: bool) -> Bar:
    if row.again:  # the row above has the same timing, with another kind of memory
        return Bar(text=" ")
    detail = f"B={row.batch_size}" if with_batch else of("time_ratio", style.times)(row)
    return bars.bar(row, "images_per_second", style.number, "throughput_note", detail=detail)


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
            found.append(msgspec.structs.replace(record, trial=trial))
        for probe in record.result.get("probes", ()):
            memory = probe.get("memory") or ({"peak_bytes": probe["peak_bytes"]} if "peak_bytes" in probe else None)
            changes: dict[str, Any] = {
                "trial": trial | {"batch_size": probe["batch_size"]},
                "outcome": "ok" if probe["fits"] else "oom" if memory is None else "over_budget",
                "result": {} if memory is None else {"memory": memory},
            }
            found.append(msgspec.structs.replace(record, **changes))
    return found


def _with_confirmed(rows: Sequence[Row], probes: Iterable[Sequence[Record]]) -> list[Row]:
    """The rows of `max_batch_throughput.table`, with each prediction and its confirmation in one row."""
    known: dict[tuple[str, str], dict[str, tuple[Row, Sequence[Record]]]] = {}
    for row, own in zip(rows, probes, strict=True):
        confirms = any(record.trial.get("confirms") for record in own)
        known.setdefault((row["model"], row["backend"]), {})[CONFIRMED if confirms else row["memory"]] = row, own
    found = []
    for rows_of in known.values():
        if CONFIRMED in rows_of and "simulated" in rows_of:
            found.append(_joined(*rows_of.pop("simulated"), *rows_of.pop(CONFIRMED)))
        found += [row for row, _ in rows_of.values()]
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
    return {statistics.batch(r): r.result["memory"]["peak_bytes"] for r in records if r.result.get("memory")}


def foretold_said(frame: Any) -> list[str]:
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


FIGURE = FigureKind(
    kinds=("peak", "largest", "confirm", "step", "overhead"),
    cell=cell,
    by=("experiment", "precision", "image_size", "memory_budget"),
    facets={"threads": ("step", "overhead")},
    table=table,
    text=text,
    caption=_caption,
    plot=plot,
    applies=lambda records: any(r.kind == "step" or r.trial.get("memory_budget") is not None for r in records),
    finding=findings.max_batch,
    setting=True,
)
