"""Measure the cost of each way to find a norm, and cache it in a file for later runs.

A kind of use is a rule with its shapes and dtype, and the number of samples rounded to a power of two. For each kind,
the seconds of one sample are measured on the input of the current step and a random output gradient. The norm is timed
by every way whose predicted time is not far too long, in several block sizes. Its share of the clipped sum is timed by
the ordinary weight gradient and from kept gradients.

There is one file for each device, torch version, number of threads and source of the rules, in the folder DPBENCH_CACHE
(default: $XDG_CACHE_HOME/dpbench or ~/.cache/dpbench; "off" writes no file). A folder or file that others could have
written is not used; a warning says so.

Functions take:
    rule, output: of a use, the rule with its input; and the shape and dtype of the output.
"""

import contextlib
import hashlib
import json
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping import cache
from clipping.numerics import kernels
from clipping.numerics.per_sample import weighted_sum
from clipping.rules.base import Route, Rule, Spec

Key = tuple[bool, str, int]
Clock = Callable[[Callable[[], object]], float]

HOPELESS = 4
"""Skip a way whose predicted time exceeds this multiple of the best time measured."""
MOST_SAMPLES = 64
"""Most samples to time a way on."""
SHORTLIST = 3
"""Keys that are timed again with flushed caches, of Gram matrices and of instantiations each."""
CACHES = 32 * 2**20
"""Bytes beyond the caches of any one core."""
CACHED = 2**17
"""Bytes of a block that is not halved: it stays in any core's cache."""
REPEATS = 2
"""Number of runs when a way is first timed. The shortest time counts."""
TURNS = 4
"""Repetitions of the timing of the best ways, so that a disturbance does not stay on record."""


class Costs(NamedTuple):
    """Seconds of one sample.

    Attributes:
        norms: (ghost, way, block) -> seconds of the norm.
        weight_gradient: of its share of the sum by the ordinary weight gradient.
        kept: of its share of the sum from kept gradients; None if none was instantiated.
        reach: of the size of its terms (`numerics.rounding_bounds`), needed for instantiated gradients that are not
            kept.
    """

    norms: dict[Key, float]
    weight_gradient: float
    kept: float | None
    reach: float = 0.0

    def best(self, *, ghost: bool) -> tuple[Route, float] | None:
        """The fastest route and its seconds; None if there is none.

        Args:
            ghost: among Gram matrices; else among instantiations.
        """
        found = _of(self.norms, ghost)
        if not found:
            return None
        key = min(found, key=self.norms.__getitem__)
        return Route(*key), self.norms[key]

    def fit(self, rule: Rule) -> bool:
        """Whether there are norms, and each is by a way of this rule."""
        ways = {(way.ghost, way.name) for way in rule.ways}
        return bool(self.norms) and all(key[:2] in ways for key in self.norms)


def ghost_by_paper(positions: int, inputs: int, outputs: int) -> bool:
    """The rule of arXiv:2205.10683 (equation 4.1), on space alone: 2T² ≤ pd.

    Args:
        positions: T.
        inputs: d.
        outputs: p.
    """
    return 2 * positions**2 <= inputs * outputs


def predicted(rule: Rule, output: Spec, *, kernels: float | None = None) -> Costs:
    """Predict the costs by formula, from rough rates.

    Args:
        kernels: factor by which ways with `is_kernel` multiply more slowly than libraries; None leaves them out.
    """
    norms = {}
    for way in rule.ways:
        if not way.is_kernel or kernels is not None:
            slower = kernels if way.is_kernel and kernels is not None else 1.0
            norms[way.ghost, way.name, 0] = rule.seconds(output, way.name, slower)
    return Costs(norms, rule.summing_seconds(output, kept=False), rule.summing_seconds(output, kept=True))


def measured(rule: Rule, output: Spec) -> Costs:
    """Time every way that may be fastest, in the block sizes that may be, on the rule's own input."""
    count = min(rule.samples(output), MOST_SAMPLES)
    device = rule.parameter.device
    g = torch.randn((rule.output_rows(count), *output.shape[1:]), dtype=output.dtype, device=device)
    g = rule.laid_out(g, ghost=False)
    clock = _clock(device)
    single: dict[Key, float] = {}
    formulas = predicted(rule, output, kernels=1.0).norms
    for ghost, way, _ in sorted(formulas, key=formulas.__getitem__):
        if not single or formulas[ghost, way, 0] <= HOPELESS * min(single.values()):
            single |= _descend(rule, g, ghost, way, clock, whole=count == rule.samples(output))
    # a repeated block stays in cache, so time the best ways again as they will run, in turns
    keys = [key for ghost in (True, False) for key in sorted(_of(single, ghost), key=single.__getitem__)[:SHORTLIST]]
    cold = _clock(device, emptied=True)
    turns = [_turn(rule, g, keys, cold) for _ in range(TURNS)]
    return Costs(
        {key: median(turn.norms[key] for turn in turns) for key in keys},
        median(turn.weight_gradient for turn in turns),
        median(kept) if (kept := [turn.kept for turn in turns if turn.kept is not None]) else None,
        median(turn.reach for turn in turns),
    )


def _turn(rule: Rule, g: Tensor, keys: list[Key], clock: Clock) -> Costs:
    """Time the norm by each key, the weight gradient, and the sum from gradients that the fastest way instantiates."""
    count = rule.samples(g)
    factors = torch.ones(count, device=g.device, dtype=g.dtype)
    norms = {key: clock(lambda key=key: _run(rule, g, key)) / count for key in keys}  # type: ignore[misc]
    weight_gradient = clock(lambda: rule.weighted(g, factors)) / count
    reach = clock(lambda: rule.reach(g)) / count
    if not (instantiated := _of(norms, ghost=False)):
        return Costs(norms, weight_gradient, None, reach)
    _, way, block = min(instantiated, key=norms.__getitem__)
    blocks = rule.blocks(g, way, block)
    parts = [rule.instantiate(g, samples, way) for samples in blocks]
    kept = clock(lambda: [weighted_sum(factors[b], part) for b, part in zip(blocks, parts, strict=True)]) / count
    return Costs(norms, weight_gradient, kept, reach)


def _of(norms: Iterable[Key], ghost: bool) -> list[Key]:
    return [key for key in norms if key[0] == ghost]


def _run(rule: Rule, g: Tensor, key: Key) -> object:
    """Run a route on the whole batch, and return what it keeps."""
    ghost, way, block = key
    if ghost:
        squares, reach = rule.squares_and_reach(g, Route(*key))
        return squares, reach or rule.reach(g)
    return [rule.named(way).kept(rule, g, samples) for samples in rule.blocks(g, way, block)]


def _descend(rule: Rule, g: Tensor, ghost: bool, way: str, clock: Clock, *, whole: bool) -> dict[Key, float]:
    """Seconds of one sample, from the largest block that fits the workspace, halved while that helps.

    If a `whole` batch fits, its block is 0, for no limit: Poisson batches may be a little larger.
    """
    block = rule.blocks(g, way)[0].stop
    whole = whole and block == rule.samples(g)
    found: dict[Key, float] = {}
    best = float("inf")
    while True:
        seconds = clock(partial(rule.named(way).norms, rule, g, slice(0, block))) / block
        found[ghost, way, 0 if whole else block] = seconds
        if seconds > 1.1 * best or block == 1 or block * rule.work(g, way).workspace <= CACHED:
            return found
        best, whole = min(best, seconds), False
        block //= 2


def _more_than_caches(device: torch.device) -> int:
    """Bytes to write to flush the device's caches: on a GPU, twice its L2 cache."""
    if device.type != "cuda":
        return CACHES
    return max(CACHES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)


def _clock(device: torch.device, *, emptied: bool = False) -> Clock:
    """Return a function that times another: the best of a few runs, after one to warm up.

    `emptied`: one run with flushed caches and, on a CPU, untouched pages for the result, as in a step.
    """
    filler = torch.empty(_more_than_caches(device), dtype=torch.uint8, device=device) if emptied else None

    def seconds(run: Callable[[], object]) -> float:
        before = run()
        if not emptied or device.type != "cpu":
            del before
        best = float("inf")
        for _ in range(1 if emptied else REPEATS):
            if filler is not None:
                filler.fill_(0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            result = run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
            del result
        return best

    return seconds


# Errors that a truncated or foreign file may raise.
_FOREIGN = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


class CostCache:
    """Measured costs by kind of use. Reads the device's file, and rewrites it when costs are added.

    Args:
        device: the device that the costs are of.
        file: False to keep the costs in memory only.
    """

    def __init__(self, device: torch.device, *, file: bool = True) -> None:
        self._costs: dict[str, Costs] = {}
        self._path = _path(device) if file else None
        if self._path is None:
            return
        try:
            self._path = cache.own_folder(self._path.parent) / self._path.name
            entries = json.loads(cache.read(self._path))
            self._costs = {kind: _decoded(**entry) for kind, entry in entries.items()}
        except cache.Untrusted as error:
            warnings.warn(f"timed routes are not kept: {error}", stacklevel=2)
            self._path = None
        except (OSError, *_FOREIGN):  # missing or not whole: measure again
            pass

    def get(self, kind: str) -> Costs | None:
        """The costs of a kind of use, or None.

        Args:
            kind: repr of the planner's `kind`.
        """
        return self._costs.get(kind)

    def add(self, found: dict[str, Costs]) -> None:
        """Store costs, here and in the file.

        Args:
            found: kind of use -> measured costs.
        """
        self._costs |= found
        if self._path is None:
            return
        entries = {kind: _encoded(costs) for kind, costs in self._costs.items()}
        with contextlib.suppress(OSError):  # read-only home: measure again next time
            cache.replace(self._path, json.dumps(entries).encode())


def _encoded(costs: Costs) -> dict[str, object]:
    return costs._asdict() | {"norms": [[*key, seconds] for key, seconds in costs.norms.items()]}


def _decoded(norms: Any, weight_gradient: Any, kept: Any, reach: Any) -> Costs:
    by_key = {(bool(ghost), str(way), int(block)): _seconds(seconds) for ghost, way, block, seconds in norms}
    return Costs(by_key, _seconds(weight_gradient), None if kept is None else _seconds(kept), _seconds(reach))


def _seconds(value: Any) -> float:
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"expected seconds, got {value!r}")
    return float(value)


def _path(device: torch.device) -> Path | None:
    folder = cache.folder()
    if folder is None:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    here = Path(__file__).resolve().parents[1]
    kinds = ("rules/*.py", "accel/*.py", "native/*.[ch]")
    sources = [file.read_text() for kind in kinds for file in sorted(here.glob(kind))]
    compiled = str(device.type == "cpu" and kernels.cpu.supported(torch.empty(0, dtype=torch.float32, device="cpu")))
    known = [name, platform.node(), torch.__version__, str(torch.get_num_threads()), compiled, *sources]
    if device.type == "cuda":  # TF32 changes the cost of products
        known += [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]  # type: ignore[attr-defined]
    return folder / f"routes-{device.type}-{hashlib.sha256(chr(10).join(known).encode()).hexdigest()[:16]}.json"
