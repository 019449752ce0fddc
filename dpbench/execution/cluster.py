"""A cluster that we do not have: how long a sweep takes on it, and what private training keeps of ordinary throughput.

Described in five lines of TOML::

    nodes = 16
    gpus_per_node = 8
    price_per_gpu_hour = 2.5    # in any currency
    bandwidth = 12.5e9          # bytes a second of the slowest link of a ring over all GPUs
    latency = 5e-6              # seconds of a message on it

and a sixth if need be: ``speed = 3.0``, how many times as fast a GPU is as the device of the records (1 if not said).

**A sweep.** A job takes as long as its like has taken, divided by `speed`; a search is a chain of probes, after which
its timed rounds may start. Longest first, each job goes to the GPUs that are free first (Graham 1969: at most 4/3 of
the best schedule for independent jobs). Every GPU is paid until the last job ends.

**Data-parallel training.** Let t be the seconds of an ordinary step without communication, r·t of a private one, S the
bytes of the gradient, N GPUs, β the bandwidth, α the latency:

    ring(S)   = 2 (N-1)/N · S/β + 2 (N-1) α          an all-reduce over a ring (Patarasuk and Yuan 2009)
    ordinary  = t + max(ring(S) - 2t/3, ring(b))     it runs beside the backward pass, two thirds of the step, but for
                                                     the last bucket of b = 25 MiB (DDP's), which waits for its end
    private   = r t + cross,  cross = 2 S/β + 2 (N-1) α   the engine's sums cross when the factors are known, which is
                                                     after the backward pass: a reduction to the first process, which
                                                     adds the noise, and a broadcast, both through a chain of pieces
    efficiency = ordinary / private                  of throughputs

Not in it: the gather of shards (FSDP2), which private and ordinary training do alike; stragglers; contention.

**Checked** against published points, of a system whose private gradients cross like ordinary ones: then both have the
same communication beside them, c in units of t, and efficiency = (1 + c) / (r + c). With r as published for one GPU and
c such that the smallest number of GPUs has the least published efficiency, c grows as (N-1)/N of the ring does. One of
the points is so by construction; that the others stay in the published range is the check.
"""

from __future__ import annotations

import heapq
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.errors import UsageError, nearest

_BACKWARD, _BUCKET = 2 / 3, 25 * 2**20
_NEEDED = ("nodes", "gpus_per_node", "price_per_gpu_hour", "bandwidth", "latency")
_WHOLE = ("nodes", "gpus_per_node")
_MAY_BE_ZERO = ("price_per_gpu_hour", "latency")

#: Least and greatest published throughput of private training beside ordinary, and the GPUs it was measured with.
PUBLISHED = (0.946, 0.963)
PUBLISHED_GPUS = (16, 32, 64, 128)
#: Non-DP by BK, GPT2-large, one GPU: sequences a second of Figure 4 in arXiv:2210.00038.
PUBLISHED_RATIO = 71 / 62


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """See the module's text. `name` is that of its file."""

    nodes: int
    gpus_per_node: int
    price_per_gpu_hour: float
    bandwidth: float
    latency: float
    speed: float = 1.0
    name: str = ""

    @property
    def gpus(self) -> int:
        """Of all nodes together."""
        return self.nodes * self.gpus_per_node

    def ring(self, size: float, gpus: int) -> float:
        """Seconds of an all-reduce of `size` bytes.

        Args:
            size: bytes.
            gpus: that take part.
        """
        return 2 * (gpus - 1) / gpus * size / self.bandwidth + 2 * (gpus - 1) * self.latency

    def ordinary(self, seconds: float, size: float, gpus: int) -> float:
        """Seconds of an ordinary step, of which `seconds` are computing.

        Args:
            seconds: of computing.
            size: bytes of all gradients.
            gpus: that take part.
        """
        if gpus == 1:
            return seconds
        exposed = max(self.ring(size, gpus) - _BACKWARD * seconds, self.ring(min(size, _BUCKET), gpus))
        return seconds + exposed

    def private(self, seconds: float, size: float, gpus: int) -> float:
        """Seconds of a private step, of which `seconds` are computing.

        Args:
            seconds: of computing.
            size: bytes of all gradients.
            gpus: that take part.
        """
        return seconds if gpus == 1 else seconds + 2 * size / self.bandwidth + 2 * (gpus - 1) * self.latency

    def efficiency(self, step: Measured, gpus: int) -> float:
        """Throughput of private beside ordinary training on `gpus` GPUs.

        Args:
            step: as measured on one GPU.
            gpus: that take part.
        """
        t = step.seconds / self.speed
        return self.ordinary(t, step.size, gpus) / self.private(step.ratio * t, step.size, gpus)

    def counts(self) -> list[int]:
        """One, powers of two, and all of the GPUs."""
        found = [2**i for i in range(math.floor(math.log2(self.gpus)) + 1)]
        return found if found[-1] == self.gpus else [*found, self.gpus]


@dataclass(frozen=True)
class Measured:
    """A step that records have of a model: ordinary, `seconds`, and private, `ratio` times that; `size` in bytes."""

    model: str
    backend: str
    batch_size: int
    seconds: float
    ratio: float
    size: int
    device: str
    rounds: int


@dataclass(frozen=True)
class Job:
    """So many GPUs for so long; `then` are the seconds of each of what may start when it has ended."""

    seconds: float
    gpus: int = 1
    then: tuple[float, ...] = ()


@dataclass(frozen=True)
class Bill:
    """What a sweep comes to. `gpu_hours` are those that compute; `cost` is of all GPUs until the last job ends."""

    jobs: int
    wall_seconds: float
    gpu_hours: float
    cost: float
    least_cost: float
    busy: float


def load_cluster(path: Path) -> Cluster:
    """Read a description.

    Args:
        path: of a TOML file.

    Raises:
        UsageError: in one line: no such file, no TOML, a line that is missing, unknown, or no number in its range.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("a readable file after --cluster", f"{path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"TOML in {path}, a line like nodes = 16", str(error)) from error
    known = (*_NEEDED, "speed")
    for name in found:
        if name not in known:
            raise UsageError(f"a name of a line in {path}", name, nearest(name, known), known)
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        raise UsageError(f"a line {missing[0]} = ... in {path}", f"{', '.join(found) or 'nothing'}")
    for name, value in found.items():
        _check(path, name, value)
    return Cluster(**found, name=path.stem)


def _check(path: Path, name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if name in _WHOLE and not (number and isinstance(value, int) and value >= 1):
        raise UsageError(f"{name} in {path} to be a whole number of at least 1", value)
    if not number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        least = "of at least 0" if name in _MAY_BE_ZERO else "above 0"
        raise UsageError(f"{name} in {path} to be a number {least}", value)


def bill(jobs: Iterable[Job], cluster: Cluster) -> Bill:
    """Schedule the jobs; see the module's text.

    Args:
        jobs: to be run.
        cluster: that runs them.

    Raises:
        UsageError: a job of more GPUs than there are.
    """
    jobs = sorted(jobs, key=lambda job: -(job.seconds + max(job.then, default=0.0)))
    free = [0.0] * cluster.gpus
    end = busy = 0.0
    following: list[tuple[float, float, int]] = []
    for job in jobs:
        if job.gpus > cluster.gpus:
            raise UsageError(f"a cluster of at least {job.gpus} GPUs, which a trial takes", cluster.gpus)
        done = _placed(free, job.seconds / cluster.speed, job.gpus, 0.0)
        busy += job.seconds / cluster.speed * job.gpus
        following += [(done, seconds / cluster.speed, job.gpus) for seconds in job.then]
        end = max(end, done)
    for ready, seconds, gpus in sorted(following):
        end = max(end, _placed(free, seconds, gpus, ready))
        busy += seconds * gpus
    hours = end * cluster.gpus / 3600
    return Bill(
        jobs=len(jobs) + len(following),
        wall_seconds=end,
        gpu_hours=busy / 3600,
        cost=hours * cluster.price_per_gpu_hour,
        least_cost=busy / 3600 * cluster.price_per_gpu_hour,
        busy=busy / 3600 / hours if hours else 0.0,
    )


def _placed(free: list[float], seconds: float, gpus: int, ready: float) -> float:
    """Give a job the GPUs that are free first; when it ends. `free` is a heap."""
    begin = max(ready, max(heapq.heappop(free) for _ in range(gpus)))
    for _ in range(gpus):
        heapq.heappush(free, begin + seconds)
    return begin + seconds


def communication_for(efficiency: float) -> float:
    """c, in units of an ordinary step's computing, at which (1 + c) / (r + c) is so much, r as published.

    Args:
        efficiency: in (0, 1).
    """
    return (PUBLISHED_RATIO * efficiency - 1) / (1 - efficiency)


def published_check() -> list[dict[str, float]]:
    """The model at the published numbers of GPUs: {"gpus", "communication", "predicted", "least", "greatest"}."""
    least, greatest = PUBLISHED
    first = PUBLISHED_GPUS[0]
    at_first = communication_for(least)
    rows = []
    for gpus in PUBLISHED_GPUS:
        c = at_first * ((gpus - 1) / gpus) / ((first - 1) / first)
        predicted = (1 + c) / (PUBLISHED_RATIO + c)
        rows.append({"gpus": gpus, "communication": c, "predicted": predicted, "least": least, "greatest": greatest})
    return rows
