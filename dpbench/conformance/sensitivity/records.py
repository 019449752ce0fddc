"""The hard records: known floating-point hazards of clipping, one a case.

Sizes depend on the dtype: what overflows float32 is far within float64. C is 1, so a distance is an excess.

Functions take:
    d, p: channels of the inputs and of the weights.
    layer: makes the layer.
    out: channels of the output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from clipping import Automatic
from dpbench.conformance.sensitivity import DTYPES
from dpbench.conformance.sensitivity.problems import (
    ORDINARY,
    Attention,
    Batch,
    Bias,
    Cast,
    HardRecord,
    Problem,
    Record,
    Standardised,
    Tied,
    Twice,
    as_image,
    cancelling,
    centred,
    drawn,
    nearly_alike,
    normal,
    ordinary,
    power_of_two,
)
from dpbench.conformance.sensitivity.search import FOUND, KINDS

Make = Callable[[torch.finfo], Problem]
SPREADS = (0.3, 1.0, 3.0)
SEEDS = range(6)
"""A Gram norm without correct digits is negative for about half of them."""
SINGLE = 2.0**-23
D = P = 64
WIDE, TOKENS, IDS = 500, 16, 8


def sizes(numbers: torch.finfo) -> tuple[float, float, float]:
    """(inputs, weights, relative spread of inputs) at which a Gram norm loses all its digits.

    Products of 16 bits are summed in float32, so float32's digits count.
    """
    if numbers.max < 1e5:
        return 200.0, 1.0, 2.0**-10
    return 3000.0, 100.0 if numbers.eps > 1e-10 else 1e9, math.sqrt(min(numbers.eps, SINGLE))


def rows(numbers: torch.finfo, positions: int, d: int, p: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(words, inputs [1, T, d] nearly alike, weights [1, T, p] that sum to zero over positions)."""
    size, weight, little = sizes(numbers)
    for spread, seed in itertools.product(SPREADS, SEEDS):
        inputs = size * nearly_alike(spread * little, 1, positions, d, seed=seed)
        words = f"inputs {size:g}·(1 ± {spread * little:.0e}), weights {weight:g}·(-7 to 7), seed {seed}"
        yield words, inputs, weight * cancelling(positions, p, seed)


def over_tokens(positions: int, layer: Callable[[], nn.Module]) -> Make:
    """For a layer from D to P channels."""

    def make(numbers: torch.finfo) -> Problem:
        records = (Record(*found) for found in rows(numbers, positions, D, P))
        return Problem(layer(), [ordinary((positions, D), (positions, P), records)])

    return make


def behind_softmax(numbers: torch.finfo) -> Problem:
    """Nearly equal tokens: only rounding returns through the softmax."""
    records = (Record(*found) for found in rows(numbers, 8, 16, 16))
    return Problem(Attention(16), [ordinary((8, 16), (8, 16), records)])


def over_pixels(layer: Callable[[], nn.Module], channels: int, size: int, out: tuple[int, int, int]) -> Make:
    """For a convolution: nearly constant images.

    Args:
        channels, size: of an image.
        out: channels, rows and columns of the output.
    """

    def make(numbers: torch.finfo) -> Problem:
        def records() -> Iterator[Record]:
            p, *pixels = out
            own, scale = rows(numbers, math.prod(pixels), 1, p), sizes(numbers)
            for (words, _, weights), (spread, seed) in zip(own, itertools.product(SPREADS, SEEDS), strict=True):
                image = scale[0] * nearly_alike(spread * scale[2], 1, channels, size, size, seed=seed)
                yield Record(words, image, as_image(weights, *pixels))

        return Problem(layer(), [ordinary((channels, size, size), out, records())])

    return make


def over_uses(numbers: torch.finfo) -> Problem:
    """Both uses have nearly the same inputs, and opposite weights."""

    def records() -> Iterator[Record]:
        size, weight, little = sizes(numbers)
        for spread, seed in itertools.product(SPREADS, SEEDS):
            once = nearly_alike(1.0, 1, 1, D, seed=seed)
            inputs = size * torch.cat([once, once * nearly_alike(spread * little, 1, 1, D, seed=seed + 50)], dim=1)
            words = f"inputs {size:g}, and again but for {spread * little:.0e}, opposite weights of {weight:g}, {seed}"
            yield Record(words, inputs, weight * cancelling(2, P, seed))

    return Problem(Twice(D, P), [ordinary((2, D), (2, P), records())])


def of_one_id(model: Callable[[], nn.Module], out: int) -> Make:
    """The same id at all positions; its gradients are large, and sum to rounding errors.

    Args:
        model: makes the model.
    """

    def make(numbers: torch.finfo) -> Problem:
        def records() -> Iterator[Record]:
            for words, weights in large(numbers, TOKENS, out):
                yield Record(words, torch.full((1, TOKENS), 3), weights)

        ids = torch.randint(0, IDS, (ORDINARY, TOKENS), generator=drawn(7))
        return Problem(model(), [Batch(ids, normal(ORDINARY, TOKENS, out, seed=8), records())])

    return make


def of_a_bias(numbers: torch.finfo) -> Problem:
    """A bias depends on the weights alone."""
    records = (Record(words, normal(1, TOKENS, 4, seed=3), w) for words, w in large(numbers, TOKENS, P))
    return Problem(Bias(4, P), [ordinary((TOKENS, 4), (TOKENS, P), records)])


def large(numbers: torch.finfo, positions: int, channels: int) -> Iterator[tuple[str, Tensor]]:
    """(words, weights [1, T, p] of several sizes that sum to rounding errors over positions)."""
    sizes = dict.fromkeys(min(share / numbers.eps, numbers.max / 64) for share in (1.0, 1e3, 1e6))
    for size, seed in itertools.product(sizes, SEEDS):
        yield f"weights of {size:.2g} less their mean, seed {seed}", size * centred(positions, channels, seed)


def one_sample(scales: Callable[[torch.finfo], list[tuple[float, float]]], layer: Callable[[], nn.Module]) -> Make:
    """A dense layer's sample with inputs and weights of given sizes.

    Args:
        scales: from numbers to (size of the inputs, size of the weights).
    """

    def make(numbers: torch.finfo) -> Problem:
        def records() -> Iterator[Record]:
            for size, weight in scales(numbers):
                inputs, weights = size * normal(1, 16, seed=3), weight * normal(1, 16, seed=4)
                yield Record(f"inputs of {size:g}, weights of {weight:g}", inputs, weights)

        return Problem(layer(), [ordinary((16,), (16,), records())])

    return make


def dense() -> nn.Module:
    """A linear layer from 16 features to 16."""
    return nn.Linear(16, 16)


def squares(numbers: torch.finfo) -> list[tuple[float, float]]:
    """Gradients within the dtype's range, with squares beyond it; by the input, by the weight and by their product."""
    return [
        (power_of_two(numbers, a), power_of_two(numbers, b))
        for a, b in ((0.65, 0.0), (0.0, 0.65), (0.32, 0.32), (0.55, 0.3))
    ]


def apart(numbers: torch.finfo) -> list[tuple[float, float]]:
    """One factor's square overflows, the other's underflows."""
    return [(power_of_two(numbers, share), 1 / power_of_two(numbers, share)) for share in (0.55, 0.65, 0.8)]


def small(positions: bool) -> Make:
    """For a function that divides by the norm: the squares of some entries underflow, those of others do not.

    Args:
        positions: whether a sample has several positions.
    """

    def make(numbers: torch.finfo) -> Problem:
        shape = (4,) if positions else ()

        def records() -> Iterator[Record]:
            least = math.sqrt(numbers.smallest_normal * numbers.eps)  # its square is the smallest number
            for step in range(-16, 17):
                inputs, weights = (torch.ones(1, *shape, WIDE, dtype=torch.float64) for _ in range(2))
                inputs[..., 0] = weights[..., 0] = 1.7  # the entries that do not underflow
                size = least * 2.0 ** (step / 4)
                yield Record(f"gradients of {size:.1e}", inputs, size * weights)

        layer = nn.Linear(WIDE, WIDE, bias=False)
        return Problem(layer, [ordinary((*shape, WIDE), (*shape, WIDE), records())], Automatic(max_grad_norm=1.0))

    return make


def with_entry(value: float) -> Make:
    """An image with one entry that is not a finite number.

    Args:
        value: of the entry.
    """

    def make(numbers: torch.finfo) -> Problem:
        image = normal(1, 3, 6, 6, seed=3)
        image[0, 1, 2, 3] = value
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
        return Problem(
            layers, [ordinary((3, 6, 6), (5,), [Record(f"a pixel is {value}", image, normal(1, 5, seed=4))])]
        )

    return make


def alike(numbers: torch.finfo, layer: Callable[[int, int], nn.Module] | None = None) -> Problem:
    """Every gradient is C/4 in each of 16 coordinates, with the sum near the loss of a digit.

    The record is n + 1, for several successive n; for one of them the sum jumps.

    Args:
        layer: from 16 features to 1, without a bias; None for a linear one.
    """
    inputs, weights = torch.ones(1, 16, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    most = 4096 if numbers.eps < 2.0**-8 else 1024
    batches = [
        Batch(inputs.expand(n, -1), weights.expand(n, -1), [Record(f"one more than {n}", inputs, weights, n)])
        for n in range(most + 2, most + 20)
    ]
    return Problem(nn.Linear(16, 1, bias=False) if layer is None else layer(16, 1), batches)


def in_common(numbers: torch.finfo) -> Problem:
    """2,000 records with a common component, as in a class, but all different."""
    inputs = normal(1, 256, seed=3) + normal(2000, 256, seed=4)
    weights = 1 + 0.2 * normal(2000, 8, seed=5)
    record = normal(1, 256, seed=6) * 0.5 + normal(1, 256, seed=3)
    places = [Record(f"at {place}", record, weights[:1], place) for place in (0, 1000, 2000)]
    return Problem(nn.Linear(256, 8), [Batch(inputs, weights, places)])


def of_one_word(numbers: torch.finfo) -> Problem:
    """2,000 records with the same single id."""
    weights = torch.full((2000, 4), 2.0, dtype=torch.float64)
    records = [Record("one more", torch.tensor([3]), weights[:1], 2000)]
    return Problem(nn.Embedding(IDS, 4), [Batch(torch.full((2000,), 3), weights, records)])


def in_order(numbers: torch.finfo) -> Problem:
    """n - 1 gradients of 1, then n - 1 just above half of the last digit of n.

    With one more at the front, the sum of those of 1 is n, and each later addition rounds up to twice its size.
    (Casacuberta et al. 2022)
    """
    n = 2 ** math.ceil(-math.log2(numbers.eps) / 2 + 0.5)
    ones = torch.ones(n - 1, 1, dtype=torch.float64)
    few = ones * (n / 2) * numbers.eps * (1 + max(2.0**-7, numbers.eps))
    inputs, weights = torch.cat([ones, few]), torch.ones(2 * n - 2, 1, dtype=torch.float64)
    record = Record(f"one more 1 before {2 * n - 2} others", ones[:1], weights[:1], 0)
    return Problem(nn.Linear(1, 1, bias=False), [Batch(inputs, weights, [record])])


def constant(layer: Callable[[], nn.Module], *shape: int) -> Make:
    """Constant or nearly constant inputs before a trained normalisation.

    Args:
        layer: makes the normalisation.
        shape: of a sample.
    """

    def make(numbers: torch.finfo) -> Problem:
        def records() -> Iterator[Record]:
            sizes = [s for s in (1e2, 1e4, 1e6, 1e8, 1e12) if s < numbers.max / 4]
            for size, spread, weight in itertools.product(sizes, (0.0, 1e-2, 1.0, 1e2), (1.0, 1e3)):
                image, weights = size + spread * normal(1, *shape, seed=3), weight * normal(1, *shape, seed=4)
                yield Record(f"{size:g} ± {spread:g}, weights of {weight:g}", image, weights)

        return Problem(layer(), [ordinary(shape, shape, records())])

    return make


def plain(numbers: torch.finfo) -> Problem:
    """A record without any difficulty."""
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 6)
    )
    records = [Record("N(0, 1)", normal(1, 3, 6, 6, seed=3), normal(1, 6, seed=4))]
    return Problem(layers, [ordinary((3, 6, 6), (6,), records)])


def linear() -> nn.Module:
    """A linear layer from D features to P, without a bias."""
    return nn.Linear(D, P, bias=False)


def found(kind: str) -> Make:
    """The worst point of one kind that a search has found.

    Args:
        kind: of the search's model.
    """

    def make(numbers: torch.finfo) -> Problem:
        problems = [point.problem(numbers) for point in FOUND if point.kind == kind]
        return Problem(problems[0].model, [batch for problem in problems for batch in problem.batches])

    return make


UP_TO_SINGLE = tuple(dtype for dtype in DTYPES if dtype != "float64")
"""Float64 would need millions of records."""

RECORDS = [
    HardRecord("ordinary", "an ordinary record, longer than C: near 1 is right", plain),
    HardRecord("cancels over 4 tokens", "Gram matrices cancel: the norm comes out as 0", over_tokens(4, linear)),
    HardRecord("cancels over 32 tokens", "the same with more to cancel", over_tokens(32, linear)),
    HardRecord(
        "cancels over pixels",
        "Gram matrices of a pointwise convolution cancel",
        over_pixels(lambda: nn.Conv2d(D, P, 1, bias=False), D, 4, (P, 4, 4)),
    ),
    HardRecord(
        "cancels over patches",
        "Gram matrices of a convolution cancel",
        over_pixels(lambda: nn.Conv2d(16, P, 3, bias=False), 16, 5, (P, 3, 3)),
    ),
    HardRecord("cancels behind a softmax", "the same pass run twice must give the same", behind_softmax),
    HardRecord(
        "cancels in a standardised weight",
        "a gradient that comes to nothing is pulled back to the parameters",
        over_pixels(lambda: Standardised(16, P), 16, 5, (P, 3, 3)),
    ),
    HardRecord("cancels between uses", "two uses of one weight have opposite gradients", over_uses),
    HardRecord("cancels within one id", "positions of one id cancel", of_one_id(lambda: nn.Embedding(IDS, 16), 16)),
    HardRecord(
        "cancels in a tied table", "the same in a table that is the head, too", of_one_id(lambda: Tied(IDS, 16), IDS)
    ),
    HardRecord("cancels in a bias", "a bias alone, whose positions cancel", of_a_bias),
    *(HardRecord(f"found by search, {kind}", "the worst of thousands of points", found(kind)) for kind in KINDS),
    HardRecord(
        "squares overflow", "gradients that are numbers, with squares that are none", one_sample(squares, dense)
    ),
    HardRecord(
        "huge by tiny", "the square of one factor overflows, that of the other vanishes", one_sample(apart, dense)
    ),
    HardRecord("tiny", "squares vanish, and automatic clipping divides by the norm", small(False)),
    HardRecord("tiny over tokens", "the same, as products of Gram matrices", small(True)),
    HardRecord("a pixel is NaN", "right is to refuse it, and to say which it is", with_entry(math.nan)),
    HardRecord("a pixel is infinite", "right is to refuse it, and to say which it is", with_entry(math.inf)),
    HardRecord("alike in thousands", "the sum is far larger than what a record adds to it", alike),
    HardRecord("alike through a cast", "the same of a weight that is cast", lambda numbers: alike(numbers, Cast)),
    HardRecord("in common in thousands", "the same of records that are not alike", in_common),
    HardRecord("one word in thousands", "the same of an embedding", of_one_word),
    HardRecord("in the worst order", "every later addition is rounded up", in_order, UP_TO_SINGLE),
    *(
        HardRecord(f"constant before {words}", "what is normalised is rounding", constant(layer, *shape))
        for words, layer, shape in (
            ("group norm", lambda: nn.GroupNorm(2, 8), (8, 4, 4)),
            ("layer norm", lambda: nn.LayerNorm(16), (6, 16)),
            ("instance norm", lambda: nn.InstanceNorm2d(8, affine=True), (8, 4, 4)),
            ("RMS norm", lambda: nn.RMSNorm(16), (6, 16)),
        )
    ),
]
