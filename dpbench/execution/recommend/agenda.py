"""What is measured, in which order, as the time allows. The parent's side: no torch.

All backends race beside ordinary training in one process, the likely winners opened first. Then the largest batches are
searched by simulation, of the fastest first, some beside each other. What there is no time for is left out, and its row
says so. Whatever still runs when the time is over is ended, on every device.

The process of the race writes down what it knows by now (`RecommendTrial.notes`). If a backend takes it down, the
others race again without that one; if its time is up, what it knew counts.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
from dpbench.process.parent import Answer
from dpbench.trials import LargestTrial, RecommendTrial, Trial
from dpbench.trials.outcome import Outcome

#: Seconds that are kept back for what comes at the end.
RESERVE = 5.0
#: The share of the time that the race may take, and the seconds after which it is killed.
RACE_SHARE, GRACE = 0.8, 4.0
#: A search is so near to the limit if the budget is used but for this share.
UNUSED = 0.04
#: A larger batch than this is not looked for.
MOST = 65536
#: Less than this is no time to begin anything with.
_LEAST = 3.0
#: How often progress is looked for (seconds).
_LOOK = 0.5
#: From likely to hopeless, as they are opened; Opacus is what people know.
ORDER = (
    *("bk_mixed", "opacus_hooks", "opacus_ghost", "mixed_ghost", "fastgradclip", "vmap", "ghost", "bk_ghost"),
    *("private_cnn", "fastdp", "opacus_functorch", "microbatch", "opacus_ew"),
)


class Runner(Protocol):
    """What runs trials: `dpbench.process.parent.Isolation`."""

    def submit(self, trial: Trial, until: float | None = None) -> int:
        """Start a trial; its answer will carry the key that is returned.

        Args:
            trial: to be run.
            until: when it is ended if it still runs, by the agenda's clock.
        """

    def wait(self, timeout: float | None = None) -> list[Answer]:
        """The answers that come within a time.

        Args:
            timeout: seconds; None: until there is one.
        """


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a person asks. `memory_budget` in bytes, `seconds` for all of it; sizes None: the model's own."""

    model: str
    batch_size: int
    memory_budget: int
    device: str = "cpu"
    precision: str = "float32"
    image_size: int | None = None
    num_classes: int | None = None
    seconds: float = 60.0
    workers: int = 2


@dataclass
class Agenda:
    """One question on its way to its findings.

    Args:
        question: see there.
        runner: runs trials.
        say: takes what goes on, in words, again and again.
        clock: monotonic seconds, those of the processes that measure.
        begun: when the person began to wait.
    """

    question: Question
    runner: Runner
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    begun: float = field(default=0.0)
    #: What the race has found, see `dpbench.measure.recommend.run`.
    found: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun = self.begun or self.clock()
        self.findings = {name: Finding(name) for name in (ORDINARY, *ORDER)}
        self._notes = Path()
        self._doing = "importing"

    @property
    def until(self) -> float:
        """When everything that still runs is ended, by the clock: what takes long may also be slow to start."""
        return self.begun + self.question.seconds - RESERVE

    def left(self) -> float:
        """Seconds."""
        return self.until - self.clock()

    def carry_out(self) -> Mapping[str, Finding]:
        """Measure what the time allows.

        Raises:
            UsageError: the model cannot be built.
        """
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
        """Race; the backend that took the process down, if the others may race without it."""
        asked = self.question
        until = self.clock() + RACE_SHARE * self.left()
        trial = RecommendTrial(
            model=asked.model,
            backends=(ORDINARY, *names),
            batch_size=asked.batch_size,
            device=asked.device,
            precision=asked.precision,
            image_size=asked.image_size,
            num_classes=asked.num_classes,
            until=until,
            notes=str(self._notes),
        )
        self._notes.unlink(missing_ok=True)
        answers = [answer for _, answer in self._answers([trial], until=until + GRACE)]
        if not answers:
            return None
        (answer,) = answers
        notes = self._read()
        result = answer.result or notes.get("result") or {}
        if "usage" in result:
            raise _Unusable(result["usage"])
        if result:
            self.found = result
            take_race(self.findings, result["backends"], asked.batch_size)
        if answer.outcome is Outcome.OK:
            return None
        opening = notes.get("opening")
        if answer.outcome is Outcome.TIMEOUT:  # what was not measured says so already
            return None
        for name in [opening] if opening else [n for n in (ORDINARY, *names) if not self.findings[n].ratios]:
            end_as(self.findings[name], answer.outcome, answer.evidence)
        return opening if answer.outcome is Outcome.CRASH else None

    def _read(self) -> dict[str, Any]:
        """What the process of the race has written down."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._notes.read_text()))
        return {}

    def search(self, names: Sequence[str]) -> None:
        """The largest batch of each, as many beside each other as there are CPUs.

        Args:
            names: of backends.
        """
        due = [self.findings[name] for name in names]
        due = [found for found in due if found.status in ("ok", NOT_KNOWN, "not measured")]
        trials = (self._search_of(found) for found in due)
        for trial, answer in self._answers(trials, self.question.workers):
            found = self.findings[trial.backend]  # type: ignore[attr-defined]
            take_search(found, answer.outcome, answer.evidence, answer.result, self.question.batch_size)

    def _search_of(self, found: Finding) -> LargestTrial:
        asked = self.question
        seconds = max(1.0, self.left())
        return LargestTrial(
            model=asked.model,
            backend=found.backend,
            batch_size=found.predicted_batch(asked.batch_size, asked.memory_budget),
            device=asked.device,
            precision=asked.precision,
            image_size=asked.image_size,
            num_classes=asked.num_classes,
            memory_budget=asked.memory_budget,
            max_batch_size=MOST,
            unused=UNUSED,
            max_seconds=0.6 * seconds,
            timeout=seconds,
        )

    def _answers(
        self, trials: Iterable[Trial], at_once: int = 1, until: float | None = None
    ) -> Iterator[tuple[Trial, Answer]]:
        """Each trial with its answer, in the order in which they end; none is begun when no time is left."""
        waiting, running = iter(trials), dict[int, Trial]()
        exhausted = False
        while running or not exhausted:
            while len(running) < at_once and not exhausted:
                trial = next(waiting, None) if self.left() > _LEAST else None
                if trial is None:
                    exhausted = True
                else:
                    running[self.runner.submit(trial, min(self.until, until or self.until))] = trial
            for answer in self.runner.wait(_LOOK) if running else ():
                yield running.pop(answer.key), answer
            self._doing = self._read().get("doing") or self._doing
            self.say(self._doing)


class _Unusable(UsageError):
    """What the process that builds the model said, as it said it."""

    def __init__(self, line: str) -> None:
        Exception.__init__(self, line)
