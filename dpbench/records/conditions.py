"""Warns of conditions that spoil measurements: load, stolen time, drift, differing environments.

Every warning says what is wrong, by how much, and what to do.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from dpbench.records.reader import PAIRED, Record, from_line, grouped
from dpbench.records.statistics import MUCH_DRIFT, Series, shared_drift, trend

#: A trial on all CPUs raises the load average to their number; a load above this multiple comes from other programs.
LOAD_MARGIN = 1.25
#: A trial is disturbed if the host gives more than this share of the virtual machine's CPU time to others.
MUCH_STOLEN = 0.05
#: Bits of nvidia-smi's clocks_throttle_reasons.active (NVML) that slow a step; excludes idle and chosen clocks.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal by software",
    0x40: "thermal by hardware",
    0x80: "power brake",
}
#: Facts that depend on the moment.
MOMENTS = frozenset({"utc", "load_average", "cpu_khz", "gpu_state", "gpu_processes"})
#: Facts that differ from run to run and do not affect measurements.
_PASSING = MOMENTS | {"device", "node", "executor", "libraries", "results_folder"}
#: The beginning of the name of a run's file.
_STAMP = re.compile(r"\d{8}T\d{6}Z")

Difference = tuple[str, str, str]


def _throttles(environment: Mapping[str, Any]) -> list[str]:
    """Reasons that slowed the GPU at the beginning of the run."""
    try:
        active = int((environment.get("gpu_state") or {}).get("clocks_throttle_reasons.active", "0"), 16)
    except ValueError:  # "[N/A]" if the driver does not know
        active = 0
    return [name for bit, name in _THROTTLES.items() if active & bit]


def _others(environment: Mapping[str, Any]) -> int:
    """Number of other processes on the machine's GPUs at the beginning of the run."""
    return len(environment.get("gpu_processes") or []) // 2  # each is a pid and its memory


def _series_of(record: Record) -> dict[str, Series]:
    """Backend -> round -> seconds of its steps, for a `step` or `overhead` record with times.

    The rounds of an overhead record are (round of the run, round within the trial).
    """
    if record.kind == "step":
        seconds = record.result.get("step_seconds")
        return {record.trial["backend"]: {record.round: seconds}} if seconds else {}
    backends = record.result.get("backends", {}) if record.kind in PAIRED else {}
    found: dict[str, Series] = {}
    for name, entry in backends.items():
        found[name] = {(record.round, turn["round"]): turn["step_seconds"] for turn in entry.get("turns", ())}
    return {name: turns for name, turns in found.items() if turns}


def _drift(records: Sequence[Record]) -> tuple[float, Any] | None:
    """(share by which the slowest round of one run exceeds the fastest, the slowest round) if that is much."""
    cells: dict[tuple[str, str], dict[Any, Any]] = {}
    for record in records:
        if record.outcome == "ok" or record.kind in PAIRED:  # in a PAIRED record each backend has its own outcome
            for backend, series in _series_of(record).items():
                cells.setdefault((record.id, backend), {}).update(series)
    factors = shared_drift(list(cells.values()))
    if not factors or (by := max(factors.values()) / min(factors.values()) - 1) <= MUCH_DRIFT:
        return None
    return by, max(factors, key=lambda number: factors[number])


def warnings(records: Sequence[Record]) -> list[str]:
    """Warnings on the conditions of one device's records: a sentence for each kind.

    Each says how often and where it was worst, what still holds, and what to do.
    """
    timed = [r for r in records if _series_of(r)]
    runs = {r.run: r.environment for r in timed}
    return [*shared_warnings(timed), *_gpu_warnings(runs, timed), *_round_warnings(timed), *_turn_warnings(timed)]


def shared_warnings(timed: Sequence[Record]) -> list[str]:
    """Warnings of other users of the CPUs during these records: programs, or other guests.

    Args:
        timed: records that hold times.
    """
    return _load_warnings(timed) + _theft_warnings(timed)


def _load_warnings(timed: Sequence[Record]) -> list[str]:
    """A sentence if other programs used the CPUs."""
    loads = [(r, load, _cpus(r.environment)) for r in timed for load in (r.load, r.environment.get("load_average"))]
    over = [(load / cpus, load, cpus, r) for r, load, cpus in loads if load and cpus and load > LOAD_MARGIN * cpus]
    if not over:
        return []
    _, load, cpus, worst = max(over, key=lambda item: item[0])
    met = _of(len({id(r) for *_, r in over}), len(timed), "trial")
    return [
        f"Warning: the load reached {load:.1f} on {_of_cpus(cpus)}{_at(worst.run, timed)}, "
        f"too high around {met}: ratios of a round hold better; run again when idle."
    ]


def _theft_warnings(timed: Sequence[Record]) -> list[str]:
    """A sentence if the host kept its CPUs from the machine."""
    shares = [(r.stolen, r) for r in timed if r.stolen is not None and r.stolen > MUCH_STOLEN]
    if not shares:
        return []
    share, worst = max(shares, key=lambda item: item[0])
    return [
        f"Warning: the host gave others {_up_to(shares)}{share:.0%} of CPU time at "
        f"{_of(len(shares), len(timed), 'trial')}{_at(worst.run, timed)}: ratios of a round hold better; "
        "try another machine or hour."
    ]


def _gpu_warnings(runs: Mapping[str, Mapping[str, Any]], timed: Sequence[Record]) -> list[str]:
    """A sentence each if runs found the GPU throttled or shared."""
    found = []
    if throttled := {run: reasons for run, facts in runs.items() if (reasons := _throttles(facts))}:
        worst = max(throttled, key=lambda run: len(throttled[run]))
        found.append(
            f"Warning: the GPU was throttled as {_of(len(throttled), len(runs), 'run')} began, "
            f"{', '.join(throttled[worst])}{_at(worst, timed)}: ratios of a round hold better; "
            "cool it or lock its clocks."
        )
    if shared := {run: others for run, facts in runs.items() if (others := _others(facts))}:
        worst = max(shared, key=lambda run: shared[run])
        others = shared[worst]
        found.append(
            f"Warning: the GPUs had {_up_to(shared)}{others} other process{'es' if others > 1 else ''} as "
            f"{_of(len(shared), len(runs), 'run')} began{_at(worst, timed)}: ratios of a round hold better; "
            "end them or choose another GPU."
        )
    return found


def _round_warnings(timed: Sequence[Record]) -> list[str]:
    """A sentence if the machine was slower in some rounds of a run."""
    runs = grouped(timed, lambda r: r.run)
    drifts = {run: drift for run, part in runs.items() if (drift := _drift(part))}
    if not drifts:
        return []
    worst = max(drifts, key=lambda run: drifts[run][0])
    by, slowest = drifts[worst]
    return [
        f"Warning: times drifted {_up_to(drifts, 'by ')}{by:.0%} between rounds in {_of(len(drifts), len(runs), 'run')}"
        f"{_at(worst, timed, slowest)}: ratios of a round hold; fix the clock or add rounds."
    ]


def _turn_warnings(timed: Sequence[Record]) -> list[str]:
    """A sentence if successive steps grew or shrank."""
    turns = [(trend(s), r.run, n) for r in timed for cell in _series_of(r).values() for n, s in cell.items()]
    unsteady = [turn for turn in turns if abs(turn[0]) > MUCH_DRIFT]
    if not unsteady:
        return []
    by, run, number = max(unsteady, key=lambda turn: abs(turn[0]))
    return [
        f"Warning: times drifted {_up_to(unsteady, 'by ')}{by:+.0%} within {_of(len(unsteady), len(turns), 'turn')}"
        f"{_at(run, timed, number)}: medians over rounds hold better; run again when idle."
    ]


def _of(count: int, total: int, noun: str) -> str:
    """'3 of 5 runs', 'all 5 runs', or 'the run' if it is the only one."""
    if total == 1:
        return f"the {noun}"
    return f"all {total} {noun}s" if count == total else f"{count} of {total} {noun}s"


def _up_to(cases: Sized, single: str = "") -> str:
    return "up to " if len(cases) > 1 else single


def _at(run: str, timed: Sequence[Record], number: Any = None) -> str:
    """' (round 3 of 20261122T232648Z)': the place of the worst case. A run is named by its time if that is unique."""
    told = []
    if number is not None:
        own = [r for r in timed if r.run == run]
        told.append(_round(number, {n for r in own for cell in _series_of(r).values() for n in cell}))
    stamp = run.partition("-")[0]
    alone = sum(other.startswith(stamp) for other in {r.run for r in timed}) == 1
    told.append(stamp if alone and _STAMP.fullmatch(stamp) else run)
    return f" ({' of '.join(filter(None, told))})" if any(told) else ""


class Watch:
    """Prints warnings during a run: the first of each kind with its trial, and at the end how often it occurred.

    Args:
        environment: of the run.
        say: receives a warning.
    """

    _KINDS = (_load_warnings, _theft_warnings, _turn_warnings)

    def __init__(self, environment: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._environment, self._say = environment, say
        self._records: list[Record] = []
        self._troubles: Counter[Callable[[Sequence[Record]], list[str]]] = Counter()

    def begin(self) -> None:
        """Check load and GPU before the first trial."""
        load, cpus = self._environment.get("load_average"), _cpus(self._environment)
        if load and cpus and load > LOAD_MARGIN * cpus:
            self._say(
                f"Warning: the load is {load:.1f} on {_of_cpus(cpus)} before the first trial: stop other programs."
            )
        for warning in _gpu_warnings({"": self._environment}, []):
            self._say(warning)

    def ended(self, line: Mapping[str, Any], label: str) -> None:
        """Check the record of a trial that must run alone.

        Args:
            line, label: the record, as stored, and the trial in words.
        """
        record = from_line(line, self._environment, "")
        self._records.append(record)
        for kind in self._KINDS:
            for warning in kind([record]):
                self._troubles[kind] += 1
                if self._troubles[kind] == 1:
                    self._say(warning.replace("Warning: ", f"Warning: {label}: ", 1))

    def end(self) -> None:
        """After the last trial, report how many were disturbed, and whether rounds drifted."""
        for kind in self._KINDS:
            if self._troubles[kind] > 1:
                self._say(kind(self._records)[0])
        for warning in _round_warnings(self._records):
            self._say(warning)


def _cpus(environment: Mapping[str, Any]) -> int | None:
    return environment.get("cpus_available") or environment.get("cpu_count")


def _of_cpus(count: int) -> str:
    return f"{count} CPU{'s' if count > 1 else ''}"


def _round(number: Any, numbers: Iterable[Any]) -> str:
    """'round 3', or 'round 3 of trial 2' if `numbers` come from several trials. Counted from one."""
    if not isinstance(number, tuple):
        return f"round {number + 1}"
    several = len({other[0] for other in numbers if isinstance(other, tuple)}) > 1
    return f"round {number[1] + 1}{f' of trial {number[0] + 1}' if several else ''}"


def differences(a: Iterable[Record], b: Iterable[Record]) -> list[Difference]:
    """(fact, in a, in b) for all facts in which two environments differ; 'none' if not known."""
    sides = [_facts(records) for records in (a, b)]
    names = sorted(set(sides[0]) | set(sides[1]))
    told = [(name, *(", ".join(sorted(side.get(name, {"none"}))) for side in sides)) for name in names]
    return [(name, first, second) for name, first, second in told if first != second]


def pooled(records: Iterable[Record]) -> list[tuple[str, str]]:
    """(fact, its values) for all facts in which the runs of these records differ."""
    return [(name, ", ".join(sorted(values))) for name, values in sorted(_facts(records).items()) if len(values) > 1]


def _facts(records: Iterable[Record]) -> dict[str, set[str]]:
    facts: dict[str, set[str]] = {}
    environments = {id(r.environment): r.environment for r in records}
    for environment in environments.values():
        for name, value in flat(environment, _PASSING):
            if value is not None:
                facts.setdefault(name, set()).add(str(value))
    return facts


def flat(environment: Mapping[str, Any], without: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Facts by name; a nested mapping (of packages, of variables) is flattened.

    Args:
        without: names of facts to leave out.
    """
    for name, value in environment.items():
        if name not in without:
            yield from value.items() if isinstance(value, Mapping) else [(name, value)]
