"""Minimise a function of one number.

Functions take:
    f: a function of one number.
    low, high: the ends of the search; > 0 for `descend`.
"""

import math
from collections.abc import Callable

_GOLDEN = 0.5 * (math.sqrt(5.0) - 1.0)


def golden(f: Callable[[float], float], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """(x, f(x)) with the smallest f that golden section finds in [low, high].

    Args:
        tolerance: the width of the last interval, > 0.
    """
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    f_left, f_right = f(left), f(right)
    best = min((f_left, left), (f_right, right))
    while high - low > tolerance:
        if f_left <= f_right:
            high, right, f_right = right, left, f_left
            left = high - _GOLDEN * (high - low)
            f_left = f(left)
            best = min(best, (f_left, left))
        else:
            low, left, f_left = left, right, f_right
            right = low + _GOLDEN * (high - low)
            f_right = f(right)
            best = min(best, (f_right, right))
    return best[1], best[0]


def lowest(f: Callable[[float], float], points: range, tolerance: float) -> float:
    """x that minimises f: the best of `points`, or one that `golden` finds between its neighbours.

    Args:
        points: evenly spaced.
        tolerance: as for `golden`.
    """
    best = min(map(float, points), key=f)
    found, value = golden(f, best - points.step, best + points.step, tolerance)
    return found if value < f(best) else best


def descend(f: Callable[[float], float], start: float, low: float, high: float) -> tuple[float, float]:
    """(x, f(x)) for x in [low, high]: downhill by factors of 2 from `start`, then `golden` in ln x.

    For a function that falls, then rises. Where it is infinite, smaller x are tried first.

    Args:
        start: the first x.
    """
    bottom, top = round(math.log2(low)), round(math.log2(high))
    place = min(top, max(bottom, round(math.log2(start))))
    values: dict[int, float] = {}

    def at(exponent: int) -> float:
        if exponent not in values:
            values[exponent] = f(2.0**exponent) if bottom <= exponent <= top else math.inf
        return values[exponent]

    while place > bottom and math.isinf(at(place)):
        place -= 1
    for way in (-1, 1):
        while at(place + way) < at(place):
            place += way
    best = at(place), 2.0**place
    for low, high in ((place - 1, place), (place, place + 1)):  # separately, because f may jump
        span = math.log(2.0) * max(bottom, low), math.log(2.0) * min(top, high)
        found, value = golden(lambda x: f(math.exp(x)), *span, tolerance=1e-4)
        best = min(best, (value, math.exp(found)))
    return best[1], best[0]
