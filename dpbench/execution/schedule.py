"""Decide what to run next: a pure function of the declarations and the records.

Searches come first; their probes belong to round 0 and are not timed. Then come the trials and the follow-ups of
searches, round by round. Rounds are outermost, and each has its own order, so that drift affects every method equally.
The order is by a hash of the experiment, the round and the trial, so it does not change when a run is continued or a
part is selected. With `in_order`, cells run as declared, including searches: if time is short, the most informative
come first.

A record counts if its key (trial id, round, fingerprint) is the one that would be written today. It is done, whatever
its outcome, except for outcomes to retry.

Functions take:
    search: the declaration of a search.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpbench.experiment import Cell, MaxBatch
from dpbench.trials import LargestTrial, Trial, canonical_json
from dpbench.trials.expected import expected_seconds
from dpbench.trials.max_batch import Probe, probes_of
from dpbench.trials.outcome import DOES_NOT_FIT, FINAL, Outcome

Record = Mapping[str, Any]
#: The typical number of probes of a search.
TYPICAL_PROBES = 5


@dataclass(frozen=True)
class Run:
    """One trial in one round."""

    trial: Trial
    round: int


def family(description: Mapping[str, Any]) -> str:
    """What trials share that differ only in their batch size.

    Args:
        description: of a trial, as recorded.
    """
    return canonical_json({k: v for k, v in description.items() if k not in ("batch_size", "timeout")})


class History:
    """The records that count, and what follows from them.

    Args:
        records: of all runs so far; `add` new ones as they come.
        accepted: trial -> {fingerprint that counts: its device}. On one machine only its own; on a cluster also those
            of the nodes, so that a cell is done once, on whichever node.
        retry: outcomes that do not count as done.
    """

    def __init__(
        self, records: Iterable[Record], accepted: Callable[[Trial], Mapping[str, str]], retry: Collection[str]
    ) -> None:
        self._accepted = accepted
        # a final outcome is not run again: it is the last of its key, whatever the clock said
        last = sorted(records, key=lambda r: (r["outcome"] in FINAL, r["utc"]))
        latest = {(r["id"], r["round"], r["fingerprint"]): r for r in last}
        self._done: dict[tuple[str, int], dict[str, Record]] = {}
        self._families: dict[str, dict[str, dict[int, Record]]] = {}
        for record in latest.values():
            if record["outcome"] not in retry:
                self.add(record)

    def add(self, record: Record) -> None:
        """Add a record."""
        self._done.setdefault((record["id"], record["round"]), {})[record["fingerprint"]] = record
        if "batch_size" in record["trial"]:
            members = self._families.setdefault(family(record["trial"]), {})
            members.setdefault(record["fingerprint"], {})[record["trial"]["batch_size"]] = record

    def of(self, run: Run) -> Record | None:
        """The newest record of a run that counts; None if there is none."""
        found = self._done.get((run.trial.id, run.round))
        if found is None:
            return None
        counting = [found[fingerprint] for fingerprint in self._accepted(run.trial) if fingerprint in found]
        return max(counting, key=lambda record: record["utc"], default=None)

    def by_batch_size(self, trial: Trial) -> dict[int, Record]:
        """The records of the trial at every batch size.

        Combines several nodes if their devices are the same; else uses the device that was measured last.
        """
        accepted = self._accepted(trial)
        found = self._families.get(family(trial.describe()), {})
        counting = [(device, found[fingerprint]) for fingerprint, device in accepted.items() if fingerprint in found]
        if len(counting) < 2:
            return counting[0][1] if counting else {}
        counting.sort(key=lambda item: max(record["utc"] for record in item[1].values()))
        merged: dict[int, Record] = {}
        for device, members in counting:
            merged |= members if device == counting[-1][0] else {}
        return merged

    def pruned_by(self, run: Run) -> str | None:
        """Why the run is unnecessary: its outcome follows from others."""
        for earlier in range(run.round):
            record = self.of(Run(run.trial, earlier))
            if record is not None and record["outcome"] in FINAL - {Outcome.OK}:
                return str(record["outcome"])
        batch_size = getattr(run.trial, "batch_size", None)
        if batch_size is not None:
            for smaller, record in self.by_batch_size(run.trial).items():
                if smaller < batch_size and record["outcome"] in DOES_NOT_FIT:
                    return f"{record['outcome']} at batch {smaller}"
        return None


@dataclass(frozen=True)
class SearchState:
    """The state of a search for the largest batch. `answer` is that batch, 0 if none is known to fit (yet)."""

    seen: Mapping[int, Probe]
    next: int | None
    failed: str | None = None
    answer: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing is left to probe."""
        return self.next is None


def step_search(search: MaxBatch, history: History) -> SearchState:
    """Replay a search from its records."""
    seen: dict[int, Probe] = {}
    for batch_size, record in history.by_batch_size(search.probe).items():
        outcome = Outcome(record["outcome"])
        if outcome is not Outcome.OK and outcome not in DOES_NOT_FIT:
            return SearchState(seen, None, failed=f"{outcome} at batch {batch_size}")
        seen |= probes_of(record)
    following = search.next_batch_size(seen)
    return SearchState(seen, following, answer=search.answer(seen) if following is None else 0)


def probes_left(search: MaxBatch, state: SearchState) -> int:
    """The expected number of further trials of an unfinished search."""
    return 1 if isinstance(search.probe, LargestTrial) else max(1, TYPICAL_PROBES - len(state.seen))


def apart(one: Trial, other: Trial) -> bool:
    """Whether two trials must not run at the same time."""
    return any(a.alone and (b.alone or not a.beside) for a, b in ((one, other), (other, one)))


@dataclass
class Schedule:
    """The runs of an experiment, in order.

    Args:
        name: of the experiment; the order depends on it.
        cells: trials and searches; a trial that is declared twice runs once.
        rounds: how often each trial runs.
        history: the records so far; `add` new ones to it as they come.
        in_order: run the cells of each round as declared, searches included.
    """

    name: str
    cells: Sequence[Cell]
    rounds: int
    history: History
    in_order: bool = False

    def __post_init__(self) -> None:
        self.searches = [cell for cell in self.cells if isinstance(cell, MaxBatch)]

    def next(self, running: Collection[Run] = (), may: Callable[[Trial], bool] = lambda _: True) -> Run | None:
        """A run that can start beside what is running; None if there is none.

        Args:
            may: trial -> whether it may start now; others are skipped.
        """

        def can(run: Run) -> bool:
            return not any(apart(run.trial, other.trial) for other in running)

        waiting = self._as_declared()
        if not self.in_order:  # trials that simulations may run beside go first, so that they do
            first = itertools.chain((run for run in self._left() if run.trial.beside), self._probes())
            waiting = itertools.chain(filter(can, first), self._left())
        run = next((run for run in waiting if run not in running and may(run.trial)), None)
        return run if run is not None and can(run) else None

    def _probes(self) -> Iterator[Run]:
        """The next probe of each search."""
        return (run for search in self.searches if (run := self._probe(search)) is not None)

    def _probe(self, search: MaxBatch) -> Run | None:
        """The next run of the search; None if it has ended."""
        state = step_search(search, self.history)
        return None if state.next is None else Run(search.probe_at(state.next), 0)

    def _as_declared(self) -> Iterator[Run]:
        """What is left, cell by cell in each round; for an unfinished search, its next probe."""
        for number in range(self.rounds):
            for cell in self.cells:
                probe = self._probe(cell) if isinstance(cell, MaxBatch) else None
                if probe is not None:
                    yield probe
                    continue
                trial = self._then(cell) if isinstance(cell, MaxBatch) else cell
                if trial is not None and self._is_left(Run(trial, number)):
                    yield Run(trial, number)

    def trials(self) -> list[Trial]:
        """Every known trial of a round: the declared ones, and the follow-ups of finished searches."""
        known = (self._then(cell) if isinstance(cell, MaxBatch) else cell for cell in self.cells)
        return list({trial.id: trial for trial in known if trial is not None}.values())

    def _then(self, search: MaxBatch) -> Trial | None:
        answer = step_search(search, self.history).answer
        return search.then_at(answer) if answer else None

    def runs(self) -> Iterator[Run]:
        """Every run of the known trials, done or not, in order."""
        trials = self.trials()
        for number in range(self.rounds):
            runs = [Run(trial, number) for trial in trials]
            yield from runs if self.in_order else sorted(runs, key=self._place)

    def _place(self, run: Run) -> bytes:
        return hashlib.sha256(f"{self.name}/{run.round}/{run.trial.id}".encode()).digest()

    def _left(self) -> Iterator[Run]:
        return (run for run in self.runs() if self._is_left(run))

    def _is_left(self, run: Run) -> bool:
        return self.history.of(run) is None and not self.history.pruned_by(run)

    def waiting(self) -> list[Run]:
        """The runs that are left, and the next probe of each unfinished search."""
        return [*self._probes(), *self._left()]

    def recorded(self) -> list[Record]:
        """The present records of these cells, including probes."""
        probes = [r for search in self.searches for r in self.history.by_batch_size(search.probe).values()]
        return probes + [record for run in self.runs() if (record := self.history.of(run)) is not None]

    def remaining(self) -> list[tuple[Trial, float]]:
        """What is left, as (a trial, the number of such runs); estimated for unfinished searches."""
        left: list[tuple[Trial, float]] = [(run.trial, 1) for run in self._left()]
        for search in self.searches:
            state = step_search(search, self.history)
            if not state.ended:
                left.append((search.probe, probes_left(search, state)))
                if search.then is not None:
                    left.append((search.then, self.rounds))
        return left

    def blocks(self) -> list["Block"]:
        """The parts that a cluster gives to its nodes, in the order of their first cells."""
        found: dict[tuple[str, bool], list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(key_of(cell), []).append(cell)
        return [Block(key, replace(self, cells=cells), together) for (key, together), cells in found.items()]


@dataclass
class Block:
    """A part of a plan. `together`: on one node. `running`: submitted runs that have not ended.

    A ratio to ordinary training is taken within one node and one round. So all timed trials of one model, precision and
    device form one block, in all rounds, which moves to another node only if its own is lost. Trials that are not timed
    (an accountant, a simulated peak, a search of such) can run anywhere.
    """

    key: str
    schedule: Schedule
    together: bool
    running: list[Run] = field(default_factory=list)


def key_of(cell: Cell) -> tuple[str, bool]:
    """(the name of the cell's block, whether that must stay on one node)."""
    trial: Trial = cell.probe if isinstance(cell, MaxBatch) else cell
    timed = cell.then is not None or trial.alone if isinstance(cell, MaxBatch) else trial.alone
    described = trial.describe()
    if timed and "model" in described:
        return canonical_json({name: described.get(name) for name in ("model", "device", "precision")}), True
    return (family(described) if isinstance(cell, MaxBatch) else trial.id), False


class Clock:
    """Estimates the remaining time from similar trials. `nodes`: how many work at once."""

    nodes = 1

    def __init__(self, records: Iterable[Record], workers: int = 1) -> None:
        self._sums: dict[tuple[str, ...], tuple[float, int]] = {}
        self._workers = workers
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Learn how long a trial took."""
        for key in _likeness(record["trial"]):
            total, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = (total + record["seconds"], count + 1)

    def left(self, remaining: Iterable[tuple[Trial, float]]) -> float | None:
        """Seconds for all; None without any record.

        Args:
            remaining: (a trial, the number of such runs).
        """
        total = 0.0
        for trial, count in remaining:
            seconds = self.of(trial)
            if seconds is None:
                return None
            total += count * seconds / (1 if trial.alone else self._workers)
        return total / self.nodes

    def of(self, trial: Trial) -> float | None:
        """Seconds that a trial takes; None if unknown.

        The mean of similar trials (kind, model and backend), else as on another GPU, else of its kind, or of all
        trials.
        """
        own, *others = _likeness(trial.describe())
        expected = expected_seconds(trial) if own not in self._sums else None
        if expected is not None:
            return expected
        known = next((self._sums[key] for key in (own, *others) if key in self._sums), None)
        return None if known is None else known[0] / known[1]


def _likeness(trial: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Keys from the most similar to the least: kind, model and backend; kind; anything."""
    kind = str(trial["kind"])
    return [(kind, str(trial.get("model")), str(trial.get("backend", trial.get("accountant")))), (kind,), ()]
