"""From records to figures and tables. Reads JSON lines, draws with matplotlib, and imports no torch.

For each device, each kind of figure and each setting (precision, input size, budget, threads) there is one figure as
PNG, SVG and PDF, and the table behind it as CSV (base units), Markdown (for people, with the caption) and LaTeX; and
one page, ``report.html``, has them all. The same records give the same bytes, so that committed figures change only
when what was measured does.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from dpbench.errors import one_of
from dpbench.records.store import slug
from dpbench.report import (
    accounting_map,
    audit,
    beside,
    captions,
    claims,
    coverage,
    decisions,
    distributed,
    evidence,
    files,
    findings,
    growth,
    memory_accuracy,
    overhead,
    page,
    plain,
    plots,
    privacy,
    privacy_plots,
    readable,
    scheme_plot,
    scorecard,
    sensitivity,
    style,
    tables,
    time_to,
    training_step,
    trajectories,
    utility,
)
from dpbench.report.paired import entries
from dpbench.report.parts import Claim, FigureKind, Part
from dpbench.report.pictures import Pictures
from dpbench.report.select import LeftOut, Record, by_device, facets, newest, newest_version, read

__all__ = ["FIGURES", "Claim", "FigureKind", "LeftOut", "Part", "write_report"]

_MODELS_SETTING = ("experiment", "precision", "image_size", "memory_budget")


FIGURES = {
    "max_batch_throughput": FigureKind(
        "maximum batch size in a memory budget, and throughput (Figure 3 of arXiv:2205.10683)",
        ("peak", "step", "overhead"),
        tables.max_batch_cell,
        {**dict.fromkeys(_MODELS_SETTING, ("peak", "step", "overhead")), "threads": ("step", "overhead")},
        tables.max_batch_throughput,
        readable.max_batch_throughput,
        captions.max_batch_throughput,
        plots.max_batch_throughput,
        tables.max_batch_applies,
        finding=findings.max_batch,
    ),
    "memory_speed_table": FigureKind(
        "time and memory beside ordinary training (Table 4 of arXiv:2205.10683)",
        ("step",),
        lambda r: (*r.cell, r.trial["batch_size"]),
        dict.fromkeys((*_MODELS_SETTING, "threads"), ("step",)),
        tables.memory_speed,
        readable.memory_speed,
        captions.memory_speed,
        plots.memory_speed,
        finding=findings.paired,
    ),
    "memory_accuracy": FigureKind(
        "simulated beside measured peak memory of a step, by model, backend and part of the step",
        ("peak",),
        memory_accuracy.cell,
        dict.fromkeys(("experiment", "precision", "image_size"), ("peak",)),
        memory_accuracy.table,
        memory_accuracy.text,
        memory_accuracy.caption,
        memory_accuracy.plot,
        memory_accuracy.applies,
    ),
    "epsilon_epochs": FigureKind(
        "ε against epochs for the accountants (Figure 2 of Abadi et al. 2016)",
        ("epsilon",),
        lambda r: (r.trial["accountant"], r.trial["steps"]),
        dict.fromkeys(("experiment", "sample_rate", "noise_multiplier", "delta"), ("epsilon",)),
        tables.epsilon,
        readable.epsilon,
        captions.epsilon,
        privacy_plots.epochs,
        finding=findings.epsilon,
    ),
    "epsilon_sweeps": FigureKind(
        "ε along σ, q and δ by each accountant, and how far each is from the certified lower bound",
        ("epsilon_sweep",),
        lambda r: r.id,
        {"experiment": ("epsilon_sweep",)},
        privacy.points,
        privacy.points_text,
        privacy.sweeps_caption,
        privacy_plots.sweeps,
        finding=findings.points,
    ),
    "sampling_schemes": FigureKind(
        "ε of each sampling scheme and adjacency, at equal records, batch size, noise and epochs",
        ("epsilon_scheme",),
        lambda r: r.id,
        dict.fromkeys(("experiment", "sample_rate", "steps", "delta"), ("epsilon_scheme",)),
        privacy.schemes,
        privacy.schemes_text,
        privacy.schemes_caption,
        scheme_plot.plot,
        finding=findings.schemes,
    ),
    "accountant_price": FigureKind(
        "the steps that each accountant allows, and the noise that it asks for, at a target ε",
        ("calibration",),
        lambda r: r.id,
        dict.fromkeys(("experiment", "sample_rate", "delta"), ("calibration",)),
        privacy.prices,
        privacy.prices_text,
        privacy.prices_caption,
        privacy_plots.prices,
        finding=findings.prices,
    ),
    "accounting_map": FigureKind(
        "time, failures and distance from the lower bound of each accountant over (q, σ, T, δ)",
        ("epsilon_map",),
        lambda r: r.id,
        {"experiment": ("epsilon_map",)},
        privacy.points,
        privacy.points_text,
        privacy.map_caption,
        accounting_map.plot,
        finding=findings.points,
    ),
    "overhead": FigureKind(
        "time and memory of every backend beside ordinary training, interleaved in one process",
        ("overhead",),
        overhead.cell,
        dict.fromkeys(("experiment", "precision", "threads"), ("overhead",)),
        overhead.table,
        overhead.text,
        overhead.caption,
        overhead.plot,
        finding=findings.paired,
    ),
    "training_step": training_step.FIGURE,
    "resolution": FigureKind(
        "time, memory and their growth against the size of the images",
        ("overhead",),
        overhead.cell,
        dict.fromkeys(("experiment", "precision", "threads"), ("overhead",)),
        growth.RESOLUTION.table,
        growth.RESOLUTION.text,
        growth.RESOLUTION.caption,
        growth.RESOLUTION.plot,
        growth.RESOLUTION.applies,
        finding=findings.paired,
    ),
    "sequence_length": FigureKind(
        "time, memory and their growth against the length of the sequences",
        ("overhead",),
        overhead.cell,
        dict.fromkeys(("experiment", "precision", "threads"), ("overhead",)),
        growth.SEQUENCE_LENGTH.table,
        growth.SEQUENCE_LENGTH.text,
        growth.SEQUENCE_LENGTH.caption,
        growth.SEQUENCE_LENGTH.plot,
        growth.SEQUENCE_LENGTH.applies,
        finding=findings.paired,
    ),
    "throughput": FigureKind(
        "throughput, and time and memory beside ordinary training, against the batch size",
        ("overhead",),
        overhead.cell,
        dict.fromkeys(("experiment", "precision", "threads", "image_size"), ("overhead",)),
        growth.THROUGHPUT.table,
        growth.THROUGHPUT.text,
        growth.THROUGHPUT.caption,
        growth.THROUGHPUT.plot,
        growth.THROUGHPUT.applies,
        finding=findings.paired,
    ),
    "beside_papers": FigureKind(
        "papers' figures again: Figure 4 of arXiv:2205.10683, Figures 4 and 5 of arXiv:2210.00038",
        ("overhead", "peak", "step"),
        beside.cell,
        {
            **dict.fromkeys(("experiment", "precision"), ("overhead", "peak", "step")),
            "memory_budget": ("peak", "step"),
            "threads": ("overhead",),
        },
        beside.table,
        beside.text,
        beside.caption,
        beside.plot,
        beside.applies,
        finding=beside.finding,
    ),
    "decision_map": FigureKind(
        "ghost norm or instantiated gradient in each layer, by the papers' rule and by ours",
        ("explain",),
        lambda r: r.id,
        {"experiment": ("explain",)},
        decisions.table,
        decisions.text,
        decisions.caption,
        decisions.plot,
        decisions.applies,
        finding=decisions.finding,
    ),
    "claims": FigureKind(
        "what papers claim, and what these records say to it",
        ("overhead", "peak", "step"),
        claims.cell,
        {},
        claims.table,
        claims.text,
        claims.caption,
        None,
        claims.applies,
        finding=claims.finding,
        claims=claims.claims,
        with_causes=False,
    ),
    "scorecard": FigureKind(
        "is each backend exact, does it refuse, or is it wrong, on every conformance case",
        ("conformance", "sensitivity"),
        lambda r: (r.kind, r.trial["backend"], r.trial.get("dtype")),
        {"experiment": ("conformance",)},
        scorecard.table,
        scorecard.text,
        scorecard.caption,
        scorecard.plot,
        scorecard.applies,
        finding=findings.scorecard,
    ),
    "coverage": coverage.SHARES,
    "coverage_reasons": coverage.REASONS,
    "sensitivity": sensitivity.KIND,
    "utility": FigureKind(
        "accuracy against ε by model and clipping function, beside ordinary training",
        ("utility",),
        lambda r: r.id,
        {"experiment": ("utility",)},
        utility.table,
        utility.text,
        utility.caption,
        utility.plot,
        finding=findings.utility,
    ),
    "utility_curves": FigureKind(
        "accuracy against epochs by ε, and the distance of each exact backend from the oracle on the way",
        ("utility",),
        lambda r: r.id,
        {"experiment": ("utility",)},
        trajectories.table,
        trajectories.text,
        trajectories.caption,
        trajectories.plot,
    ),
    "time_to_accuracy": FigureKind(
        "epochs and seconds until a model is nearly as accurate as by ordinary training, by ε and by backend",
        ("utility",),
        lambda r: r.id,
        {"experiment": ("utility",)},
        time_to.table,
        time_to.text,
        time_to.caption,
        time_to.plot,
        time_to.applies,
    ),
    "audit": FigureKind(
        "which tests of an audit refute what an engine claims: the engine as it is, and with seeded faults",
        ("audit",),
        lambda r: r.id,
        {"experiment": ("audit",)},
        audit.table,
        audit.text,
        audit.caption,
        audit.plot,
    ),
    "distributed": FigureKind(
        "throughput and memory of private beside ordinary training in several processes, under DDP and FSDP2",
        ("distributed",),
        lambda r: r.id,
        dict.fromkeys(("experiment", "threads"), ("distributed",)),
        distributed.table,
        distributed.text,
        distributed.caption,
        distributed.plot,
    ),
    **evidence.FIGURES,
}


def write_report(
    source: Path, output: Path, figures: Sequence[str] = tuple(FIGURES), again: str | None = None
) -> list[Path]:
    """Draw the named figures from the records (``*.jsonl``) below `source`, into ``output/<device>/``, and the page.

    Records of a kind that none of the named figures is drawn from have a table of their own.

    Args:
        source: a folder; runs in a folder ``*-smoke`` below it are passed over.
        output: a folder, made if missing; the page of all figures is its ``report.html``.
        figures: names out of `FIGURES`; one for which there are no records is passed over.
        again: the command that makes the page again, to stand on it.

    Returns:
        The files written, the page last. Empty if there are no records.

    Raises:
        UsageError: for a figure that is not known.
        OSError: if `output` cannot be written to.
    """
    chosen = {name: FIGURES[one_of("a figure", name, FIGURES)] for name in figures}
    records = read(source)
    if not records:
        return []
    again = again or f"python -m dpbench report {shlex.quote(str(source))}"
    with matplotlib.rc_context(), Pictures() as pictures:
        matplotlib.rcdefaults()  # a figure does not depend on the matplotlibrc of whoever draws it
        matplotlib.rcParams.update(style.RC)
        parts = [_written(part, output, pictures) for part in _parts(records, chosen)]
        others = {r.kind for r in records} - {r.kind for part in parts for r in part.records}
        # a kind is named by whoever wrote the record, and must be no way to another folder
        named = {kind: kind if kind.isidentifier() and len(kind) < 80 else slug(kind) for kind in sorted(others)}
        tables = {f"trials-{name}": plain.kind_of(kind) for kind, name in named.items()}
        parts += [_written(part, output, pictures) for part in _parts(records, tables)]
        output.mkdir(parents=True, exist_ok=True)
        path = page.write(output / "report.html", parts, again)
    return [*(output / name for part in parts for name in part.files.values()), path]


def _written(part: Part, output: Path, pictures: Pictures) -> Part:
    folder = output / slug(part.device)
    written = files.write(part, folder, pictures)
    return dataclasses.replace(part, files={p.suffix[1:].upper(): f"{folder.name}/{p.name}" for p in written})


def _parts(records: Sequence[Record], chosen: Mapping[str, FigureKind]) -> Iterator[Part]:
    for own_device in by_device(records).values():
        kinds = [record.kind for record in own_device]
        for name, kind in chosen.items():
            own = [record for record, is_of in zip(own_device, kinds, strict=True) if is_of in kind.kinds]
            for setting, part in facets(own, kind.facets):
                if kind.applies(part):
                    labels = (slug(f"{field}-{_short(field, value)}") for field, value in setting.items())
                    yield _part(part, kind, "-".join([name, *labels]), setting)


def _short(field: str, value: Any) -> str:
    return (
        style.size(value).replace(" ", "")
        if field == "memory_budget"
        else style.plain(value)
        if isinstance(value, float)
        else str(value)
    )


def _part(records: Sequence[Record], kind: FigureKind, name: str, setting: Mapping[str, Any]) -> Part:
    """The figure and the table of one setting, and what is to be said of them."""
    left_out: LeftOut = LeftOut()
    kept = newest_version(newest(records, left_out), kind.cell, left_out)
    frame = kind.table(kept, left_out)
    caption = kind.caption(kept, frame, left_out)
    return Part(
        name=name,
        title=kind.doc,
        device=records[0].device,
        setting=setting,
        records=kept,
        frame=frame,
        text=kind.text(frame),
        caption=caption,
        finding=kind.finding(frame),
        claims=tuple(kind.claims(kept, frame)),
        causes=captions.causes(entries(kept)) if kind.with_causes else (),
        figure=kind.plot(frame, caption) if kind.plot is not None else None,
    )
