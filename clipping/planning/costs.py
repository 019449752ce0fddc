"""What each way of finding a norm costs on this device: measured once for a kind of use, and kept for the next run.

A kind of use is the rule with its shapes and dtype, and the number of samples to a power of two. Of each, the seconds
of one sample: of the norm by every way that is not hopeless, in blocks of various sizes; of its share of the clipped
sum by the ordinary weight gradient, and from kept gradients. All are measured on the input of the step at hand and a
random output gradient. They are written to a file that is the device's, the version of torch's, the number of threads'
and the rules' source's, in the folder DPBENCH_CACHE (default: $XDG_CACHE_HOME/dpbench or ~/.cache/dpbench; "off" keeps
nothing). A folder or a file that others could have written is not used, and a warning says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import operator
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping import cache
from clipping.numerics import kernels
from clipping.numerics.per_sample import weighted_sum
from clipping.numerics.squares import sum_of_squares
from clipping.rules.base import KERNELS, Route, Rule, Spec

Key = tuple[bool, str, int]
Clock = Callable[[Callable[[], object]], float]

HOPELESS = 4
"""A way is not timed if its formula says that it takes this many times what the best one was measured to."""
MOST_SAMPLES = 64
SHORTLIST = 3
CACHES = 32 * 2**20
"""Bytes that no core's own cache holds."""
REPEATS = 2
TURNS = 4
"""Of what may be chosen: a way that a disturbed moment makes look slow or fast would stay on record."""


class Costs(NamedTuple):
    """Seconds of one sample.

    Attributes:
        norms: (ghost, way, block) -> of its norm.
        weight_gradient: of its share of the sum by the ordinary weight gradient.
        kept: of its share of the sum from kept gradients, None if none was instantiated.
    """

    norms: dict[Key, float]
    weight_gradient: float
    kept: float | None

    def best(self, *, ghost: bool) -> tuple[Route, float] | None:
        """The fastest route by Gram matrices, or by instantiating, and its seconds; None if there is none.

        Args:
            ghost: by Gram matrices, or by instantiating.
        """
        found = _of(self.norms, ghost)
        if not found:
            return None
        key = min(found, key=self.norms.__getitem__)
        return Route(*key), self.norms[key]

    def fit(self, rule: Rule) -> bool:
        """Whether every way is one of this rule, and there is one.

        Args:
            rule: of a use.
        """
        return bool(self.norms) and all(
            way in (rule.ghosts if ghost else rule.instantiations) for ghost, way, _ in self.norms
        )


def ghost_by_paper(positions: int, inputs: int, outputs: int) -> bool:
    """The rule of arXiv:2205.10683 (equation 4.1), on space alone: 2T² ≤ pd.

    Args:
        positions: T.
        inputs: d.
        outputs: p.
    """
    return 2 * positions**2 <= inputs * outputs


def predicted(rule: Rule, output: Spec, *, kernels: float | None = None) -> Costs:
    """The same by formula, from rough rates.

    Args:
        rule, output: of a use.
        kernels: what the time of those ways that not every machine has is multiplied by; None leaves them out.
    """
    norms = {}
    for ghost, ways in ((True, rule.ghosts), (False, rule.instantiations)):
        for way in ways:
            if way not in KERNELS:
                norms[ghost, way, 0] = rule.seconds(output, way)
            elif kernels is not None:
                norms[ghost, way, 0] = kernels * rule.seconds(output, way)
    return Costs(norms, rule.summing_seconds(output, kept=False), rule.summing_seconds(output, kept=True))


def measured(rule: Rule, output: Spec) -> Costs:
    """Time every way that may win, in the blocks that may, on the rule's own input.

    Args:
        rule: of a use, with its input.
        output: shape and dtype of the use's output.
    """
    count = min(rule.samples(output), MOST_SAMPLES)
    device = rule.parameter.device
    g = torch.randn((rule.output_rows(count), *output.shape[1:]), dtype=output.dtype, device=device)
    clock = _clock(device)
    single: dict[Key, float] = {}
    formulas = predicted(rule, output, kernels=1.0).norms
    for ghost, way, _ in sorted(formulas, key=formulas.__getitem__):
        if not single or formulas[ghost, way, 0] <= HOPELESS * min(single.values()):
            single |= _descend(rule, g, ghost, way, clock)
    # one block again and again finds its memory in the caches: the best are timed as they will run, in turns
    keys = [key for ghost in (True, False) for key in sorted(_of(single, ghost), key=single.__getitem__)[:SHORTLIST]]
    cold = _clock(device, emptied=True)
    turns = [_turn(rule, g, keys, cold) for _ in range(TURNS)]
    return Costs(
        {key: median(turn.norms[key] for turn in turns) for key in keys},
        median(turn.weight_gradient for turn in turns),
        median(kept) if (kept := [turn.kept for turn in turns if turn.kept is not None]) else None,
    )


def _turn(rule: Rule, g: Tensor, keys: list[Key], clock: Clock) -> Costs:
    """The norm by each of these, the weight gradient, and the sum from what the fastest one instantiates."""
    count = rule.samples(g)
    factors = torch.ones(count, device=g.device, dtype=g.dtype)
    norms = {key: clock(lambda key=key: _run(rule, g, key)) / count for key in keys}  # type: ignore[misc]
    weight_gradient = clock(lambda: rule.weighted(g, factors)) / count
    if not (instantiated := _of(norms, ghost=False)):
        return Costs(norms, weight_gradient, None)
    _, way, block = min(instantiated, key=norms.__getitem__)
    blocks = rule.blocks(g, way, block)
    parts = [rule.instantiate(g, samples, way) for samples in blocks]
    kept = clock(lambda: [weighted_sum(factors[b], part) for b, part in zip(blocks, parts, strict=True)]) / count
    return Costs(norms, weight_gradient, kept)


def _of(norms: Iterable[Key], ghost: bool) -> list[Key]:
    return [key for key in norms if key[0] == ghost]


def _run(rule: Rule, g: Tensor, key: Key) -> object:
    """The whole batch by a route, with what it keeps."""
    ghost, way, block = key
    if ghost:
        return rule.squared_norms(g, Route(*key))
    made = []
    for samples in rule.blocks(g, way, block):
        part = rule.instantiate(g, samples, way)
        made.append((part, sum_of_squares(part)))
    return made


def _descend(rule: Rule, g: Tensor, ghost: bool, way: str, clock: Clock) -> dict[Key, float]:
    """Seconds of one sample: from the largest block that the workspace holds, halved while that helps."""
    find = rule._ghost if ghost else rule._instantiated
    block = rule.blocks(g, way)[0].stop
    found: dict[Key, float] = {}
    best = float("inf")
    while True:
        seconds = clock(lambda block=block: find(g, slice(0, block), way)) / block  # type: ignore[misc]
        found[ghost, way, block] = seconds
        if seconds > 1.1 * best or block == 1:
            return found
        best = min(best, seconds)
        block //= 2


def _more_than_caches(device: torch.device) -> int:
    """So many bytes, when written, leave nothing else in the device's caches: twice what all cores of a GPU share."""
    if device.type != "cuda":
        return CACHES
    return max(CACHES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)


def _clock(device: torch.device, *, emptied: bool = False) -> Clock:
    """Times a function: the best of a few runs after one that does not count.

    `emptied`: one run, with nothing in the caches, and (on a CPU) the result in pages that nothing has touched yet, as
    in a step.
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


#: What an entry that is torn, or not ours, can come to.
_FOREIGN = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


class CostCache:
    """Measured costs by kind of use, read from the device's file and written back when one is added.

    Args:
        device: whose costs.
        file: False for one of this process alone.
    """

    def __init__(self, device: torch.device, *, file: bool = True) -> None:
        self._costs: dict[str, Costs] = {}
        self._path = _path(device) if file else None
        entries: object = {}
        if self._path is not None:
            try:
                self._path = cache.own_folder(self._path.parent) / self._path.name
                entries = json.loads(cache.read(self._path))
            except cache.Untrusted as error:
                warnings.warn(f"timed routes are not kept: {error}", stacklevel=2)
                self._path = None
            except (OSError, *_FOREIGN):  # not there yet, or torn: measured again
                pass
        for kind, entry in entries.items() if isinstance(entries, dict) else ():
            with contextlib.suppress(*_FOREIGN):
                self._costs[kind] = _decoded(entry)

    def get(self, kind: str) -> Costs | None:
        """What is known of a kind of use.

        Args:
            kind: of a use, as `kind` of the planner has it in words.
        """
        return self._costs.get(kind)

    def add(self, found: dict[str, Costs]) -> None:
        """Remember, here and in the file.

        Args:
            found: kind of use -> what was measured of it.
        """
        self._costs |= found
        if self._path is None:
            return
        entries = {kind: _encoded(costs) for kind, costs in self._costs.items()}
        with contextlib.suppress(OSError):  # a home that cannot be written to: measured again next time
            cache.replace(self._path, json.dumps(entries).encode())


def _encoded(costs: Costs) -> dict[str, object]:
    norms = [[ghost, way, block, seconds] for (ghost, way, block), seconds in costs.norms.items()]
    return {"norms": norms, "weight_gradient": costs.weight_gradient, "kept": costs.kept}


def _decoded(entry: Any) -> Costs:
    norms = {(bool(g), str(w), operator.index(b)): _seconds(s) for g, w, b, s in entry["norms"]}
    if not norms or min(block for _, _, block in norms) < 0:
        raise ValueError("expected a way, and blocks of at least one sample (0: as many as fit)")
    kept = entry["kept"]
    return Costs(norms, _seconds(entry["weight_gradient"]), None if kept is None else _seconds(kept))


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"expected seconds, got {value!r}")
    return seconds


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
    if device.type == "cuda":  # products of float32 in TF32 are other products
        known += [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]  # type: ignore[attr-defined]
    return folder / f"routes-{device.type}-{hashlib.sha256(chr(10).join(known).encode()).hexdigest()[:16]}.json"
