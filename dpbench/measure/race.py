"""Who is fastest: a cheap race among all, then the finalists in more rounds. No torch: only turns and what they took.

In a round everybody takes turns, ordinary training among them, in an order of the round's own. Short steps have many
short turns in a round, so that what else the machine does falls on all of them alike. A round gives one ratio for each:
the median of its steps over the median of ordinary training's steps.

1. `heats`: TURNS rounds of everybody. Whoever is far behind (`finalists`) has no further turn.
2. `finals`: at least ROUNDS rounds of the others, more until each interval is narrow or the time is over.

If a ratio is in doubt (`dpbench.execution.recommend.findings.doubt`), `finals` takes new rounds in place of the old.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Protocol

from dpbench.execution.recommend.findings import ORDINARY, ROUNDS, doubt, interval

TURNS = 3
MOST_ROUNDS = 15
#: Seconds of one turn, if steps are shorter; and what each takes of a round in the heats and in the finals.
TURN_SECONDS = 0.03
HEAT_SECONDS, FINAL_SECONDS = 0.1, 0.3
MOST_STEPS = 50
#: Of those that are private: so many times slower than the fastest is too slow for the finals, and so many go there.
FAR = 1.6
KEPT = 4
#: An interval whose ends are closer than this is narrow.
NARROW = 1.08
#: Peers that a person knows: the faster of them is in the finals, however slow.
KNOWN = "opacus"


#: Name -> a ratio to ordinary training for each round.
Ratios = dict[str, list[float]]


class Runner(Protocol):
    """Runs the steps of one backend. `seconds` is what a step takes of a person's time; 0 if not known."""

    name: str
    seconds: float

    def timed(self, count: int) -> list[float]:
        """The seconds of each, by the clock that ratios are taken from; [] if it failed, now or before.

        Args:
            count: how many.
        """


class Race:
    """Rounds of turns.

    Args:
        clock: monotonic seconds.
        tell: takes what goes on, in words.
        seed: of the orders.
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
        """TURNS rounds of everybody, as time allows.

        Args:
            runners: ordinary training among them.
            until: by `clock`; no round begins that would end later, the first excepted.
        """
        return self._rounds("race", runners, until, HEAT_SECONDS, TURNS)

    def finals(self, runners: Sequence[Runner], until: float, latest: float) -> Ratios:
        """ROUNDS rounds and more, until every interval is narrow, as time allows.

        Args:
            runners: ordinary training among them.
            until: by `clock`; no round begins that would end later, the first ROUNDS excepted.
            latest: that neither of these would.
        """
        return self._rounds("finals", runners, until, FINAL_SECONDS, MOST_ROUNDS, latest)

    def _rounds(
        self, words: str, runners: Sequence[Runner], until: float, seconds: float, most: int, latest: float = -math.inf
    ) -> Ratios:
        found: Ratios = {runner.name: [] for runner in runners}
        longest = 0.0
        for number in range(most):
            begin = self.clock()
            end = max(until, latest) if number < ROUNDS else until
            if number and (begin + longest > end or all(_narrow(r) for r in found.values() if len(r) == number)):
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
        """Turns of all of them, again and again until the round's time is filled: name -> seconds of each step.

        Args:
            runners: who takes turns.
            seconds: that a round of short steps lasts.
        """
        taken: dict[str, list[float]] = {runner.name: [] for runner in runners}
        begin = self.clock()
        while True:
            for runner in self._orders.sample(list(runners), len(runners)):
                count = math.ceil(TURN_SECONDS / runner.seconds) if runner.seconds > 0 else 1
                taken[runner.name] += runner.timed(min(count, MOST_STEPS))
            if self.clock() - begin >= seconds:
                return taken


def _narrow(ratios: Sequence[float]) -> bool:
    """Whether more rounds would say little more."""
    ends = interval(ratios)
    return ends is not None and ends[1] <= NARROW * ends[0]


def finalists(ratios: Mapping[str, Sequence[float]], kept: int = KEPT) -> list[str]:
    """Who goes on: the fastest, those that may be as fast, and the fastest of Opacus' ways.

    Args:
        ratios: name -> of each round of the heats; ordinary training does not count.
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
    """Whose rounds cannot be believed (`doubt`).

    Args:
        ratios: name -> of each round.
    """
    return [name for name, rounds in ratios.items() if name != ORDINARY and doubt(rounds) is not None]
