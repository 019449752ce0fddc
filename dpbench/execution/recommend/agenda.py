"""Decide what to measure, in which order, within the time. Runs in the parent process, without torch.

All backends race against ordinary training in one process; likely winners are opened first. Then the largest batches
are searched by simulation, the fastest backends first, several at once. If there is no time for a backend, its row says
so. When the time is over, everything that still runs is ended, on every device.

The process of the race writes its results to a file as it goes (`RecommendTrial.notes`). If a backend crashes it, the
others race again without that one; if its time is up, the results so far count.
"""

import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpbench.errors import UsageError
from dpbench.execution.recommend.findings import (
    NOT_KNOWN,
    ORDINARY,
    Finding,
    end_as,
    in_order,
    set_memory_ratios,
    take_race,
    take_search,
)
from dpbench.process.parent import Answer, AnyTrial, Isolation, answered
from dpbench.trials import LargestTrial, RecommendTrial
from dpbench.trials.outcome import Outcome

#: Seconds reserved for the end.
RESERVE = 5.0
#: The share of the time for the race, and the seconds after which it is killed.
RACE_SHARE, GRACE = 0.8, 4.0
#: A search ends when at most this share of the budget is unused.
UNUSED = 0.04
#: The largest batch to search for.
MOST = 65536
#: Nothing starts with less time than this.
_LEAST = 3.0
#: Seconds between two checks of progress.
_LOOK = 0.5
#: The order in which backends are opened, from likely to hopeless; Opacus is well known.
ORDER = (
    *("bk_mixed", "opacus_hooks", "opacus_ghost", "mixed_ghost", "fastgradclip", "vmap", "ghost", "bk_ghost"),
    *("private_cnn", "fastdp", "opake", "opacus_functorch", "microbatch", "opacus_ew"),
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The request. `memory_budget` is in bytes, `seconds` for all of it; sizes None are the model's own."""

    model: str
    batch_size: int
    memory_budget: int
    device: str = "cpu"
    precision: str = "float32"
    image_size: int | None = None
    num_classes: int | None = None
    seconds: float = 60.0
    workers: int = 2

    def workload(self) -> dict[str, Any]:
        """What a trial takes of it."""
        return {name: getattr(self, name) for name in ("model", "device", "precision", "image_size", "num_classes")}


@dataclass
class Agenda:
    """Carries out one question.

    Args:
        question: the request.
        runner: runs trials.
        say: receives the current activity, in words, repeatedly.
        clock: monotonic seconds, shared with the processes that measure.
        begun: when the person began to wait.
    """

    question: Question
    runner: Isolation
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    begun: float = field(default=0.0)
    #: Results of the race, see `dpbench.measure.recommend.run`.
    found: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun = self.begun or self.clock()
        self.findings = {name: Finding(name) for name in (ORDINARY, *ORDER)}
        self._notes = Path()
        self._doing = "importing"

    @property
    def until(self) -> float:
        """When everything that still runs is ended; leaves time for a slow end."""
        return self.begun + self.question.seconds - RESERVE

    def left(self) -> float:
        """The seconds left."""
        return self.until - self.clock()

    def carry_out(self) -> Mapping[str, Finding]:
        """Measure what the time allows."""
        with tempfile.TemporaryDirectory(prefix="dpbench-") as folder:
            self._notes = Path(folder, "notes.json")
            names = list(ORDER)
            while (gone := self._race(names)) is not None and self.left() > _LEAST:
                names.remove(gone)
        self._doing = "the largest batches, by simulation"
        self.search([found.backend for found in in_order(self.findings.values())])
        set_memory_ratios(self.findings)
        return self.findings

    def _race(self, names: Sequence[str]) -> str | None:
        """Race once; returns the backend that crashed the process, if the others may race without it."""
        asked = self.question
        until = self.clock() + RACE_SHARE * self.left()
        trial = RecommendTrial(
            backends=(ORDINARY, *names),
            batch_size=asked.batch_size,
            until=until,
            notes=str(self._notes),
            **asked.workload(),
        )
        self._notes.unlink(missing_ok=True)
        answers = [answer for _, answer in self._answers([trial], until=min(self.until, until + GRACE))]
        if not answers:
            return None
        (answer,) = answers
        notes = self._read()
        result = answer.result or notes.get("result") or {}
        if "usage" in result:
            raise UsageError.of(result["usage"])
        if result:
            self.found = result
            take_race(self.findings, result["backends"], asked.batch_size)
        if answer.outcome is Outcome.OK:
            return None
        opening = notes.get("opening")
        if answer.outcome is Outcome.TIMEOUT:  # unmeasured backends say so already
            return None
        for name in [opening] if opening else [n for n in (ORDINARY, *names) if not self.findings[n].ratios]:
            end_as(self.findings[name], answer.outcome, answer.evidence)
        return opening if answer.outcome is Outcome.CRASH else None

    def _read(self) -> dict[str, Any]:
        """The file that the process of the race writes."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._notes.read_text()))
        return {}

    def search(self, names: Sequence[str]) -> None:
        """Search the largest batch of each, one search for each CPU at a time."""
        due = [self.findings[name] for name in names]
        due = [found for found in due if found.status in ("ok", NOT_KNOWN, "not measured")]
        trials = (self._search_of(found) for found in due)
        for trial, answer in self._answers(trials, self.question.workers):
            found = self.findings[trial.backend]
            take_search(found, answer.outcome, answer.evidence, answer.result, self.question.batch_size)

    def _search_of(self, found: Finding) -> LargestTrial:
        asked = self.question
        seconds = max(1.0, self.left())
        return LargestTrial(
            backend=found.backend,
            batch_size=found.predicted_batch(asked.batch_size, asked.memory_budget),
            memory_budget=asked.memory_budget,
            max_batch_size=MOST,
            unused=UNUSED,
            max_seconds=0.6 * seconds,
            timeout=seconds,
            **asked.workload(),
        )

    def _answers(
        self, trials: Iterable[AnyTrial], at_once: int = 1, until: float | None = None
    ) -> Iterator[tuple[AnyTrial, Answer]]:
        """Each trial with its answer, in the order in which they end; none starts without time left."""
        startable = itertools.takewhile(lambda _: self.left() > _LEAST, trials)
        for come in answered(self.runner, startable, at_once, self.until if until is None else until, _LOOK):
            yield from come
            self._doing = self._read().get("doing") or self._doing
            self.say(self._doing)
