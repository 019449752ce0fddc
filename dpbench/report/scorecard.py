"""The scorecard of all experiments: a row for each backend, and the claims of papers; every cell names its records.

Functions take:
    records: of a folder of results.
    found: the columns.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipping import BACKENDS
from dpbench.conformance.sensitivity.scorecard import in_units
from dpbench.records.reader import LeftOut, Record, by_device, entries, newest, read
from dpbench.report import captions, style
from dpbench.report.data.claims import NOT_MEASURED, VERDICTS
from dpbench.report.data.statistics import kept
from dpbench.report.figures import claims, coverage, overhead, sensitivity
from dpbench.report.output import PAGES, page
from dpbench.report.output.files import write_text
from dpbench.report.readable import rows
from dpbench.report.style import missing, times
from dpbench.report.summary import several
from dpbench.trials.whole_step import JAX_PRIVACY

#: Without a row of its own: ordinary training is the unit.
_ORDINARY = "nonprivate"
#: kind of trial -> (heading, experiment that measures it)
_STEPS = {
    "training_step": ("Whole step with noise and optimizer", "training_step"),
    "overhead": ("Forward, backward and clipping alone", "overhead"),
}


@dataclass
class Cell:
    """One cell: its words ("" if not measured), further words, and the files of its records."""

    text: str = ""
    more: str = ""
    files: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Column:
    """A heading, the method and machine, a cell for each backend that has one, and the command that measures it."""

    heading: str
    about: str
    cells: dict[str, Cell]
    command: str

    def of(self, backend: str) -> Cell:
        """The cell of a backend."""
        return self.cells.get(backend, Cell())


def columns(records: Sequence[Record]) -> list[Column]:
    """The columns: exact cases, exact models, moves of the sum, times and memory by device, refusals."""
    exact, refused = _conformance([r for r in records if r.kind == "conformance"])
    return [
        exact,
        _coverage([r for r in records if r.kind == r.experiment == "coverage"]),
        _moves([r for r in records if r.kind == r.experiment == "sensitivity"]),
        *(_step(records, kind, device) for kind in _STEPS for device in ("cpu", "cuda")),
        refused,
    ]


def backends(found: Iterable[Column]) -> list[str]:
    """The backends with a cell, in the usual order."""
    known = {*BACKENDS, JAX_PRIVACY}
    return sorted({name for column in found for name in column.cells if name in known}, key=style.backend_key)


def judged(records: Sequence[Record]) -> list[tuple[Any, list[tuple[str, Any, list[Path]]]]]:
    """Each claim with (device, its row, its files) of the devices that measured it, the latest first."""
    found: dict[str, list[tuple[str, Any, list[Path]]]] = {}
    stated: dict[str, Any] = {}
    for device, own in by_device(records).items():
        used = kept([r for r in own if r.kind in claims.FIGURE.kinds], claims.cell, LeftOut())
        if not used:
            continue
        for row in rows(claims.table(used, LeftOut(), every=True)):
            stated.setdefault(row.claim, row)
            if row.verdict != NOT_MEASURED:
                names = row.records.split()
                files = _files(record for record in used if f"{record.run}.jsonl" in names)
                found.setdefault(row.claim, []).append((device, row, files))
    return [(row, found.get(name, [])) for name, row in stated.items()]


def _files(records: Iterable[Record]) -> list[Path]:
    return sorted({record.path for record in records if record.path is not None})


def _latest(records: Sequence[Record], of: Callable[[Record], Iterable[str]]) -> tuple[str, list[Record]]:
    """The device with the most backends (the latest measured of several), and its records."""
    groups = list(by_device(records).items())  # the latest first
    if not groups:
        return "", []
    return max(groups, key=lambda group: len({name for record in group[1] for name in of(record)}))


def _conformance(records: Sequence[Record]) -> tuple[Column, Column]:
    device, own = _latest(records, lambda r: [r.trial["backend"]])
    exact, refused = {}, {}
    for record in newest(own, LeftOut()):
        cases: dict[str, list[str]] = {"exact": [], "wrong": [], "refuses": []}
        for row in record.result.get("rows") or []:
            cases[row["result"]].append(row["case"])
        count = sum(map(len, cases.values()))
        backend, files, wrong, refuses = record.trial["backend"], _files([record]), cases["wrong"], cases["refuses"]
        if count:
            named = f"Wrong: {', '.join(wrong)}" if wrong else ""
            exact[backend] = Cell(f"{len(cases['exact'])} of {count}, {len(wrong)} wrong", named, files)
            refused[backend] = Cell(f"{len(refuses)} of {count} cases", ", ".join(refuses), files)
    command = "dpbench run conformance"
    return (
        Column("Exact in hard cases", f"verification of the first batch is off; {device}", exact, command),
        Column("Refuses", f"of the hard cases; {device}", refused, command),
    )


def _coverage(records: Sequence[Record]) -> Column:
    device, own = _latest(records, lambda r: r.trial["backends"])
    used = kept(own, captions.libraries, LeftOut())
    frame = coverage.table(used, LeftOut())
    cells = {
        row.backend: Cell(
            f"{row.exact / row.built:.1%} of {row.built}" if row.built else "",
            f"{row.refused} refused, {row.wrong} wrong, {row.crash} crashed",
            _files(used),
        )
        for row in rows(frame[frame.library == coverage.ALL])
    }
    return Column("Exact on public models", f"timm, torchvision, transformers; {device}", cells, "dpbench run coverage")


def _moves(records: Sequence[Record]) -> Column:
    device, own = _latest(records, lambda r: [r.trial["backend"]])
    used = kept(own, sensitivity.FIGURE.cell, LeftOut())
    frame = sensitivity.table(used, LeftOut())
    cells = {}
    for backend, group in frame.groupby("backend"):
        furthest = {str(dtype): part.excess.dropna().astype(float).max() for dtype, part in group.groupby("dtype")}
        texts = {dtype: in_units(value) for dtype, value in furthest.items() if not missing(value)}
        files = _files(record for record in used if record.trial["backend"] == backend)
        first = texts.pop("float32", "")
        cells[str(backend)] = Cell(first, ", ".join(f"{dtype}: {said}" for dtype, said in texts.items()), files)
    about = f"float32; should be at most 1 C; {device}"
    return Column("The furthest that one record moves the sum", about, cells, "dpbench run sensitivity")


def _step(records: Sequence[Record], kind: str, device_type: str) -> Column:
    """Time and memory beside ordinary training: medians over the models that a backend ran, eager, in float32."""
    heading, experiment = _STEPS[kind]
    figure = overhead.FIGURES[kind]
    wanted = {"device": device_type, "precision": "float32", "way": "eager"}
    own = [r for r in records if r.kind == kind and r.experiment in (experiment, "evidence")]
    chosen = [r for r in own if wanted.items() <= {"way": "eager", **r.trial}.items()]
    device, own = _latest(chosen, lambda r: r.trial["backends"])
    used = kept(own, figure.cell, LeftOut())
    frame = overhead.table(used, LeftOut())
    cells = {}
    for backend, group in frame[frame.backend != _ORDINARY].groupby("backend"):
        records_of = [r for r in entries(used) if r.trial["backend"] == backend]
        good = group[group.time_ratio.notna()]
        if good.empty:
            cells[str(backend)] = Cell("no number", ", ".join(group.note.dropna().unique()), _files(records_of))
            continue
        ratios = {"time": good.time_ratio.astype(float), "memory": good.memory_ratio.dropna().astype(float)}
        ratios = {what: values for what, values in ratios.items() if len(values)}
        spans = [f"{times(values.min())} to {times(values.max())} in {what}" for what, values in ratios.items()]
        cells[str(backend)] = Cell(
            ", ".join(times(values.median()) for values in ratios.values()),
            f"{', '.join(spans)}, on {several(len(good), 'model')}",
            _files(r for r in records_of if r.outcome == "ok"),
        )
    name = {"cpu": "CPU", "cuda": "GPU"}[device_type]
    about = f"time, peak memory × ordinary training's; median over models; {device or name}"
    return Column(f"{heading}, {name}", about, cells, f"dpbench run {experiment} --device {device_type}")


def write(source: Path, path: Path, again: str) -> Path | None:
    """Write the page of all records below a folder; None without records."""
    records = read(source)
    if not records:
        return None
    found = columns(records)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = PAGES.get_template("scorecard.html.j2").render(
        columns=found,
        backends=backends(found),
        name=lambda backend: style.backend(backend).name,
        claims=judged(records),
        verdicts=VERDICTS,
        href=lambda file: page.beside(path.parent, file),
        again=again,
        source=page.beside(path.parent, source),
    )
    write_text(path, text)
    return path
