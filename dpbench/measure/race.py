"""Finds the fastest backend: a short race among all, then more rounds for the finalists. Needs no torch.

In a round every backend, ordinary training among them, takes turns in a fresh order. Short steps have many short turns
in a round, so that load from other programs affects all equally. A round gives one ratio for each: the median of its
steps over the median of ordinary training's. `heats` are TURNS rounds of all; `finals` are at least ROUNDS rounds of
the fast ones (`finalists`), until each interval is narrow or the time is up.

Functions take:
    ratios: name -> ratio in each round; ordinary training does not count.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Protocol

from dpbench.execution.recommend.findings import ORDINARY, ROUNDS, doubt, interval

TURNS = 3
MOST_ROUNDS = 15
#: Seconds of one turn, if steps are shorter; and of all turns of one backend in a round of the heats and the finals.
TURN_SECONDS = 0.03
HEAT_SECONDS, FINAL_SECONDS = 0.1, 0.3
MOST_STEPS = 50
#: Private backends in the finals: less than FAR times slower than the fastest, and at most KEPT of them.
FAR = 1.6
KEPT = 4
#: An interval is narrow if its ends differ by less than this factor.
NARROW = 1.08
#: The well-known peers; the fastest of them is in the finals, however slow.
KNOWN = "opacus"


#: Name -> a ratio to ordinary training for each round.
Ratios = dict[str, list[float]]


class Runner(Protocol):
    """Runs the steps of one backend. `seconds` is the wall time of a step; 0 if not known."""

    name: str
    seconds: float

    def timed(self, count: int) -> list[float]:
        """The seconds of each step, by the clock that gives the ratios; [] if the backend has failed."""


class Race:
    """Rounds of turns.

    Args:
        clock: monotonic seconds.
        tell: receives the progress, in words.
        seed: of the orders.

    Methods take:
        runners: including ordinary training.
        until, latest: by `clock`; the first round may end later, and the first ROUNDS of the finals until `latest`.
        seconds: the length of a round of short steps.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda words: None,
        seed: int = 0,
    ) -> None:
        self.clock, self.tell = clock, tell
        self._orders = random.Random(seed)

    def heats(self, runners: Sequence[Runner], until: float) -> Ratios:
        """TURNS rounds of all runners, as time allows."""
        return self._rounds("race", runners, until, HEAT_SECONDS, TURNS)

    def finals(self, runners: Sequence[Runner], until: float, latest: float) -> Ratios:
        """At least ROUNDS rounds, until every interval is narrow, as time allows."""
        return self._rounds("finals", runners, until, FINAL_SECONDS, MOST_ROUNDS, latest)

    def _rounds(
        self, words: str, runners: Sequence[Runner], until: float, seconds: float, most: int, latest: float = -math.inf
    ) -> Ratios:
        found: Ratios = {runner.name: [] for runner in runners}
        longest = 0.0
        for number in range(most):
            begin = self.clock()
            end = max(until, latest) if number < ROUNDS else until
            ends = [interval(ratios) for ratios in found.values() if len(ratios) == number]
            narrow = all(each is not None and each[1] <= NARROW * each[0] for each in ends)
            if number and (begin + longest > end or narrow):  # more rounds would add little
                break
            self.tell(f"{words}, round {number + 1}: {', '.join(r.name for r in runners if r.name != ORDINARY)}")
            taken = self.round(runners, seconds * len(runners))
            longest = max(longest, self.clock() - begin)
            if not taken.get(ORDINARY):
                break
            for name, steps in taken.items():
                if steps:
                    found[name].append(median(steps) / median(taken[ORDINARY]))
        return found

    def round(self, runners: Sequence[Runner], seconds: float) -> dict[str, list[float]]:
        """Repeat turns of all until the round's time is filled: name -> seconds of each step."""
        taken: dict[str, list[float]] = {runner.name: [] for runner in runners}
        begin = self.clock()
        while True:
            for runner in self._orders.sample(list(runners), len(runners)):
                count = math.ceil(TURN_SECONDS / runner.seconds) if runner.seconds > 0 else 1
                taken[runner.name] += runner.timed(min(count, MOST_STEPS))
            if self.clock() - begin >= seconds:
                return taken


def finalists(ratios: Mapping[str, Sequence[float]], kept: int = KEPT) -> list[str]:
    """The fastest private backends, those that may be as fast, and the fastest of Opacus' engines.

    Args:
        kept: how many at most, beside Opacus'.
    """
    ranked = sorted((name for name in ratios if ratios[name] and name != ORDINARY), key=lambda n: median(ratios[n]))
    if not ranked:
        return []
    best = median(ratios[ranked[0]])
    fast = [name for name in ranked[:kept] if median(ratios[name]) <= FAR * best]
    known = next((name for name in ranked if name.startswith(KNOWN)), None)
    return fast if known is None or known in fast else [*fast, known]


def doubtful(ratios: Mapping[str, Sequence[float]]) -> list[str]:
    """Names of backends with doubtful ratios (`doubt`)."""
    return [name for name, rounds in ratios.items() if name != ORDINARY and doubt(rounds) is not None]
