"""Under which conditions measurements were taken, and whether they spoil them: load, stolen time, drift, environments
that differ.

Every warning says what is wrong, by how much, and what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from dpbench.records import Record, from_line, grouped
from dpbench.stats import MUCH_DRIFT, Series, shared_drift, trend

#: What a trial that has every CPU to itself makes of the load average is the number of CPUs; so much more is others'.
LOAD_MARGIN = 1.25
#: Share of a virtual machine's CPU time that its host may give to others before a trial is called disturbed.
MUCH_STOLEN = 0.05
#: Bits of nvidia-smi's clocks_throttle_reasons.active (NVML) that slow a step; idle and chosen clocks are none.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
}
#: Facts that differ from run to run and say nothing of what was measured.
_PASSING = frozenset(
    {"utc", "load_average", "cpu_khz", "gpu_state", "gpu_processes", "device", "node", "executor", "libraries"}
)

Difference = tuple[str, str, str]


def overload(load: float | None, cpus: int | None) -> str | None:
    """What is wrong if the load average exceeds the CPUs by a quarter; None if it does not, or is not known."""
    if load is None or not cpus or load <= LOAD_MARGIN * cpus:
        return None
    return (
        f"the load average is {load:.1f} on {cpus} CPU{'s' if cpus > 1 else ''}: other programs share them, and times "
        "come out too long; stop those, or compare ratios within a round and nothing else"
    )


def theft(stolen: float | None) -> str | None:
    """What is wrong if a host kept its CPUs from this virtual machine; None if it did not, or is not known."""
    if stolen is None or stolen <= MUCH_STOLEN:
        return None
    return (
        f"{stolen:.0%} of the CPUs' time went to other guests of this virtual machine's host, which the load average "
        "does not show: times come out too long and uneven; take another machine or hour, or compare ratios within a "
        "round and nothing else"
    )


def gpu_trouble(environment: Mapping[str, Any]) -> list[str]:
    """What is wrong with the GPU as the run found it: throttled, or shared."""
    found = []
    try:
        active = int((environment.get("gpu_state") or {}).get("clocks_throttle_reasons.active", "0"), 16)
    except ValueError:  # "[N/A]" where the driver does not say
        active = 0
    if reasons := [name for bit, name in _THROTTLES.items() if active & bit]:
        found.append(
            f"the GPU is throttled ({', '.join(reasons)}): steps come out too long and uneven; let it cool, or lock "
            "its clocks below that limit (nvidia-smi --lock-gpu-clocks)"
        )
    if others := len(environment.get("gpu_processes") or []) // 2:  # each is a pid and its memory
        found.append(
            f"{others} other process{'es are' if others > 1 else ' is'} on this machine's GPUs: on the same one, time "
            "and memory are shared; end them, or choose another GPU (CUDA_VISIBLE_DEVICES)"
        )
    return found


def series_of(record: Record) -> dict[str, Series]:
    """Backend -> round -> seconds of its steps, as far as a `step` or `overhead` record has them.

    The rounds of an overhead record are (round of the run, round within the trial).
    """
    if record.kind == "step":
        seconds = record.result.get("step_seconds")
        return {record.trial["backend"]: {record.round: seconds}} if seconds else {}
    if record.kind != "overhead":
        return {}
    found: dict[str, Series] = {}
    for name, entry in record.result.get("backends", {}).items():
        turns: dict[Hashable, Any] = {
            (record.round, turn["round"]): turn["step_seconds"] for turn in entry.get("turns", [])
        }
        if turns:
            found[name] = turns
    return found


def drift_of(records: Sequence[Record]) -> dict[Any, float]:
    """Round -> by which factor its times stand above those of the other rounds, over all cells that `records` time."""
    cells: dict[tuple[str, str], dict[Any, Any]] = {}
    for record in records:
        if record.outcome == "ok" or record.kind == "overhead":  # there each backend has an outcome of its own
            for backend, series in series_of(record).items():
                cells.setdefault((record.id, backend), {}).update(series)
    return shared_drift(list(cells.values()))


def drifting(seconds: Sequence[float]) -> str | None:
    """What is wrong if the steps of one trial grow or shrink from its first half to its second; None if they do not."""
    if abs(by := trend(seconds)) <= MUCH_DRIFT:
        return None
    middle = len(seconds) // 2
    return (
        f"its steps drifted by {by:+.0%}, from {median(seconds[:middle]):.3g} s to {median(seconds[-middle:]):.3g} s: "
        "the clock throttles or other programs came and went; let the machine cool, fix its clock, and run it again"
    )


def warnings(records: Sequence[Record]) -> list[str]:
    """What a reader of these records must be told of how they were taken; a sentence or two each."""
    timed = [r for r in records if series_of(r)]
    found = shared_warnings(timed)
    environments = {id(r.environment): r.environment for r in timed}.values()
    gpu = dict.fromkeys(trouble for environment in environments for trouble in gpu_trouble(environment))
    found += [f"Warning: when a run began, {trouble}." for trouble in gpu]
    for run, part in grouped(timed, lambda r: r.run).items():
        factors = drift_of(part)
        if factors and (by := max(factors.values()) / min(factors.values()) - 1) > MUCH_DRIFT:
            slowest = max(factors, key=lambda number: factors[number])
            found.append(
                f"Warning: times drifted by {by:.0%} between rounds{f' of {run}' if run else ''}, slowest in "
                f"{_round(slowest)}: ratios within a round hold, seconds less so. Fix the clock, or run more rounds."
            )
    series = [s for r in timed for cell in series_of(r).values() for s in cell.values()]
    unsteady = sum(drifting(seconds) is not None for seconds in series)
    if unsteady:
        found.append(
            f"Warning: in {unsteady} of {len(series)} series of steps the later half differs from the earlier one by "
            f"more than {MUCH_DRIFT:.0%}: the machine had not settled. Run these again when it is idle."
        )
    return found


def shared_warnings(timed: Sequence[Record]) -> list[str]:
    """What a reader must be told of who else had the CPUs while these records were taken: programs, or other guests."""
    return _load_warnings(timed) + _theft_warnings(timed)


def _load_warnings(timed: Sequence[Record]) -> list[str]:
    """Whether other programs had the CPUs while these records were taken; a sentence if so."""
    loads = [(r, load) for r in timed for load in (r.load, r.environment.get("load_average")) if load is not None]
    over = [(load, cpus) for r, load in loads if overload(load, cpus := _cpus(r.environment))]
    if not over:
        return []
    load, cpus = max(over)
    trials = len({id(r) for r, load in loads if overload(load, _cpus(r.environment))})
    return [
        f"Warning: the load average reached {load:.1f} on {cpus} CPUs, and exceeded them at {trials} of "
        f"{len(timed)} timed trials or when their runs began: times may be too long; ratios within a round hold "
        "better. Run again on an idle machine."
    ]


def _theft_warnings(timed: Sequence[Record]) -> list[str]:
    """Whether the host kept its CPUs from the machine while these records were taken; a sentence if so."""
    shares = [r.stolen for r in timed if r.stolen is not None and theft(r.stolen)]
    if not shares:
        return []
    return [
        f"Warning: at {len(shares)} of {len(timed)} timed trials the host of this virtual machine gave CPU time to "
        f"others, {max(shares):.0%} at the most: times are too long; ratios within a round hold better. Run again on "
        "another machine, or at another hour."
    ]


class Watch:
    """Says, while a run goes on, what spoils its times: once of each kind in full, and at the end how often it was so.

    Args:
        environment: of the run.
        say: takes a warning.
    """

    def __init__(self, environment: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._environment, self._say = environment, say
        self._records: list[Record] = []
        self._troubles: Counter[str] = Counter()

    def begin(self) -> None:
        """Before the first trial: the load that the run finds."""
        load = overload(self._environment.get("load_average"), _cpus(self._environment))
        for wrong in [*([load] if load else []), *gpu_trouble(self._environment)]:
            self._say(f"warning: before the first trial {wrong}")

    def ended(self, line: Mapping[str, Any], label: str) -> None:
        """A trial that must run alone has ended with this record."""
        record = from_line(line, self._environment, "")
        self._records.append(record)
        series = [seconds for cell in series_of(record).values() for seconds in cell.values()]
        self._met("load", f"at the end of {label}", overload(record.load, _cpus(self._environment)))
        self._met("theft", f"during {label}", theft(record.stolen) if series else None)
        self._met("drift", f"{label}:", next(filter(None, map(drifting, series)), None))

    def _met(self, kind: str, where: str, wrong: str | None) -> None:
        if wrong is not None:
            self._troubles[kind] += 1
            if self._troubles[kind] == 1:
                self._say(f"warning: {where} {wrong}")

    def end(self) -> None:
        """After the last trial: how many were disturbed, and whether the rounds drifted."""
        met = self._troubles
        if max(met.values(), default=0) > 1:
            self._say(
                f"warning: of {len(self._records)} trials that must run alone, {met['load']} ended under a load above "
                f"the CPUs, {met['theft']} ran while the host gave time to others, and the steps of {met['drift']} "
                "drifted; their records say so"
            )
        factors = drift_of(self._records)
        if factors and (by := max(factors.values()) / min(factors.values()) - 1) > MUCH_DRIFT:
            self._say(
                f"warning: times drifted by {by:.0%} between rounds: ratios within a round hold, seconds less so; "
                "fix the clock, stop other programs, or run more rounds"
            )


def _cpus(environment: Mapping[str, Any]) -> int | None:
    return environment.get("cpus_available") or environment.get("cpu_count")


def _round(number: Any) -> str:
    """'round 3' of a run; 'round 3 of trial 1' where one trial holds several. Counted from one."""
    return f"round {number[1] + 1} of trial {number[0] + 1}" if isinstance(number, tuple) else f"round {number + 1}"


def differences(a: Iterable[Record], b: Iterable[Record]) -> list[Difference]:
    """(fact, in a, in b) for all in which the environments of two sets of records differ; 'none' where not known."""
    sides = [_facts(records) for records in (a, b)]
    names = sorted(set(sides[0]) | set(sides[1]))
    told = [(name, *(", ".join(sorted(side.get(name, {"none"}))) for side in sides)) for name in names]
    return [(name, first, second) for name, first, second in told if first != second]


def pooled(records: Iterable[Record]) -> list[tuple[str, str]]:
    """(fact, its values) for all in which the runs differ that these records come from."""
    return [(name, ", ".join(sorted(values))) for name, values in sorted(_facts(records).items()) if len(values) > 1]


def _facts(records: Iterable[Record]) -> dict[str, set[str]]:
    facts: dict[str, set[str]] = {}
    environments = {id(r.environment): r.environment for r in records}
    for environment in environments.values():
        for name, value in _flat(environment):
            facts.setdefault(name, set()).add(value)
    return facts


def _flat(environment: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, Mapping) and name not in _PASSING:
            yield from ((key, str(item)) for key, item in value.items() if item is not None)
        elif name not in _PASSING and value is not None:
            yield name, str(value)
