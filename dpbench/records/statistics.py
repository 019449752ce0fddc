"""Compares two measurements: ratio, interval, verdict. Needs only numpy, and scipy's t.

A `Series` has one cell's measurements: round -> the raw samples of that round, in order. Its level is the median of the
medians of its rounds. Nothing is dropped: outliers are included, and counted.

**Intervals** (95 %, of the ratio b/a). With at least five rounds on both sides: a hierarchical bootstrap (resample
rounds, and the samples within each). With fewer: the range, from the lowest round of b over the highest of a to the
highest over the lowest.

**Verdicts.** `slower` (`faster`) needs all of: a difference of levels of at least MIN_EFFECT, an interval that excludes
1, and a difference of the mean logarithms beyond Student's t at LEVEL for the scatter between rounds. `same`: the
interval lies within MIN_EFFECT of 1. Everything else is `inconclusive`, for too few or too noisy rounds.

The difference d is compared with this scatter, where s² is the pooled variance of the rounds' log medians:

    var d = s² (1/n_a + 1/n_b)  +  c s²  +  τ² (1/p_a + 1/p_b)

- c = DRIFT for times without ordinary training in the same rounds: two runs are apart in time, and a machine that
  drifts within a run has drifted between them too. For ratios within rounds, c = 0.
- τ = PROCESS, the difference between processes or hours that is common to all their rounds. It applies to such times
  (p = 1), and to ratios if p processes measured a side's rounds, rather than one each.

c and τ are assumptions. With them, a null comparison of such times under an autoregressive drift (correlation 0.8
between rounds, size 3 %) errs in 0.5 to 0.9 % of cases; with c = 1 and τ = 0, in 4.7 %. A drift that hardly shows
within a run cannot be estimated from it: a correlation of 0.9 gives 2.5 %. Ratios within rounds: 0.2 %.
tests/records/test_stats.py simulates these error rates.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

#: The smallest relevant difference, as a share.
MIN_EFFECT = 0.02
#: The fewest rounds on either side for a bootstrap.
FEWEST_FOR_BOOTSTRAP = 5
#: Two-sided level of Student's t.
LEVEL = 0.008
CONFIDENCE = 0.95
DRIFT = 1.5
PROCESS = 0.01
#: The least drift to warn of, as a share.
MUCH_DRIFT = 0.1
_RESAMPLES, _POOL, _MEDIANS = 1000, 200, 4000
#: Outliers are this many interquartile ranges from the box (hyperfine's and Tukey's "far out").
_FAR_OUT = 3.0

Series = Mapping[Hashable, Sequence[float]]
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Comparison:
    """`ratio` is b's level over a's, or the median of such ratios; `low` and `high` are its interval.

    `interval` is its kind: "bootstrap", "range", or "exact" for values without scatter.
    """

    a: float
    b: float
    ratio: float
    low: float
    high: float
    interval: str
    verdict: str
    rounds_a: int
    rounds_b: int


def level(series: Series) -> float:
    """The median of the medians of the rounds."""
    return median(median(samples) for samples in series.values())


def compare(a: Series, b: Series) -> Comparison:
    """Compare times of two runs, without ordinary training in the same rounds.

    Args:
        a, b: positive samples by round; rounds of the two are unrelated.
    """
    logs = _logs(a), _logs(b)
    return _compare(logs, lambda: (_medians(0, a), _medians(1, b)), (level(a), level(b)), DRIFT, (1, 1))


def compare_paired(
    a: Series, a_base: Series, b: Series, b_base: Series, *, processes: tuple[int, int] | None = None
) -> Comparison:
    """Compare times of two runs, each relative to a base in the same rounds: a round's drift cancels.

    Args:
        a, b: of the two runs: round -> samples, in seconds.
        a_base, b_base: of their bases, likewise.
        processes: numbers of processes that measured a and b; None for one a round.

    Raises:
        ValueError: a side has no round in common with its base.
    """
    sides = []
    for own, base in ((a, a_base), (b, b_base)):
        shared = [number for number in own if number in base]
        if not shared:
            raise ValueError("expected rounds in common with the base")
        sides.append([{number: series[number] for number in shared} for series in (own, base)])
    first, second = (_logs(own) - _logs(base) for own, base in sides)
    levels = math.exp(float(np.median(first))), math.exp(float(np.median(second)))
    return _compare((first, second), lambda: (_medians(0, *sides[0]), _medians(1, *sides[1])), levels, 0.0, processes)


def compare_exact(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Compare positive numbers without scatter, such as bytes: the range is the interval, and one round is enough."""
    low, high = min(b) / max(a), max(b) / min(a)
    levels = median(a), median(b)
    ratio = levels[1] / levels[0]
    verdict = _verdict(ratio, low, high, significant=True)
    kind = "exact" if low == high else "range"
    return Comparison(*levels, ratio, low, high, kind, verdict, len(a), len(b))


def _compare(
    logs: tuple[Array, Array],
    resampled: Callable[[], tuple[Array, Array]],
    levels: tuple[float, float],
    drift: float,
    processes: tuple[int, int] | None,
) -> Comparison:
    ratio = levels[1] / levels[0]
    if min(map(len, logs)) >= FEWEST_FOR_BOOTSTRAP:
        kind = "bootstrap"
        first, second = resampled()
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.exp(np.percentile(second - first, [tail, 100 - tail])).tolist()
    else:
        kind = "range"
        low, high = (math.exp(x) for x in (logs[1].min() - logs[0].max(), logs[1].max() - logs[0].min()))
    # a single round on either side has no spread
    several = min(map(len, logs)) > 1
    verdict = _verdict(ratio, low, high, _significant(*logs, drift, processes)) if several else "inconclusive"
    return Comparison(*levels, ratio, low, high, kind, verdict, *map(len, logs))


def _verdict(ratio: float, low: float, high: float, significant: bool) -> str:
    if significant and low > 1 and ratio >= 1 + MIN_EFFECT:
        return "slower"
    if significant and high < 1 and ratio <= 1 / (1 + MIN_EFFECT):
        return "faster"
    return "same" if low >= 1 / (1 + MIN_EFFECT) and high <= 1 + MIN_EFFECT else "inconclusive"


def _significant(a: Array, b: Array, drift: float, processes: tuple[int, int] | None) -> bool:
    """True if the mean logarithms differ by more than the rounds' scatter explains; see the module's docstring."""
    freedom = len(a) + len(b) - 2
    pooled = sum(float(((x - x.mean()) ** 2).sum()) for x in (a, b)) / freedom
    variance = pooled * (1 / len(a) + 1 / len(b) + drift)
    if processes is not None:
        variance += PROCESS**2 * sum(1 / count for count in processes)
    return bool(abs(b.mean() - a.mean()) > _student(freedom) * math.sqrt(variance))


@functools.cache
def _student(freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - LEVEL / 2))


def _logs(series: Series) -> Array:
    """The logarithms of the medians of the rounds. [rounds]"""
    return np.log([median(samples) for samples in series.values()])


def _medians(side: int, series: Series, base: Series | None = None) -> Array:
    """Bootstrapped medians of the rounds' log medians, or of their log ratios to `base`. [_RESAMPLES]"""
    own, other = _indices(len(series), base is not None, side)
    values = _pools(series).take(own)
    if base is not None:
        values -= _pools(base).take(other)
    return np.median(values, axis=1, overwrite_input=True)


def _pool(rounds: int) -> int:
    """Resampled medians of each round: `_POOL`, or fewer if so many rounds have `_MEDIANS` together."""
    return min(_POOL, max(20, _MEDIANS // rounds))


def _pools(series: Series) -> Array:
    """For each round, the log medians of its samples, resampled. [rounds, pool]"""
    pool = _pool(len(series))
    pools = np.empty((len(series), pool))
    rounds = [np.asarray(samples) for samples in series.values()]
    counts = np.array([len(samples) for samples in rounds])
    for count in set(counts.tolist()):
        chosen = np.flatnonzero(counts == count)
        pools[chosen] = np.median(np.stack([rounds[i] for i in chosen])[:, _draws(count)[:pool]], axis=2)
    return np.log(pools)


@functools.lru_cache(maxsize=256)
def _draws(count: int) -> Any:
    """[_POOL, count] indices below `count`; the same for every round of so many samples."""
    return np.random.default_rng(count).integers(count, size=(_POOL, count))


@functools.lru_cache(maxsize=64)
def _indices(rounds: int, paired: bool, side: int) -> tuple[Any, Any]:
    """Indices of resampled rounds' medians in flat pools, for a series and for its base. [_RESAMPLES, rounds] each

    The seed is fixed: the same records give the same verdicts. The sides differ, or equal ones would cancel.
    """
    generator = np.random.default_rng([rounds, paired, side])
    shape = (_RESAMPLES, rounds)
    own, other = (generator.integers(_pool(rounds), size=shape) for _ in range(2))
    first = _pool(rounds) * generator.integers(rounds, size=shape)
    return first + own, first + other


def outliers(series: Series) -> int:
    """Number of samples beyond three interquartile ranges of the box, with all rounds scaled to one median."""
    values = np.concatenate([np.asarray(samples) / median(samples) for samples in series.values()])
    if len(values) < 4:
        return 0
    low, high = np.percentile(values, [25, 75])
    reach = max(_FAR_OUT * (high - low), MIN_EFFECT)
    return int(((values < low - reach) | (values > high + reach)).sum())


def shared_drift(cells: Sequence[Series]) -> dict[Hashable, float]:
    """Round -> the factor by which its times exceed the cells' own levels, as the median over the cells.

    Args:
        cells: of each, round -> samples.
    """
    found: dict[Hashable, list[float]] = {}
    for series in cells:
        if len(series) > 1:
            middle = level(series)
            for number, samples in series.items():
                found.setdefault(number, []).append(median(samples) / middle)
    return {number: median(factors) for number, factors in sorted(found.items(), key=lambda item: str(item[0]))}


def trend(samples: Sequence[float]) -> float:
    """Share by which the median of the later half of the samples exceeds the earlier one's; 0 for fewer than six.

    Args:
        samples: in order.
    """
    half = len(samples) // 2
    return median(samples[-half:]) / median(samples[:half]) - 1 if half >= 3 else 0.0
