"""The hard records: known floating-point hazards of clipping, one a case.

Sizes depend on the dtype: what overflows float32 is far within float64. C is 1, so a distance is an excess. Each
function makes a `Problem` from `numbers`, the `torch.finfo` of the dtype.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from clipping import Automatic
from dpbench.conformance.sensitivity import DTYPES
from dpbench.conformance.sensitivity.problems import (
    ORDINARY,
    Batch,
    HardRecord,
    Problem,
    Record,
    as_image,
    attention,
    cancelling,
    cast,
    centred,
    drawn,
    nearly_alike,
    normal,
    ordinary,
    power_of_two,
    standardised,
    tied,
    twice,
)
from dpbench.conformance.sensitivity.search import FOUND, KINDS

SPREADS = (0.3, 1.0, 3.0)
SEEDS = range(6)
"""A Gram norm without correct digits is negative for about half of them."""
SINGLE = 2.0**-23
D = P = 64
WIDE, TOKENS, IDS = 500, 16, 8


def _sizes(numbers: torch.finfo) -> tuple[float, float, float]:
    """(inputs, weights, relative spread of inputs) at which a Gram norm loses all its digits.

    Products of 16 bits are summed in float32, so float32's digits count.
    """
    if numbers.max < 1e5:
        return 200.0, 1.0, 2.0**-10
    return 3000.0, 100.0 if numbers.eps > 1e-10 else 1e9, math.sqrt(min(numbers.eps, SINGLE))


def _rows(numbers: torch.finfo, positions: int, d: int, p: int) -> Iterator[Record]:
    """Inputs [1, T, d] nearly alike, weights [1, T, p] that sum to zero over positions."""
    size, weight, little = _sizes(numbers)
    for spread, seed in itertools.product(SPREADS, SEEDS):
        inputs = size * nearly_alike(spread * little, 1, positions, d, seed=seed)
        words = f"inputs {size:g}·(1 ± {spread * little:.0e}), weights {weight:g}·(-7 to 7), seed {seed}"
        yield Record(words, inputs, weight * cancelling(positions, p, seed))


def _over_tokens(positions: int, layer: Callable[[], nn.Module], numbers: torch.finfo) -> Problem:
    """A layer from D to P channels."""
    return Problem(layer(), [ordinary((positions, D), (positions, P), _rows(numbers, positions, D, P))])


def _behind_softmax(numbers: torch.finfo) -> Problem:
    """Nearly equal tokens: only rounding returns through the softmax."""
    return Problem(attention(16), [ordinary((8, 16), (8, 16), _rows(numbers, 8, 16, 16))])


def _over_pixels(
    layer: Callable[[], nn.Module], channels: int, size: int, out: tuple[int, int, int], numbers: torch.finfo
) -> Problem:
    """A convolution of nearly constant images [channels, size, size] to `out`, channels, rows and columns."""
    p, *pixels = out
    scale, _, little = _sizes(numbers)
    records = []
    own = _rows(numbers, math.prod(pixels), 1, p)
    for row, (spread, seed) in zip(own, itertools.product(SPREADS, SEEDS), strict=True):
        image = scale * nearly_alike(spread * little, 1, channels, size, size, seed=seed)
        records.append(Record(row.label, image, as_image(row.weights, *pixels)))
    return Problem(layer(), [ordinary((channels, size, size), out, records)])


def _over_uses(numbers: torch.finfo) -> Problem:
    """Both uses have nearly the same inputs, and opposite weights."""
    size, weight, little = _sizes(numbers)
    records = []
    for spread, seed in itertools.product(SPREADS, SEEDS):
        once = nearly_alike(1.0, 1, 1, D, seed=seed)
        inputs = size * torch.cat([once, once * nearly_alike(spread * little, 1, 1, D, seed=seed + 50)], dim=1)
        words = f"inputs {size:g}, and again but for {spread * little:.0e}, opposite weights of {weight:g}, {seed}"
        records.append(Record(words, inputs, weight * cancelling(2, P, seed)))
    return Problem(twice(D, P), [ordinary((2, D), (2, P), records)])


def _of_one_id(model: Callable[[], nn.Module], out: int, numbers: torch.finfo) -> Problem:
    """The same id at all positions; its gradients are large, and sum to rounding errors."""
    records = [Record(words, torch.full((1, TOKENS), 3), weights) for words, weights in _large(numbers, TOKENS, out)]
    ids = torch.randint(0, IDS, (ORDINARY, TOKENS), generator=drawn(7))
    return Problem(model(), [Batch(ids, normal(ORDINARY, TOKENS, out, seed=8), records)])


def _of_a_bias(numbers: torch.finfo) -> Problem:
    """A linear layer with only the bias trained, whose gradient depends on the weights alone."""
    layer = nn.Linear(4, P)
    layer.weight.requires_grad_(False)
    records = [Record(words, normal(1, TOKENS, 4, seed=3), w) for words, w in _large(numbers, TOKENS, P)]
    return Problem(layer, [ordinary((TOKENS, 4), (TOKENS, P), records)])


def _large(numbers: torch.finfo, positions: int, channels: int) -> Iterator[tuple[str, Tensor]]:
    """(words, weights [1, T, p] of several sizes that sum to rounding errors over positions)."""
    sizes = dict.fromkeys(min(share / numbers.eps, numbers.max / 64) for share in (1.0, 1e3, 1e6))
    for size, seed in itertools.product(sizes, SEEDS):
        yield f"weights of {size:.2g} less their mean, seed {seed}", size * centred(positions, channels, seed)


def _one_sample(sizes: Callable[[torch.finfo], list[tuple[float, float]]], numbers: torch.finfo) -> Problem:
    """A dense layer's sample of several (size of the inputs, size of the weights)."""
    records = []
    for size, weight in sizes(numbers):
        inputs, weights = size * normal(1, 16, seed=3), weight * normal(1, 16, seed=4)
        records.append(Record(f"inputs of {size:g}, weights of {weight:g}", inputs, weights))
    return Problem(nn.Linear(16, 16), [ordinary((16,), (16,), records)])


def _squares(numbers: torch.finfo) -> list[tuple[float, float]]:
    """Gradients within the dtype's range, with squares beyond it; by the input, by the weight and by their product."""
    return [
        (power_of_two(numbers, a), power_of_two(numbers, b))
        for a, b in ((0.65, 0.0), (0.0, 0.65), (0.32, 0.32), (0.55, 0.3))
    ]


def _apart(numbers: torch.finfo) -> list[tuple[float, float]]:
    """One factor's square overflows, the other's underflows."""
    return [(power_of_two(numbers, share), 1 / power_of_two(numbers, share)) for share in (0.55, 0.65, 0.8)]


def _small(*positions: int, numbers: torch.finfo) -> Problem:
    """For a function that divides by the norm: the squares of some entries underflow, those of others do not."""
    shape, records = (*positions, WIDE), []
    least = math.sqrt(numbers.smallest_normal * numbers.eps)  # its square is the smallest number
    for step in range(-16, 17):
        inputs, weights = (torch.ones(1, *shape, dtype=torch.float64) for _ in range(2))
        inputs[..., 0] = weights[..., 0] = 1.7  # the entries that do not underflow
        size = least * 2.0 ** (step / 4)
        records.append(Record(f"gradients of {size:.1e}", inputs, size * weights))
    layer = nn.Linear(WIDE, WIDE, bias=False)
    return Problem(layer, [ordinary(shape, shape, records)], Automatic(max_grad_norm=1.0))


def _with_entry(value: float, numbers: torch.finfo) -> Problem:
    """An image with one entry that is not a finite number."""
    image = normal(1, 3, 6, 6, seed=3)
    image[0, 1, 2, 3] = value
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    record = Record(f"a pixel is {value}", image, normal(1, 5, seed=4))
    return Problem(layers, [ordinary((3, 6, 6), (5,), [record])])


def _alike(layer: nn.Module, numbers: torch.finfo) -> Problem:
    """Every gradient is C/4 in each of 16 coordinates, with the sum near the loss of a digit.

    The record is n + 1, for several successive n; for one of them the sum jumps.
    """
    inputs, weights = torch.ones(1, 16, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    most = 4096 if numbers.eps < 2.0**-8 else 1024
    batches = [
        Batch(inputs.expand(n, -1), weights.expand(n, -1), [Record(f"one more than {n}", inputs, weights, n)])
        for n in range(most + 2, most + 20)
    ]
    return Problem(layer, batches)


def _in_common(numbers: torch.finfo) -> Problem:
    """2,000 records with a common component, as in a class, but all different."""
    inputs = normal(1, 256, seed=3) + normal(2000, 256, seed=4)
    weights = 1 + 0.2 * normal(2000, 8, seed=5)
    record = normal(1, 256, seed=6) * 0.5 + normal(1, 256, seed=3)
    places = [Record(f"at {place}", record, weights[:1], place) for place in (0, 1000, 2000)]
    return Problem(nn.Linear(256, 8), [Batch(inputs, weights, places)])


def _of_one_word(numbers: torch.finfo) -> Problem:
    """2,000 records with the same single id."""
    weights = torch.full((2000, 4), 2.0, dtype=torch.float64)
    records = [Record("one more", torch.tensor([3]), weights[:1], 2000)]
    return Problem(nn.Embedding(IDS, 4), [Batch(torch.full((2000,), 3), weights, records)])


def _in_order(numbers: torch.finfo) -> Problem:
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


def _constant(layer: Callable[[], nn.Module], shape: tuple[int, ...], numbers: torch.finfo) -> Problem:
    """Constant or nearly constant inputs before a trained normalisation."""
    records = []
    sizes = [s for s in (1e2, 1e4, 1e6, 1e8, 1e12) if s < numbers.max / 4]
    for size, spread, weight in itertools.product(sizes, (0.0, 1e-2, 1.0, 1e2), (1.0, 1e3)):
        image, weights = size + spread * normal(1, *shape, seed=3), weight * normal(1, *shape, seed=4)
        records.append(Record(f"{size:g} ± {spread:g}, weights of {weight:g}", image, weights))
    return Problem(layer(), [ordinary(shape, shape, records)])


def _plain(numbers: torch.finfo) -> Problem:
    """A record without any difficulty."""
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 6)
    )
    records = [Record("N(0, 1)", normal(1, 3, 6, 6, seed=3), normal(1, 6, seed=4))]
    return Problem(layers, [ordinary((3, 6, 6), (6,), records)])


def _linear() -> nn.Module:
    return nn.Linear(D, P, bias=False)


def _found(kind: str, numbers: torch.finfo) -> Problem:
    """The worst points of one kind that a search has found."""
    problems = [point.problem(numbers) for point in FOUND if point.kind == kind]
    return Problem(problems[0].model, [batch for problem in problems for batch in problem.batches])


UP_TO_SINGLE = tuple(dtype for dtype in DTYPES if dtype != "float64")
"""Float64 would need millions of records."""

RECORDS = [
    HardRecord("ordinary", "an ordinary record, longer than C: near 1 is right", _plain),
    HardRecord(
        "cancels over 4 tokens", "Gram matrices cancel: the norm comes out as 0", partial(_over_tokens, 4, _linear)
    ),
    HardRecord("cancels over 32 tokens", "the same with more to cancel", partial(_over_tokens, 32, _linear)),
    HardRecord(
        "cancels over pixels",
        "Gram matrices of a pointwise convolution cancel",
        partial(_over_pixels, lambda: nn.Conv2d(D, P, 1, bias=False), D, 4, (P, 4, 4)),
    ),
    HardRecord(
        "cancels over patches",
        "Gram matrices of a convolution cancel",
        partial(_over_pixels, lambda: nn.Conv2d(16, P, 3, bias=False), 16, 5, (P, 3, 3)),
    ),
    HardRecord("cancels behind a softmax", "the same pass run twice must give the same", _behind_softmax),
    HardRecord(
        "cancels in a standardised weight",
        "a gradient that comes to nothing is pulled back to the parameters",
        partial(_over_pixels, lambda: standardised(16, P), 16, 5, (P, 3, 3)),
    ),
    HardRecord("cancels between uses", "two uses of one weight have opposite gradients", _over_uses),
    HardRecord(
        "cancels within one id", "positions of one id cancel", partial(_of_one_id, lambda: nn.Embedding(IDS, 16), 16)
    ),
    HardRecord(
        "cancels in a tied table",
        "the same in a table that is the head, too",
        partial(_of_one_id, lambda: tied(IDS, 16), IDS),
    ),
    HardRecord("cancels in a bias", "a bias alone, whose positions cancel", _of_a_bias),
    *(
        HardRecord(f"found by search, {kind}", "the worst of thousands of points", partial(_found, kind))
        for kind in KINDS
    ),
    HardRecord(
        "squares overflow", "gradients that are numbers, with squares that are none", partial(_one_sample, _squares)
    ),
    HardRecord(
        "huge by tiny", "the square of one factor overflows, that of the other vanishes", partial(_one_sample, _apart)
    ),
    HardRecord("tiny", "squares vanish, and automatic clipping divides by the norm", lambda n: _small(numbers=n)),
    HardRecord("tiny over tokens", "the same, as products of Gram matrices", lambda n: _small(4, numbers=n)),
    HardRecord("a pixel is NaN", "right is to refuse it, and to say which it is", partial(_with_entry, math.nan)),
    HardRecord("a pixel is infinite", "right is to refuse it, and to say which it is", partial(_with_entry, math.inf)),
    HardRecord(
        "alike in thousands",
        "the sum is far larger than what a record adds to it",
        lambda numbers: _alike(nn.Linear(16, 1, bias=False), numbers),
    ),
    HardRecord(
        "alike through a cast", "the same of a weight that is cast", lambda numbers: _alike(cast(16, 1), numbers)
    ),
    HardRecord("in common in thousands", "the same of records that are not alike", _in_common),
    HardRecord("one word in thousands", "the same of an embedding", _of_one_word),
    HardRecord("in the worst order", "every later addition is rounded up", _in_order, UP_TO_SINGLE),
    *(
        HardRecord(f"constant before {words}", "what is normalised is rounding", partial(_constant, layer, shape))
        for words, layer, shape in (
            ("group norm", lambda: nn.GroupNorm(2, 8), (8, 4, 4)),
            ("layer norm", lambda: nn.LayerNorm(16), (6, 16)),
            ("instance norm", lambda: nn.InstanceNorm2d(8, affine=True), (8, 4, 4)),
            ("RMS norm", lambda: nn.RMSNorm(16), (6, 16)),
        )
    ),
]
