"""What is measured, in which order, as the time allows. The parent's side: no torch.

The likely winners come first, each group of backends in a process of its own together with ordinary training; then
those that cannot be told apart, beside each other in one process; then the largest batches of what did best; then the
slow ones, with fewer steps; then the largest batches of the rest, fastest first. Each step gets a share of the time
that is left. What it does not come to is left out, and its row says so. Whatever still runs when the time is over is
ended, on every device.

Times are taken alone on the machine. Simulated searches run beside each other, one thread each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from clipping import BACKENDS
from dpbench.errors import UsageError
from dpbench.execution.recommend.findings import ORDINARY, Finding, end_as, take_group, take_search
from dpbench.execution.recommend.verdict import FEW, contenders, fastest_first
from dpbench.process.parent import Answer
from dpbench.trials import LargestTrial, RecommendTrial, Trial

#: Seconds that are kept back for what comes at the end.
RESERVE = 5.0
#: A process is killed when it has taken so many times what it was given, and some seconds. The first one is not:
#: if it does not end in time, nothing will.
GRACE, MORE = 1.5, 3.0
#: A search is so near to the limit if the budget is used but for this share.
UNUSED = 0.04
#: A larger batch than this is not looked for.
MOST = 65536
#: Less than this is no time to begin anything with.
_LEAST = 3.0


@dataclass(frozen=True)
class Group:
    """Backends that share a process; `share` of the time left may be spent, on at most `rounds`."""

    backends: tuple[str, ...]
    share: float
    rounds: int
    fewest: int = 2
    max_seconds: float = 2.0


#: From likely to hopeless.
GROUPS = (
    Group(("bk_mixed",), share=0.3, rounds=7, max_seconds=3.0),
    Group(("mixed_ghost", "bk_ghost", "fastgradclip", "ghost"), share=0.45, rounds=3),
    Group(("fastdp", "private_cnn", "microbatch", "vmap"), share=0.45, rounds=3, fewest=1, max_seconds=1.0),
    Group(
        ("opacus_hooks", "opacus_ghost", "opacus_ew", "opacus_functorch"),
        share=0.8,
        rounds=3,
        fewest=1,
        max_seconds=1.0,
    ),
)
#: After so many groups the largest batches of the best are searched, of so many.
_FRONT, _BEST = 2, 2
#: So many at the most are timed once more if they cannot be told apart.
_RIVALS = 3


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
        say: takes a line of progress.
        clock: monotonic seconds.
        begun: when the person began to wait.
    """

    question: Question
    runner: Runner
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    begun: float = field(default=0.0)
    inputs: Sequence[Sequence[int]] = ()
    parameters: int | None = None

    def __post_init__(self) -> None:
        self.begun = self.begun or self.clock()
        self.findings = {name: Finding(name) for name in BACKENDS}
        self._settled: tuple[str, ...] = ()

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
        for number, group in enumerate(GROUPS):
            if number == _FRONT:
                self._settle()
                self.search([ORDINARY, *self._fastest()[:_BEST]], share=0.3)
            self.time(group)
        self._settle()
        self.search(self._fastest(), share=1.0)
        return self.findings

    def _settle(self) -> None:
        """Time those beside each other that cannot be told apart yet, or hardly were timed; the later times count."""
        found = contenders(self.findings.values())[:_RIVALS]
        rivals = tuple(rival.backend for rival in found)
        if rivals != self._settled and (len(rivals) > 1 or any(len(rival.ratios) < FEW for rival in found)):
            self.time(Group(rivals, share=0.3, rounds=7, max_seconds=6.0))
            self._settled = rivals

    def time(self, group: Group) -> None:
        """Time and memory of a group beside ordinary training.

        Args:
            group: backends that take turns.
        """
        within = group.share * self.left()
        if within < _LEAST:
            return
        asked = self.question
        trial = RecommendTrial(
            model=asked.model,
            backends=(ORDINARY, *group.backends),
            batch_size=asked.batch_size,
            device=asked.device,
            precision=asked.precision,
            image_size=asked.image_size,
            num_classes=asked.num_classes,
            rounds=group.rounds,
            max_seconds=group.max_seconds,
            fewest=group.fewest,
            within=within,
            timeout=self.left() if group is GROUPS[0] else min(GRACE * within + MORE, self.left()),
        )
        self._tell(f"time and memory beside ordinary training: {', '.join(group.backends)}")
        (answer,) = self._answers([trial])
        self._take_group(group, answer[1])

    def _take_group(self, group: Group, answer: Answer) -> None:
        result = answer.result or {}
        if "usage" in result:
            raise _Unusable(result["usage"])
        if "backends" in result:
            self.inputs, self.parameters = result["inputs"], result["parameters"]
            take_group(self.findings, result["backends"])
            return
        names = group.backends if self.findings[ORDINARY].status == "ok" else (ORDINARY, *group.backends)
        for name in (name for name in names if not self.findings[name].ratios):
            end_as(self.findings[name], answer.outcome, answer.evidence)

    def search(self, names: Sequence[str], share: float) -> None:
        """The largest batch of each that has none yet, as many beside each other as there are CPUs.

        Args:
            names: of backends.
            share: of the time that is left, at most.
        """
        due = [self.findings[name] for name in names if self.findings[name].largest is None]
        due = [found for found in due if found.status == "ok"]
        until = self.left() * (1 - share)
        if not due or self.left() - until < _LEAST:
            return
        self._tell(f"the largest batch by simulation: {', '.join(found.backend for found in due)}")
        for found, answer in self._answers(
            (self._search_of(found, until) for found in due), self.question.workers, lambda: self.left() - until
        ):
            take_search(self.findings[found.backend], answer.outcome, answer.evidence, answer.result)  # type: ignore[attr-defined]

    def _search_of(self, found: Finding, until: float) -> LargestTrial:
        asked = self.question
        seconds = max(1.0, self.left() - until)
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

    def _fastest(self) -> list[str]:
        return [found.backend for found in fastest_first(self.findings.values())]

    def _answers(
        self, trials: Any, at_once: int = 1, left: Callable[[], float] = lambda: 1.0
    ) -> Iterator[tuple[Trial, Answer]]:
        """Each trial with its answer, in the order in which they end; none is begun when no time is left."""
        waiting, running = iter(trials), dict[int, Trial]()
        exhausted = False
        while running or not exhausted:
            while len(running) < at_once and not exhausted:
                trial = next(waiting, None) if left() > 0 else None
                if trial is None:
                    exhausted = True
                else:
                    running[self.runner.submit(trial, self.until)] = trial
            for answer in self.runner.wait() if running else ():
                yield running.pop(answer.key), answer

    def _tell(self, line: str) -> None:
        self.say(f"[{self.clock() - self.begun:3.0f} s] {line}")


class _Unusable(UsageError):
    """What the process that builds the model said, as it said it."""

    def __init__(self, line: str) -> None:
        Exception.__init__(self, line)
