"""Judges of claims: functions from numbers of records to a verdict and a sentence with its reason.

Functions take:
    numbers: of the records.
    backend, backends: of the claim.
    column: of the ratio.
    quantity: in words; of `table_4`, of the paper's table.
    where: a predicate on rows: those of the claim's models.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from dpbench.report import style
from dpbench.report.data import published
from dpbench.report.style import missing, times

HELD, NOT_HELD = "held", "not held"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured"
#: Verdict on a claim -> its sign. "Not comparable": the records are of another size, or a backend gave no number.
VERDICTS = {HELD: "✓", NOT_HELD: "✗", NOT_COMPARABLE: "…", NOT_MEASURED: "–"}
#: A smaller ratio is no difference: of two times (`dpbench.records.statistics`) or of two largest batches.
SLACK = 1.02
_TABLE_4 = ("cnn", "resnet18", "resnet34", "resnet50", "vgg11", "vgg13", "vgg16")
_PAPER_BUDGET = 16 * 2**30


class Numbers(NamedTuple):
    """The numbers of one device's records.

    paired: rows of `overhead.table`, eager and in float32; largest: those of `max_batch_throughput.table` with a
    budget, with `image_size`.
    """

    paired: Sequence[Any]
    largest: Sequence[Any]

    def column(self, backend: str, name: str, where: Callable[[Any], bool] = lambda row: True) -> list[Any]:
        """Rows of `paired` with a number in this column."""
        return [row for row in self.paired if row.backend == backend and not missing(getattr(row, name)) and where(row)]

    def beside(self, lines: Sequence[Any], backend: str) -> list[tuple[Any, float]]:
        """Each row with the time ratio of another backend in the same cell, where that has one.

        Args:
            lines: rows of `paired`.
        """
        others = {_cell(row): float(row.time_ratio) for row in reversed(self.column(backend, "time_ratio"))}
        return [(line, others[_cell(line)]) for line in lines if _cell(line) in others]

    def batches(self, model: str, *backends: str) -> list[Any]:
        """The rows of the largest batches in about 16 GB; [] if a search is missing."""
        near = [r for r in self.largest if r.model == model and abs(r.budget_bytes / _PAPER_BUDGET - 1) < 0.08]
        known = {row.backend: row for row in reversed(near)}
        return [known[name] for name in backends] if known.keys() >= set(backends) else []


class Judgement(NamedTuple):
    """A verdict and the sentence with its reason."""

    verdict: str
    finding: str


def _cell(line: Any) -> tuple[Any, ...]:
    return line.model, None if missing(line.image_size) else line.image_size, line.batch_size


def _named(line: Any) -> str:
    size = f" at {line.image_size:g} px" if not missing(line.image_size) and line.image_size != 32 else ""
    return f"{style.model(line.model)}{size}, B={line.batch_size}"


def _verdict(holds: bool) -> str:
    return HELD if holds else NOT_HELD


def _value(line: Any, column: str) -> str:
    """'1.53× (1.49× to 1.60×)': the median and the range of pairs, which a memory ratio has not."""
    said = times(getattr(line, column))
    low, high = (getattr(line, f"{column}_{end}", float("nan")) for end in ("low", "high"))
    return said if missing(low) or missing(high) or low == high else f"{said} ({times(low)} to {times(high)})"


def _of_terms(judge: Callable[..., Judgement | None]) -> Callable[..., Callable[[Numbers], Judgement | None]]:
    """Make a function from the terms of a claim to its judge, out of one of numbers and terms."""
    return lambda *terms, **named: lambda numbers: judge(numbers, *terms, **named)


@_of_terms
def within(
    numbers: Numbers,
    backend: str,
    column: str,
    bound: float,
    beside: Callable[[], str] = str,
    least: float = 0.0,
    where: Callable[[Any], bool] = lambda row: True,
) -> Judgement | None:
    """Judge whether a ratio is at most `bound` (and at least `least`) on every model; times have `SLACK`.

    Args:
        bound, least: the claimed ones.
        beside: returns a further phrase.
    """
    lines, name = numbers.column(backend, column, where), style.backend(backend).name
    if not lines:
        rows = [row for row in numbers.paired if row.backend == backend and where(row)]
        notes = dict.fromkeys(f"{_named(row)}: {row.note}" for row in rows if not missing(row.note))
        return Judgement(NOT_COMPARABLE, f"{name} gave no number: {'; '.join(notes)}.") if notes else None
    lines.sort(key=lambda line: getattr(line, column))
    slack = SLACK if column == "time_ratio" else 1.0
    out = sum(not least / slack <= getattr(line, column) <= slack * bound for line in lines)
    claimed = f"above {times(bound)}" if not least else f"outside {times(least)} to {times(bound)}"
    ends = [f"{_value(line, column)} on {_named(line)}" for line in dict.fromkeys((lines[0], lines[-1]))]
    clearly = " by more than 2 %" if slack > 1 else ""
    said = f"{name} is {claimed}{clearly} on {out} of {len(lines)} models and sizes: {' to '.join(ends)}, measured"
    return Judgement(_verdict(out == 0), "; ".join(filter(None, [said, beside()])) + ".")


def halved(numbers: Numbers) -> Judgement | None:
    """Judge whether a step of Opacus' ghost clipping takes about half the time of one of its hooks."""
    pairs = numbers.beside(numbers.column("opacus_ghost", "time_ratio"), "opacus_hooks")
    known = sorted((line.time_ratio / hooks, _named(line)) for line, hooks in pairs)
    if not known:
        return None
    middle = median(ratio for ratio, _ in known)
    (low, on_low), (high, on_high) = known[0], known[-1]
    said = f"Opacus ghost takes {times(middle)} of the hooks' time at the median of {len(known)} models and sizes"
    return Judgement(
        _verdict(middle <= 0.6), f"{said}: {times(low)} on {on_low} to {times(high)} on {on_high}, measured."
    )


@_of_terms
def table_4_cells(numbers: Numbers, column: str) -> Judgement | None:
    """Judge whether mixed ghost's ratio is at most the published one plus 2 % on each model of Table 4."""
    known = numbers.column("mixed_ghost", column, lambda row: not missing(getattr(row, f"published_{column}")))
    return _beside([(line, float(getattr(line, f"published_{column}"))) for line in known], column, "Mixed ghost")


def batch_of_opacus(numbers: Numbers) -> Judgement | None:
    """Judge how much larger a batch mixed ghost clipping fits than Opacus, on VGG19."""
    found = numbers.batches("vgg19", "mixed_ghost", "opacus_hooks")
    if not found:
        return None
    if notes := [str(row.max_batch_note) for row in found if missing(row.max_batch_size)]:
        return Judgement(NOT_COMPARABLE, f"The search on VGG19 gave no number: {'; '.join(notes)}.")
    ours, theirs = found
    ratio = ours.max_batch_size / theirs.max_batch_size
    said = f"{ours.max_batch_size:,} images against {theirs.max_batch_size:,} of Opacus hooks: {times(ratio)}"
    return Judgement(_verdict(ratio >= 18), f"VGG19 in {style.size(ours.budget_bytes)}: {said}, {ours.memory} memory.")


def faster_than_opacus(numbers: Numbers) -> Judgement | None:
    """Judge how much faster mixed ghost clipping is than Opacus, on VGG19 at 32 pixels."""
    lines = numbers.column("mixed_ghost", "time_ratio", lambda row: row.model == "vgg19" and row.image_size == 32)
    known = [(line, theirs / line.time_ratio) for line, theirs in numbers.beside(lines, "opacus_hooks")]
    if not known:
        return Judgement(NOT_COMPARABLE, "Opacus hooks gave no time on VGG19.") if lines else None
    line, ratio = max(known, key=lambda pair: pair[1])
    said = f"On {_named(line)}, a step of mixed ghost is {times(ratio)} as fast as one of Opacus hooks, measured"
    return Judgement(_verdict(ratio >= 3), f"{said}; the paper compares each at its own largest batch.")


def long_sequences(numbers: Numbers) -> Judgement | None:
    """Judge whether ghost clipping is slow, or fails, on long sequences."""
    lines = [
        line
        for name in ("ghost", "bk_ghost", "opacus_ghost")
        for line in numbers.column(name, "time_ratio", lambda row: style.without_length(row.model)[1] is not None)
    ]
    if not lines:
        return None
    tokens = max(style.without_length(line.model)[1] or 0 for line in lines)
    longest = [line for line in lines if style.without_length(line.model)[1] == tokens]
    said = ", ".join(f"{style.backend(line.backend).name} {times(line.time_ratio)}" for line in longest)
    said = f"At {tokens:,} tokens ({_named(longest[0])}): {said}, measured"
    if tokens < 8192:
        return Judgement(NOT_COMPARABLE, f"{said}; no Gram matrices were formed throughout beyond that length here.")
    return Judgement(_verdict(min(line.time_ratio for line in longest) >= 2.5), f"{said}.")


def high_resolution(numbers: Numbers) -> Judgement | None:
    """Judge whether mixed ghost clipping fits larger images of VGG11 than Opacus."""
    lines = numbers.column(
        "mixed_ghost", "time_ratio", lambda row: row.model == "vgg11" and not missing(row.image_size)
    )
    known = numbers.beside(lines, "opacus_hooks")
    if not known:
        return None
    line, theirs = max(known, key=lambda pair: pair[0].image_size)
    told = [published.throughput_ratio("vgg11", 512, name) for name in ("opacus_hooks", "bk_mixed")]
    numbers_told = " against ".join(times(value) for value in told if value is not None)
    said = (
        f"On {_named(line)}, Opacus hooks take {times(theirs)} and mixed ghost {times(line.time_ratio)}, measured; "
        f"published at 512 px {numbers_told} of BK-MixOpt."
    )
    return Judgement(_verdict(theirs < line.time_ratio) if line.image_size >= 512 else NOT_COMPARABLE, said)


def largest_of_all(numbers: Numbers) -> Judgement | None:
    """Judge whether mixed ghost clipping fits the largest batch of all exact backends, on ResNets."""
    lines = [row for row in numbers.largest if row.model.startswith("resnet")]
    peers = ("ghost", "fastgradclip", "opacus_hooks")
    beaten: list[str] = []
    judged = 0
    for model in dict.fromkeys(row.model for row in lines):
        sizes = {r.backend: r.max_batch_size for r in lines if r.model == model and not missing(r.max_batch_size)}
        others = {sizes[name]: name for name in reversed(peers) if name in sizes}
        if "mixed_ghost" in sizes and others:
            judged += 1
            most, ours = max(others), sizes["mixed_ghost"]
            if most > SLACK * ours:
                beaten.append(f"{style.model(model)}: {style.backend(others[most]).name} {most:,} > {ours:,}")
    if not judged:
        return None
    memory = " and ".join(sorted(set(str(row.memory) for row in lines)))
    said = f"On {judged - len(beaten)} of {judged} ResNets mixed ghost has the largest batch (to 2 %), {memory} memory"
    return Judgement(_verdict(not beaten), said + (f"; not on {'; '.join(beaten)}." if beaten else "."))


@_of_terms
def beside_figure(
    numbers: Numbers, column: str, quantity: str, source: str, backends: tuple[str, ...]
) -> Judgement | None:
    """Judge whether our ratio is at most the published one plus 2 % for reading it off the figure, on each model.

    Args:
        source: the paper's figure.
    """
    known: list[tuple[Any, float]] = []
    for backend in backends:
        for line in numbers.column(backend, column):
            told = published.beside(line.model, None if missing(line.image_size) else line.image_size, backend)
            value = getattr(told, column) if told is not None and told.figure == source else None
            if value is not None:
                known.append((line, value))
    return _beside(known, column, quantity)


def _beside(known: list[tuple[Any, float]], column: str, what: str) -> Judgement | None:
    """Judge ratios by the published ones beside them."""
    if not known:
        return None
    above = [(line, told) for line, told in known if getattr(line, column) > SLACK * told]
    worst, told = max(known, key=lambda pair: getattr(pair[0], column) / pair[1])
    said = (
        f"{what} is at most the published value in {len(known) - len(above)} of {len(known)} cells; the highest "
        f"beside it: {_named(worst)}, {_value(worst, column)} measured, {times(told)} published."
    )
    return Judgement(_verdict(not above), said)


def table_4(quantity: str) -> str:
    """The values of the paper's own Table 4, in words."""
    found = (published.ratio(quantity, model, "mixed_ghost") for model in _TABLE_4)
    values = [value for value in found if isinstance(value, float)]
    return f"the paper's own Table 4 has {times(min(values))} to {times(max(values))}"


def gpt2_published() -> str:
    """The values of the paper's own Figure 4 on GPT-2, in words."""
    told = (published.beside(f"transformers:gpt2{size}@100", None, "bk_mixed") for size in ("", "-medium", "-large"))
    ratios = [one.time_ratio for one in told if one is not None and one.time_ratio is not None]
    return f"its Figure 4 has {times(min(ratios))} to {times(max(ratios))} on GPT-2"
