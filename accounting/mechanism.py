"""One step of DP-SGD as accountants take it: the subsampled Gaussian mechanism, and arguments that cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

from accounting.sampling import ADJACENCIES, PROVED, SAMPLINGS, Scheme


class ArgumentError(ValueError):
    """An argument outside its domain, in one line that names it: `argument`, what was `expected`, what `came`."""

    def __init__(self, argument: str, expected: str, came: object) -> None:
        super().__init__(f"expected {argument} {expected}, got {came!r}")
        self.argument, self.expected, self.came = argument, expected, came


class NoAnswer(ArithmeticError):
    """An accountant has no number to give here; the message is one line, and says why. Others may have one."""


@dataclass(frozen=True)
class SubsampledGaussian:
    """One step: the Gaussian mechanism on a sample; by default a Poisson sample, under adding or removing one record.

    Args:
        noise_multiplier: σ ≥ 0, the standard deviation of the noise on the *sum* of clipped gradients, in units of the
            clipping norm C.
        sample_rate: q in [0, 1], the probability of each record to be in the sample; independent of the others' under
            Poisson sampling, b/n where batches have a fixed size b.
        sampling: one of `SAMPLINGS`.
        adjacency: one of `ADJACENCIES`; "" for the first that bounds are proved under with this sampling.
        dataset_size: n ≥ 1; needed where a Poisson sample is cut to `max_batch_size`.
        max_batch_size: of a Poisson sample with more records than this, so many are kept, drawn uniformly.
        group_size: k ≥ 1: datasets are neighbours by k records at once, such as those of one person; each is clipped by
            itself and in the sample by a coin of its own.

    Raises:
        ArgumentError: a ValueError of one line that names the argument.
    """

    noise_multiplier: float
    sample_rate: float
    sampling: str = "poisson"
    adjacency: str = ""
    dataset_size: int | None = None
    max_batch_size: int | None = None
    group_size: int = 1

    def __post_init__(self) -> None:
        sigma = real("noise_multiplier", "to be a number >= 0", self.noise_multiplier)
        q = real("sample_rate", "in [0, 1]", self.sample_rate)
        if sigma < 0:
            raise ArgumentError("noise_multiplier", "to be a number >= 0", self.noise_multiplier)
        if not 0 <= q <= 1:
            raise ArgumentError("sample_rate", "in [0, 1]", self.sample_rate)
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "sample_rate", q)
        self._check_name("sampling", SAMPLINGS)
        if self.adjacency == "":
            object.__setattr__(self, "adjacency", PROVED[self.sampling][0])
        self._check_name("adjacency", ADJACENCIES)
        for argument in ("dataset_size", "max_batch_size"):
            self._check_size(argument)
        object.__setattr__(self, "group_size", int(min(whole("group_size", self.group_size, least=1), 2.0**53)))

    def _check_name(self, argument: str, names: Mapping[str, str]) -> None:
        if getattr(self, argument) not in names:
            raise ArgumentError(argument, f"to be one of {', '.join(names)}", getattr(self, argument))

    def _check_size(self, argument: str) -> None:
        value, truncated = getattr(self, argument), self.sampling == "truncated_poisson"
        if value is None and truncated:
            raise ArgumentError(argument, "under truncated Poisson sampling", value)
        if value is None:
            return
        if argument == "max_batch_size" and not truncated:
            raise ArgumentError(argument, f"with truncated Poisson sampling only, not with {self.sampling}", value)
        size = whole(argument, value, least=1)
        if size > 2**53:
            raise ArgumentError(argument, "to be at most 2**53", value)
        object.__setattr__(self, argument, int(size))

    @property
    def scheme(self) -> Scheme:
        """(sampling, adjacency)."""
        return self.sampling, self.adjacency


def real(argument: str, expected: str, value: object) -> float:
    """`value` as a float; an int beyond the largest one is as good as infinite.

    Args:
        argument: its name, for the error.
        expected: what it was to be, for the error.
        value: what was given.

    Raises:
        ArgumentError: no number, a truth value, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(argument, expected, value)
    try:
        number = float(value)
    except OverflowError:
        number = -math.inf if value < 0 else math.inf
    if math.isnan(number):
        raise ArgumentError(argument, expected, value)
    return number


def whole(argument: str, value: object, least: int = 0) -> float:
    """`value` as a float that is a whole number, ∞ if it is an int beyond the largest float.

    Args:
        argument: its name, for the error.
        value: what was given.
        least: the smallest that will do.

    Raises:
        ArgumentError: no whole number, or one below `least`.
    """
    expected = f"to be a whole number >= {least}"
    count = real(argument, expected, value)
    if count < least or value == math.inf or (count < math.inf and count % 1):
        raise ArgumentError(argument, expected, value)
    return count


def above(argument: str, least: float, values: Iterable[object]) -> tuple[float, ...]:
    """The values as floats, rising.

    Args:
        argument: its name, for the error.
        least: what each must be above.
        values: that were given.

    Raises:
        ArgumentError: none at all, or one that is not a finite number above `least`.
    """
    expected = f"to be finite numbers > {least:g}, at least one"
    found = sorted(real(argument, expected, value) for value in values)
    if not found or not least < found[0] <= found[-1] < math.inf:
        raise ArgumentError(argument, expected, found)
    return tuple(found)


def within(argument: str, value: object, low: float = 0.0, high: float = 1.0, *, open_ends: bool = False) -> float:
    """`value` as a float between `low` and `high`.

    Args:
        argument: its name, for the error.
        value: what was given.
        low, high: the ends.
        open_ends: the ends themselves will not do.

    Raises:
        ArgumentError: no number, or one outside.
    """
    expected = f"in {'(' if open_ends else '['}{low:g}, {high:g}{')' if open_ends else ']'}"
    number = real(argument, expected, value)
    if not (low < number < high if open_ends else low <= number <= high):
        raise ArgumentError(argument, expected, value)
    return number
