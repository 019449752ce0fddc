"""The subsampled Gaussian mechanism, one step of DP-SGD, and the validation of arguments.

Functions take:
    argument: the argument's name, for the error.
    expected: what was expected, for the error.
    value, values: what was given.
    least: the lower limit.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

from accounting.sampling import ADJACENCIES, PROVED, SAMPLINGS, Scheme


class ArgumentError(ValueError):
    """An argument out of its domain. The message is one line with `argument`, what was `expected`, and what `came`."""

    def __init__(self, argument: str, expected: str, came: object) -> None:
        super().__init__(f"expected {argument} {expected}, got {came!r}")
        self.argument, self.expected, self.came = argument, expected, came


class NoAnswer(ArithmeticError):
    """An accountant has no number for this input; others may. The message says why, in one line."""


@dataclass(frozen=True)
class SubsampledGaussian:
    """One step: the Gaussian mechanism on a sample; by default a Poisson sample, under adding or removing one record.

    Args:
        noise_multiplier: σ ≥ 0, the standard deviation of the noise on the *sum* of clipped gradients, in units of the
            clipping norm C.
        sample_rate: q in [0, 1], the probability that a record is in the sample; independent of others under Poisson
            sampling, b/n for batches of fixed size b.
        sampling: one of `SAMPLINGS`.
        adjacency: one of `ADJACENCIES`; "" for the first one with proved bounds for this sampling.
        dataset_size: n ≥ 1; required if a Poisson sample is cut to `max_batch_size`.
        max_batch_size: a Poisson sample with more records is cut to this many, drawn uniformly.
        group_size: k ≥ 1: neighbouring datasets differ by k records, such as those of one person. Each is clipped
            separately and sampled independently.

    Raises:
        ArgumentError: a one-line ValueError that names the argument.
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
        if sigma < 0:
            raise ArgumentError("noise_multiplier", "to be a number >= 0", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "sample_rate", within("sample_rate", self.sample_rate))
        self._check_name("sampling", SAMPLINGS)
        if self.adjacency == "":
            object.__setattr__(self, "adjacency", PROVED[self.sampling][0])
        self._check_name("adjacency", ADJACENCIES)
        for argument in ("dataset_size", "max_batch_size", "group_size"):
            self._check_size(argument)

    def _check_name(self, argument: str, names: Mapping[str, str]) -> None:
        if getattr(self, argument) not in names:
            raise ArgumentError(argument, f"to be one of {', '.join(names)}", getattr(self, argument))

    def _check_size(self, argument: str) -> None:
        value, truncated = getattr(self, argument), self.sampling == "truncated_poisson"
        if value is None and argument != "group_size":
            if truncated:
                raise ArgumentError(argument, "under truncated Poisson sampling", value)
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
    """`value` as a float; an int beyond the largest float becomes infinite.

    Raises:
        ArgumentError: not a number, a bool, or NaN.
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
    """`value` as a whole float ≥ `least`; an int beyond the largest float becomes ∞.

    Raises:
        ArgumentError: not a whole number, or below `least`.
    """
    expected = f"to be a whole number >= {least}"
    count = real(argument, expected, value)
    if count < least or value == math.inf or (count < math.inf and count % 1):
        raise ArgumentError(argument, expected, value)
    return count


def above(argument: str, least: float, values: Iterable[object]) -> tuple[float, ...]:
    """The values as sorted floats, each finite and above `least`.

    Raises:
        ArgumentError: no values, or one that is not a finite number above `least`.
    """
    expected = f"to be finite numbers > {least:g}, at least one"
    found = sorted(real(argument, expected, value) for value in values)
    if not found or not least < found[0] <= found[-1] < math.inf:
        raise ArgumentError(argument, expected, found)
    return tuple(found)


def within(argument: str, value: object, low: float = 0.0, high: float = 1.0, *, open_ends: bool = False) -> float:
    """`value` as a float between `low` and `high`.

    Args:
        low, high: the ends.
        open_ends: exclude the ends.

    Raises:
        ArgumentError: not a number, or out of range.
    """
    expected = f"in {'(' if open_ends else '['}{low:g}, {high:g}{')' if open_ends else ']'}"
    number = real(argument, expected, value)
    if not (low < number < high if open_ends else low <= number <= high):
        raise ArgumentError(argument, expected, value)
    return number
