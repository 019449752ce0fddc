"""From records to figures and tables. Reads JSON lines, draws with matplotlib, and imports no torch.

For each device, each kind of figure and each setting (precision, input size, budget, threads) there is one figure as
PNG, SVG and PDF, and the table behind it as CSV (base units) and Markdown (for people, with the caption). The same
records give the same bytes, so that committed figures change only when what was measured does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from dpbench.errors import one_of
from dpbench.report import (
    accounting_map,
    audit,
    captions,
    distributed,
    growth,
    overhead,
    plots,
    privacy,
    privacy_plots,
    readable,
    scheme_plot,
    scorecard,
    style,
    tables,
    time_to,
    trajectories,
    utility,
)
from dpbench.report.paired import entries
from dpbench.report.select import LeftOut, Record, by_device, facets, newest, newest_version, read
from dpbench.store import slug

_MODELS_SETTING = ("experiment", "dtype", "image_size", "memory_budget")
# Pixels an inch, and pixels at most: Agg draws no image of 2**16 or more.
_DPI, _TALLEST = 200, 30_000


@dataclass(frozen=True)
class FigureKind:
    """How one kind of figure is made.

    Args:
        doc: one line.
        kinds: the kinds of trial that it is drawn from.
        cell: what of a record tells whether it adds to the same number as another.
        facets: field of the trial -> the kinds it applies to; there is a figure for each of its values.
        table: from records to numbers.
        text: from numbers to words, for people.
        caption: what they are numbers of.
        plot: the picture of them.
        applies: whether such records make this figure at all.
    """

    doc: str
    kinds: tuple[str, ...]
    cell: Callable[[Record], Hashable]
    facets: Mapping[str, tuple[str, ...]]
    table: Callable[[Sequence[Record], LeftOut], pd.DataFrame]
    text: Callable[[pd.DataFrame], pd.DataFrame]
    caption: Callable[[Sequence[Record], pd.DataFrame, LeftOut], str]
    plot: Callable[[pd.DataFrame, str], Figure]
    applies: Callable[[Sequence[Record]], bool] = lambda records: True


FIGURES = {
    "max_batch_throughput": FigureKind(
        "maximum batch size in a memory budget, and throughput (Figure 3 of arXiv:2205.10683)",
        ("peak", "step"),
        lambda r: (r.kind, *r.cell, r.trial.get("simulated")),
        {**dict.fromkeys(_MODELS_SETTING, ("peak", "step")), "threads": ("step",)},
        tables.max_batch_throughput,
        readable.max_batch_throughput,
        captions.max_batch_throughput,
        plots.max_batch_throughput,
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
    ),
    "overhead": FigureKind(
        "time and memory of every backend beside ordinary training, interleaved in one process",
        ("overhead",),
        overhead.cell,
        dict.fromkeys(("experiment", "dtype", "threads"), ("overhead",)),
        overhead.table,
        overhead.text,
        overhead.caption,
        overhead.plot,
    ),
    "resolution": FigureKind(
        "time, memory and their growth against the size of the images",
        ("overhead",),
        overhead.cell,
        dict.fromkeys(("experiment", "dtype", "threads"), ("overhead",)),
        growth.RESOLUTION.table,
        growth.RESOLUTION.text,
        growth.RESOLUTION.caption,
        growth.RESOLUTION.plot,
        growth.RESOLUTION.applies,
    ),
    "sequence_length": FigureKind(
        "time, memory and their growth against the length of the sequences",
        ("overhead",),
        overhead.cell,
        dict.fromkeys(("experiment", "dtype", "threads"), ("overhead",)),
        growth.SEQUENCE_LENGTH.table,
        growth.SEQUENCE_LENGTH.text,
        growth.SEQUENCE_LENGTH.caption,
        growth.SEQUENCE_LENGTH.plot,
        growth.SEQUENCE_LENGTH.applies,
    ),
    "scorecard": FigureKind(
        "is each backend exact, does it refuse, or is it wrong, on every conformance case",
        ("conformance",),
        lambda r: r.trial["backend"],
        {"experiment": ("conformance",)},
        scorecard.table,
        scorecard.text,
        scorecard.caption,
        scorecard.plot,
    ),
    "utility": FigureKind(
        "accuracy against ε by model and clipping function, beside ordinary training",
        ("utility",),
        lambda r: r.id,
        {"experiment": ("utility",)},
        utility.table,
        utility.text,
        utility.caption,
        utility.plot,
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
        "the ε that an audit certifies from below, beside the one claimed: a sound engine, and seeded faults",
        ("audit",),
        lambda r: r.id,
        {"experiment": ("audit",)},
        audit.table,
        audit.text,
        audit.caption,
        audit.plot,
    ),
}


def write_report(source: Path, output: Path, figures: Sequence[str] = tuple(FIGURES)) -> list[Path]:
    """Draw the named figures from the records (``*.jsonl``) below `source`, into ``output/<device>/``.

    Args:
        source: a folder; runs in a folder ``*-smoke`` below it are passed over.
        output: a folder, made if missing.
        figures: names out of `FIGURES`; one for which there are no records is passed over.

    Returns:
        The files written. Empty if there are no records for any of the figures.

    Raises:
        UsageError: for a figure that is not known.
        OSError: if `output` cannot be written to.
    """
    chosen = {name: FIGURES[one_of("a figure", name, FIGURES)] for name in figures}
    paths: list[Path] = []
    for device, records in by_device(read(source)).items():
        for name, kind in chosen.items():
            own = [record for record in records if record.kind in kind.kinds]
            for setting, part in facets(own, kind.facets):
                if not kind.applies(part):
                    continue
                stem = "-".join([name, *(slug(f"{field}-{_short(field, value)}") for field, value in setting.items())])
                paths += _write(part, kind, output / slug(device), stem)
    return paths


def _short(field: str, value: Any) -> str:
    return (
        style.size(value).replace(" ", "")
        if field == "memory_budget"
        else style.plain(value)
        if isinstance(value, float)
        else str(value)
    )


def _write(records: Sequence[Record], kind: FigureKind, folder: Path, stem: str) -> list[Path]:
    left_out: LeftOut = LeftOut()
    kept = newest_version(newest(records, left_out), kind.cell, left_out)
    frame = kind.table(kept, left_out)
    caption = kind.caption(kept, frame, left_out)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {suffix: folder / f"{stem}.{suffix}" for suffix in ("png", "svg", "pdf", "csv", "md")}
    frame.to_csv(paths["csv"], index=False, lineterminator="\n")
    parts = [readable.markdown(kind.text(frame)), caption.replace("\n", "\n\n"), *captions.causes(entries(kept))]
    paths["md"].write_text("\n".join(parts) + "\n", encoding="utf-8")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a figure does not depend on the matplotlibrc of whoever draws it
        matplotlib.rcParams.update(style.RC)
        figure = kind.plot(frame, caption)
        # No version and no date in the files: they would differ with nothing measured anew.
        sharpness = min(_DPI, _TALLEST / figure.get_figheight())
        figure.savefig(paths["png"], dpi=sharpness, metadata={"Software": None})
        figure.savefig(paths["svg"], metadata={"Date": None, "Creator": None})
        figure.savefig(paths["pdf"], metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return list(paths.values())
