"""Claims of papers judged by these records: held, not held, not comparable, or not measured.

A claim is data: its words, its source, the condition under which it holds, and a function that judges it by numbers
from records (`dpbench.report.data.claims`). Nothing else decides: without records a claim is not measured, and it is
not comparable if the machine did not run such a size, or a backend failed there.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from dpbench.records.reader import PAIRED, LeftOut, Record, grouped
from dpbench.report.data import claims as judges
from dpbench.report.data.claims import NOT_MEASURED, VERDICTS, Judgement, Numbers
from dpbench.report.data.statistics import frame_of
from dpbench.report.figures import beside_papers as beside
from dpbench.report.figures import max_batch_throughput, overhead
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of, rows
from dpbench.report.summary import several

COLUMNS = ("claim", "source", "held_if", "verdict", "finding", "experiments", "records")


@dataclass(frozen=True)
class Stated:
    """A claim as data: in words close to the paper's, its source, and when it holds by the records of `experiments`.

    `judge`: from numbers to a verdict; None without numbers.
    """

    statement: str
    source: str
    held_if: str
    experiments: tuple[str, ...]
    judge: Callable[[Numbers], Judgement | None]


_MIXED, _BK = "arXiv:2205.10683", "arXiv:2210.00038"
#: Experiments with realistic batch sizes.
_TIMED = ("overhead", "resolution")
_STEPS = ("training_step",)
_FASTDP, _OPACUS, _BELTRAN = "fastDP's README", "pytorch.org/blog/clipping-in-opacus", "arXiv:2406.17298, abstract"


def _bert(row: Any) -> bool:
    return str(row.model).startswith("transformers:bert")


CLAIMS = (
    Stated(
        "Mixed ghost clipping allows 18 times the batch of Opacus (VGG19).",
        _MIXED,
        "on VGG19, its largest batch in 16 GB is 18 times that of Opacus hooks",
        ("stress_test",),
        judges.batch_of_opacus,
    ),
    Stated(
        "Mixed ghost clipping is 3 times as fast as Opacus (VGG19).",
        _MIXED,
        "on VGG19, a step of Opacus hooks takes 3 times as long",
        ("overhead",),
        judges.faster_than_opacus,
    ),
    Stated(
        "The slow-down of mixed ghost clipping is below 2 on all models.",
        _MIXED,
        "its time ratio is below 2 wherever it was measured",
        _TIMED,
        judges.within("mixed_ghost", "time_ratio", 2.0, partial(judges.table_4, "time_per_epoch")),
    ),
    Stated(
        "Mixed ghost clipping needs 0.1 to 10 % more memory than ordinary training.",
        _MIXED,
        "its peak is at most 1.1 times ordinary training's wherever it was measured",
        _TIMED,
        judges.within("mixed_ghost", "memory_ratio", 1.1, partial(judges.table_4, "active_memory")),
    ),
    Stated(
        "Mixed ghost clipping allows the largest batch of the private methods (ResNets).",
        f"{_MIXED}, Figure 3",
        "on every ResNet its largest batch in the budget is at least that of ghost, FastGradClip and Opacus",
        ("stress_test",),
        judges.largest_of_all,
    ),
    Stated(
        "Vision transformers pay as much time for mixed ghost clipping as the figure says, or less.",
        f"{_MIXED}, Figure 4",
        "our time ratio is at most the published one on every model",
        ("vision_transformers",),
        judges.beside_figure("time_ratio", "Time beside ordinary training", f"Figure 4 of {_MIXED}", ("mixed_ghost",)),
    ),
    Stated(
        "Book-keeping costs 1.03 times ordinary training (an operation count).",
        _BK,
        "the time ratio of the authors' own code, fastDP, is at most 1.03 wherever it was measured",
        _TIMED,
        judges.within("fastdp", "time_ratio", 1.03, judges.gpt2_published),
    ),
    Stated(
        "Book-keeping costs 1.03 times ordinary training: ours.",
        _BK,
        "the time ratio of bk_mixed is at most 1.03 wherever it was measured",
        _TIMED,
        judges.within("bk_mixed", "time_ratio", 1.03, judges.gpt2_published),
    ),
    Stated(
        "Book-keeping and ghost clipping cost GPT-2 as much time as the figure says, or less.",
        f"{_BK}, Figure 4",
        "our time ratios are at most the published ones",
        ("book_keeping",),
        judges.beside_figure("time_ratio", "The time ratio", f"Figure 4 of {_BK}", ("bk_mixed", "ghost", "fastdp")),
    ),
    Stated(
        "At high resolution the instantiating method can win (VGG11 at 512 pixels and more).",
        f"{_BK}, Figure 5",
        "on VGG11 at 512 pixels or more, Opacus hooks take less time than mixed ghost clipping",
        ("resolution",),
        judges.high_resolution,
    ),
    Stated(
        "Ghost norms cost 2.5 times ordinary training and more beyond 8,192 tokens.",
        "on implementations of arXiv:2110.05679",
        "at 8,192 tokens or more, each backend that forms Gram matrices throughout takes 2.5 times as long",
        ("sequence_length", "overhead"),
        judges.long_sequences,
    ),
    Stated(
        "Mixed ghost clipping costs CNNs as much time as the table says, or less.",
        f"{_MIXED}, Table 4",
        "our time ratio is at most the published one on every model (B=256 there)",
        ("overhead",),
        judges.table_4_cells("time_ratio"),
    ),
    Stated(
        "Mixed ghost clipping costs CNNs as much memory as the table says, or less.",
        f"{_MIXED}, Table 4",
        "our memory ratio is at most the published one plus 2 % on every model (B=256 there)",
        ("overhead",),
        judges.table_4_cells("memory_ratio"),
    ),
    Stated(
        "Vision transformers pay as much memory for mixed ghost clipping as the figure says, or less.",
        f"{_MIXED}, Figure 4",
        "our memory ratio is at most the published one plus 2 % on every model",
        ("vision_transformers",),
        judges.beside_figure("memory_ratio", "The memory ratio", f"Figure 4 of {_MIXED}", ("mixed_ghost",)),
    ),
    Stated(
        "By resolution, book-keeping, ghost clipping and Opacus cost as much time as the figure says, or less.",
        f"{_BK}, Figure 5",
        "our time ratios are at most the published ones, which are of each method's largest batch",
        ("resolution",),
        judges.beside_figure(
            "time_ratio", "The time ratio", f"Figure 5 of {_BK}", ("bk_mixed", "ghost", "opacus_hooks")
        ),
    ),
    Stated(
        "fastDP slows training down by less than 25 %.",
        _FASTDP,
        "the time ratio of its whole step is at most 1.25 wherever it was measured",
        _STEPS,
        judges.within("fastdp", "time_ratio", 1.25),
    ),
    Stated(
        "fastDP needs less than 20 % more memory.",
        _FASTDP,
        "the memory ratio of its whole step is at most 1.2 wherever it was measured",
        _STEPS,
        judges.within("fastdp", "memory_ratio", 1.2),
    ),
    Stated(
        "BERT with Opacus' ghost clipping takes 1.19 times the time of ordinary training.",
        _OPACUS,
        "the time ratio of its whole step on a BERT is at most 1.19",
        _STEPS,
        judges.within("opacus_ghost", "time_ratio", 1.19, where=_bert),
    ),
    Stated(
        "BERT with Opacus' ghost clipping takes 1.00 times the memory of ordinary training.",
        _OPACUS,
        "the memory ratio of its whole step on a BERT is at most 1.00, rounded",
        _STEPS,
        judges.within("opacus_ghost", "memory_ratio", 1.005, where=_bert),
    ),
    Stated(
        "Opacus has a throughput 2.6 to 8 times lower than ordinary training.",
        _BELTRAN,
        "the time ratio of a whole step of Opacus hooks is 2.6 to 8 wherever it was measured",
        _STEPS,
        judges.within("opacus_hooks", "time_ratio", 8.0, least=2.6),
    ),
    Stated(
        "Ghost clipping roughly halves the cost of Opacus.",
        _BELTRAN,
        "the median over models of the time of Opacus ghost over that of the hooks is at most 0.6",
        _STEPS,
        judges.halved,
    ),
)


def cell(record: Record) -> Hashable:
    """The key of records that add to the same numbers; of whole steps, our engine and the others' are two trials."""
    if record.kind == "training_step":
        return record.experiment, overhead.step_cell(record), record.trial.get("way")
    return record.experiment, beside.cell(record)


def numbers(records: Sequence[Record]) -> Numbers:
    """The numbers of records of one device, in float32, separately for each budget and image size.

    A claim uses only its own experiments: the batch sizes of others may serve another purpose.
    """
    single = [r for r in records if r.trial.get("precision", "float32") == "float32"]
    uncounted: LeftOut = LeftOut()
    eager = [r for r in single if r.kind in PAIRED and r.trial.get("way", "eager") == "eager"]
    paired = overhead.table(eager, uncounted)
    probes = [r for r in single if r.kind not in PAIRED and r.trial.get("memory_budget") is not None]
    frames = [
        max_batch_throughput.table(group, uncounted).assign(image_size=size)
        for (size, _), group in grouped(probes, lambda r: (r.trial["image_size"], r.trial["memory_budget"])).items()
    ]
    return Numbers(rows(paired), [row for frame in frames for row in rows(frame)])


def table(records: Sequence[Record], left_out: LeftOut, every: bool = False) -> pd.DataFrame:
    """A row a claim: all claims for several experiments; for one experiment, its own claims.

    Args:
        every: all claims for one experiment, too.
    """
    names, device = {record.experiment for record in records}, records[0].device
    known: dict[tuple[str, ...], Numbers] = {}
    judgements = []
    for stated in CLAIMS:
        if not every and len(names) == 1 and not names & set(stated.experiments):
            continue
        found = tuple(name for name in stated.experiments if name in names)
        own = [record for record in records if record.experiment in found]
        if found not in known:
            known[found] = numbers(own)
        judged = stated.judge(known[found])
        if judged is None:
            commands = " or ".join(f"`python -m dpbench run {name}`" for name in stated.experiments)
            judged, own = Judgement(NOT_MEASURED, f"{commands} measures it."), []
        else:
            judged = judged._replace(finding=f"{judged.finding} Device: {device}.")
        files = " ".join(sorted({f"{record.run}.jsonl" for record in own}))
        row = (stated.statement, stated.source, stated.held_if, *judged, " or ".join(stated.experiments), files)
        judgements.append(dict(zip(COLUMNS, row, strict=True)))
    return frame_of(judgements, COLUMNS)


def _finding(frame: pd.DataFrame) -> str:
    counts = [f"{int((frame.verdict == v).sum())} {v}" for v in VERDICTS]
    said = [words for words in counts if not words.startswith("0 ")]
    return f"Of {several(len(frame), 'published claim')}: {', '.join(said)}."


def _caption(records: Sequence[Record], frame: pd.DataFrame) -> str:
    return (
        "Each verdict is computed from the records of this device alone. Published values are of other devices and "
        "mostly other batch sizes: what holds or not here is the ratio or the order, on this machine; 2 % "
        "are allowed for a time and for a search. What was measured under a load, and what failed and why, stands at "
        f"the figures that the numbers are from.\nDevice: {records[0].device}."
    )


FIGURE = FigureKind(
    kinds=(*PAIRED, "peak", "largest", "confirm", "step"),
    cell=cell,
    by=(),
    table=table,
    text={
        "Claim": of("claim"),
        "Verdict": of("verdict", lambda verdict: f"{VERDICTS[verdict]} {verdict}"),
        "Finding": of("finding"),
        "Source": of("source"),
        "Held if": of("held_if"),
        "Records": of("records"),
    },
    caption=_caption,
    applies=lambda records: bool(records) and bool((table(records, LeftOut()).verdict != NOT_MEASURED).any()),
    finding=_finding,
    with_causes=False,
)
