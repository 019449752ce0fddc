"""Model a cluster: the time of a sweep on it, and the efficiency of private training.

A cluster is described in five lines of TOML::

    nodes = 16
    gpus_per_node = 8
    price_per_gpu_hour = 2.5    # in any currency
    bandwidth = 12.5e9          # bytes a second of the slowest link of a ring over all GPUs
    latency = 5e-6              # seconds of a message on it

and an optional sixth: ``speed = 3.0``, the speed of a GPU relative to the device of the records (default 1).

**A sweep.** A job takes as long as similar ones have taken, divided by `speed`. A search is a chain of probes, followed
by its timed rounds. Longest first, each job goes to the GPUs that are free first (Graham 1969: at most 4/3 of the best
schedule for independent jobs). Every GPU is paid until the last job ends.

**Data-parallel training.** Let t be the seconds of an ordinary step without communication, r·t of a private one, S the
bytes of the gradient, N GPUs, β the bandwidth, α the latency:

    ring(S)   = 2 (N-1)/N · S/β + 2 (N-1) α          an all-reduce over a ring (Patarasuk and Yuan 2009)
    ordinary  = t + max(ring(S) - 2t/3, ring(b))     it overlaps the backward pass, two thirds of the step, except for
              the last bucket of b = 25 MiB (DDP's)
    private   = r t + cross,  cross = 2 S/β + 2 (N-1) α   the engine's sums are communicated when the factors are known,
              after the backward pass: a reduction to the first process, which adds the noise, and a broadcast, both
              through a chain of pieces
    efficiency = ordinary / private                  of throughputs

Not modelled: the gather of shards (FSDP2), which is the same for both; stragglers; contention.

**Check** against published points of a system that communicates private gradients like ordinary ones. Both then have
the same communication c, in units of t, and efficiency = (1 + c) / (r + c). r is as published for one GPU, and c is set
so that the smallest number of GPUs has the least published efficiency; c then grows as (N-1)/N of the ring does. One
point fits by construction; the check is that the others stay in the published range.

Functions take:
    gpus: the number of GPUs that take part.
    seconds, size: of computing in a step; bytes of all gradients.
    cluster: see the text above.
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

#: Least and greatest published throughput of private relative to ordinary training, and the numbers of GPUs.
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
        """All GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def ring(self, size: float, gpus: int) -> float:
        """Seconds of an all-reduce of `size` bytes."""
        return 2 * (gpus - 1) / gpus * size / self.bandwidth + 2 * (gpus - 1) * self.latency

    def ordinary(self, seconds: float, size: float, gpus: int) -> float:
        """Seconds of an ordinary step."""
        if gpus == 1:
            return seconds
        exposed = max(self.ring(size, gpus) - _BACKWARD * seconds, self.ring(min(size, _BUCKET), gpus))
        return seconds + exposed

    def private(self, seconds: float, size: float, gpus: int) -> float:
        """Seconds of a private step."""
        return seconds if gpus == 1 else seconds + 2 * size / self.bandwidth + 2 * (gpus - 1) * self.latency

    def efficiency(self, step: Measured, gpus: int) -> float:
        """Throughput of private relative to ordinary training.

        Args:
            step: as measured on one GPU.
        """
        t = step.seconds / self.speed
        return self.ordinary(t, step.size, gpus) / self.private(step.ratio * t, step.size, gpus)

    def counts(self) -> list[int]:
        """One, powers of two, and all of the GPUs."""
        found = [2**i for i in range(math.floor(math.log2(self.gpus)) + 1)]
        return found if found[-1] == self.gpus else [*found, self.gpus]


@dataclass(frozen=True)
class Measured:
    """A recorded step of a model: ordinary `seconds`, private `ratio` times that; `size` in bytes."""

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
    """`gpus` GPUs for `seconds`; `then` are the seconds of each job that may start afterwards."""

    seconds: float
    gpus: int = 1
    then: tuple[float, ...] = ()


@dataclass(frozen=True)
class Bill:
    """The total of a sweep. `gpu_hours` are those that compute; `cost` is of all GPUs until the last job ends."""

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
        UsageError: in one line: no such file, no TOML, or a line that is missing, unknown or out of range.
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
        jobs: to run.

    Raises:
        UsageError: a job needs more GPUs than there are.
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
    """Give a job the GPUs that are free first; returns its end. `free` is a heap."""
    begin = max(ready, max(heapq.heappop(free) for _ in range(gpus)))
    for _ in range(gpus):
        heapq.heappush(free, begin + seconds)
    return begin + seconds


def communication_for(efficiency: float) -> float:
    """c, in units of an ordinary step's computing, at which (1 + c) / (r + c) is `efficiency`, with r as published.

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
