"""Summarises a report in three sentences: what ran and where, the findings, and their reliability."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from dpbench.records.reader import Record
from dpbench.report import style
from dpbench.report.data.statistics import did_not_fit
from dpbench.report.parts import Part


def summary(records: Sequence[Record], results: Sequence[Record], parts: Sequence[Part]) -> list[str]:
    """Three sentences with numbers.

    Args:
        records: all records of the report.
        results: the same, of one backend each.
        parts: the figures; the first with a finding gives the second sentence.
    """
    return [_scope(records, results), _finding(parts), _trust(results)]


def _scope(records: Sequence[Record], results: Sequence[Record]) -> str:
    counted = {
        "backend": {r.trial.get("backend") for r in results},
        "model": {r.trial.get("model") for r in results},
        "accountant": {r.trial.get("accountant") for r in results},
    }
    of = [several(len(found - {None}), what) for what, found in counted.items() if found - {None}]
    rounds = max((r.round for r in records), default=0) + 1
    devices = " and ".join(sorted({r.device for r in records}))
    versions = sorted({str(v) for r in records if (v := r.environment.get("torch"))})
    with_torch = f" with torch {' and '.join(versions)}" if versions else ""
    memory = Counter(
        "simulated" if found.get("source") == "simulated" else "measured"
        for r in results
        if isinstance(found := r.result.get("memory"), dict) and found
    )
    taken = " and ".join(f"{how} in {count:,}" for how, count in sorted(memory.items()))
    experiments = " and ".join(sorted({r.experiment for r in records}))
    runs = several(len({r.run for r in records}), "run")
    return (
        f"{several(len(records), 'trial')} of {experiments}{f' ({join(of)})' if of else ''} ran in "
        f"{runs} of {'up to ' if rounds > 1 else ''}{several(rounds, 'round')} on {devices}{with_torch}, "
        f"{days(records)}{f'; memory is {taken} results' if taken else ''}."
    )


def _finding(parts: Sequence[Part]) -> str:
    devices = {part.device for part in parts}
    for part in parts:
        if part.finding:
            return part.finding if len(devices) == 1 else f"On {part.device}: {part.finding}"
    rows = sum(len(part.frame) for part in parts)
    return f"The {several(len(parts), 'table')} below {'has' if len(parts) == 1 else 'have'} {several(rows, 'row')}."


def _trust(results: Sequence[Record]) -> str:
    unfit = "did not fit in the budget of their search"
    outcomes = Counter(unfit if did_not_fit(record) else record.outcome for record in results)
    good = outcomes.pop("ok", 0)
    rest = [f"{count:,} {style.outcome(name)}" for name, count in outcomes.most_common()]
    if rest:
        said = f"Of {several(len(results), 'result')} {good:,} gave a number and the others none ({', '.join(rest)})"
    else:
        said = f"{'All' if good > 1 else 'The'} {several(good, 'result')} gave a number"
    checks = [
        check
        for r in results
        if r.outcome == "ok" and isinstance(check := r.result.get("verification"), dict) and check
    ]
    errors = [float(check[name]) for check in checks for name in ("max_norm_error", "max_grad_error") if name in check]
    if errors:
        said += (
            f"; the {len(checks):,} that were checked against the microbatch oracle agree with it to {max(errors):.0e} "
            "at worst"
        )
    kinds = Counter(str(kind) for r in results if r.outcome == "ok" and (kind := r.result.get("kind")))
    if kinds:
        told = [several(count, _KINDS.get(kind, kind)) for kind, count in kinds.most_common()]
        said += f"; the values of ε are {join(told)}"
    return said + "."


_KINDS = {"upper_bound": "valid upper bound", "lower_bound": "lower bound"}


def several(count: int, name: str) -> str:
    """'1 model', '1,200 models'."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def join(words: Iterable[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *first, last = list(words)
    return f"{', '.join(first)} and {last}" if first else last


def days(records: Iterable[Record]) -> str:
    """When they were measured: 'on 1 January 2026', 'from 1 January 2026 to 3 January 2026'."""
    found = sorted({record.utc[:10] for record in records})
    return f"on {_day(found[0])}" if len(found) == 1 else f"from {_day(found[0])} to {_day(found[-1])}"


def _day(iso: str) -> str:
    day = datetime.fromisoformat(iso)
    return f"{day.day} {day:%B %Y}"
