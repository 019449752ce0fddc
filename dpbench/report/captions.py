"""The sentences of captions: device, setting, rounds, source of memory, what is left out, and mixed versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from dpbench.records.conditions import warnings
from dpbench.records.reader import PAIRED
from dpbench.report import style
from dpbench.report.data import failures, foretold, peaks, published
from dpbench.report.data.select import LeftOut, Record, grouped
from dpbench.trials.packages import modules_of_backends


def max_batch_throughput(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The caption of Figure 3."""
    sizes, speeds = frame.dropna(subset="max_batch_size"), frame.dropna(subset="images_per_second")
    said = [f"After Figure 3 of {published.PAPER}."]
    if len(sizes):
        said.append(f"Budget: {_join(map(style.size, sorted(set(sizes.budget_bytes))))}.")
        memory = {"measured": "measured", "simulated": "simulated under fake tensors (hatched), not measured"}
        memory["confirmed"] = "foretold by such a simulation, and confirmed by two real steps, there and 2 % beside it"
        said.append(f"Memory: {'; '.join(memory[source] for source in sorted(set(sizes.memory)))}.")
        if words := foretold.said(frame):
            said.append(words)
        if frame.published_max_batch_size.notna().any():
            said.append("Published: read off that figure (±10), for its 16 GB GPU.")
        if (sizes.fails_at.isna()).any():
            said.append("≥: the largest batch that was tried fits.")
        if unfinished(frame).any():
            said.append("†: the search did not end; the table says where.")
    if len(speeds):
        at = f"batch size {_join(sorted(set(speeds.batch_size)))}" if one_batch(frame) else "the batch size beside it"
        said.append(f"Throughput: {at} over the median step time; {_rounds(speeds.rounds)}.")
    said += peaks.said(records, frame)
    if frame.time_ratio.notna().any():
        said.append("×: time of a step beside ordinary training's, the backends in turn in one process.")
    if frame.published_images_per_second.notna().any():
        said.append("Published throughput: from that figure (±9), on its GPU at its maximum batch.")
    return caption(said, records, left_out)


def memory_speed(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The caption of Table 4."""
    pairs = compared(frame).any()
    beside = " beside ordinary training of the same model in the same round" if pairs else ""
    said = [
        f"After Table 4 of {published.PAPER}: time and peak memory of one training step{beside}; "
        f"{_rounds(frame.paired_rounds if pairs else frame.rounds)}."
    ]
    sizes = sorted(set(frame.batch_size))
    said.append(f"Batch size {_join(sizes)}." if len(sizes) <= 4 else f"Batch sizes {sizes[0]} to {sizes[-1]}.")
    if pairs and not compared(frame).all():
        said.append("Cells without such a pair stand in the table only.")
    sources = [style.SOURCES.get(source, source) for source in sorted(set(frame.memory.dropna()))]
    if sources:
        said.append(f"Memory: {_join(sources)}" + (" (not measured)." if sources == ["simulated"] else "."))
    if frame.published_time_ratio.notna().any():
        said.append("Published: that table, CIFAR10 at B=256 on its GPU, active memory.")
    return caption(said, [r for r in records if r.kind == "step"], left_out)


def epsilon(records: Sequence[Record], frame: pd.DataFrame, left_out: LeftOut) -> str:
    """The caption of ε against epochs."""
    first = frame.iloc[0]
    said = [
        f"After Figure 2 of Abadi et al. 2016: ε at δ = {style.plain(first.delta)} of DP-SGD with sample rate "
        f"q = {style.plain(first.sample_rate)} and noise multiplier σ = {style.plain(first.noise_multiplier)}; "
        "Poisson sampling, add or remove one. "
        "Solid: a valid upper bound; any other line is not one."
    ]
    infinite = frame[frame.epsilon.map(lambda value: value == float("inf"))]
    if len(infinite):
        names = dict.fromkeys(style.accountant(name).name for name in infinite.accountant)
        said.append(f"Infinite, and so not drawn, at some point: {_join(names)}.")
    return caption(said, records, left_out, setting=False)


def compared(frame: pd.DataFrame) -> pd.Series[bool]:
    """True for rows of Table 4 with ordinary training at the same batch size, in a group of more than one."""
    groups = frame.groupby(["model", "batch_size"]).backend
    return groups.transform(lambda names: "nonprivate" in set(names)) & (groups.transform("nunique") > 1)


def one_batch(frame: pd.DataFrame) -> bool:
    """True if all throughputs have one batch size."""
    return len(set(frame.batch_size.dropna())) == 1


def unfinished(frame: pd.DataFrame) -> pd.Series[bool]:
    """True for rows with a batch size from an unfinished search."""
    notes = frame.max_batch_note.fillna("").str
    return frame.max_batch_size.notna() & (notes.startswith("search unfinished") | notes.startswith("search ended"))


def caption(said: list[str], records: Sequence[Record], left_out: LeftOut, setting: bool = True) -> str:
    """Append to the sentences those of every figure: the device, what is left out, mixed versions.

    Args:
        said: sentences and lines.
        setting: whether torch, threads and precision matter to the numbers.
    """
    where = [records[0].device]
    if len(nodes := _distinct(r.node for r in records)) > 1:
        where.append(f"on {len(nodes)} nodes ({_join(nodes)}), every ratio within one of them")
    if setting:
        where.append(f"torch {_join(_distinct(r.environment.get('torch') for r in records))}")
    if precisions := _distinct(r.trial.get("precision") for r in records):
        where.append(_join(precisions))
    if setting:
        if sizes := _distinct(r.setting("image_size") for r in records):
            where.append(_join(f"{size}×{size}" for size in sizes) + " inputs")
        timed = [r for r in records if r.kind in ("step", *PAIRED)]
        if threads := _distinct(r.setting("threads") for r in timed if r.setting("device") == "cpu"):
            where.append(f"{_join(threads)} thread{'s' if threads != [1] else ''}")
        if timed:
            where.append(f"{_join(_distinct(r.setting('data') for r in timed))} data")
    if any(style.is_other_mechanism(name) for record in records for name in backends_of(record)):
        said = [*said, f"{style.OTHER_MECHANISM}."]
    paragraphs = [" ".join(said), f"Device: {'; '.join(where)}."]
    left = [f"{count} {reason}" for reason, count in sorted(left_out.items()) if count]
    paragraphs.append(f"Records that give no number here: {', '.join(left)}." if left else "No record is left out.")
    versions, older = mixed_versions(records)
    if older:
        paragraphs.append(
            f"Warning: records of {versions} versions (of sources, libraries or machine) are mixed, {older} of "
            f"{len(records)} not of the newest; run again to make them one."
        )
    elif foreign := from_elsewhere(records):
        paragraphs.append(
            f"Warning: {foreign} of {len(records)} records came with this folder, perhaps of another machine; run "
            "all to make them one."
        )
    return "\n".join([*paragraphs, *warnings(records)])


def from_elsewhere(records: Sequence[Record]) -> int:
    """Number of records from another results folder than the newest record's."""
    folder = max(records, key=lambda record: record.utc).environment.get("results_folder")
    return sum(record.environment.get("results_folder") != folder for record in records)


def mixed_versions(records: Iterable[Record]) -> tuple[int, int]:
    """For trials with the same sources and libraries: (the most fingerprints, records not of the newest fingerprint).

    A fingerprint covers the libraries that a trial uses: a timm model, an Opacus backend and dp-accounting's `pld` each
    have their own.
    """
    most = older = 0
    for alike in grouped(records, libraries).values():
        newest = max(alike, key=lambda record: record.utc).edition
        most = max(most, len({record.edition for record in alike}))
        older += sum(record.edition != newest for record in alike)
    return most, older


def libraries(record: Record) -> tuple[str, str, bool]:
    """A key that is equal for trials with the same sources and libraries."""
    model = record.trial.get("model", "")
    with_peer = bool(modules_of_backends(backends_of(record))) or record.trial.get("accountant") == "pld"
    return record.kind, model.partition(":")[0] if ":" in model else "", with_peer


def causes(records: Iterable[Record]) -> list[str]:
    """Lines of Markdown: why trials failed; the same cause in several rounds once."""
    lines = []
    for record in filter(failures.failed, records):
        word, cause = style.OUTCOMES.get(record.outcome, record.outcome), failures.cause(record).replace("`", "'")
        lines.append(f"- {failures.what(record)}: {word}. `{cause}`")
    return ["", *dict.fromkeys(lines)] if lines else []


def backends_of(record: Record) -> Sequence[str]:
    """The backends of a trial."""
    return record.trial.get("backends") or [record.trial.get("backend", "")]


def _rounds(rounds: pd.Series[int]) -> str:
    if not (rounds > 0).any():
        return "no round gave a number"
    low, high = int(rounds[rounds > 0].min()), int(rounds.max())
    if high == 1:
        return "one round"
    return f"median of {low if low == high else f'{low} to {high}'} rounds, whiskers their range"


def _distinct(values: Iterable[object]) -> list[object]:
    return sorted(
        {value for value in values if value is not None}, key=lambda v: (v, "") if isinstance(v, int) else (0, str(v))
    )


def _join(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)
