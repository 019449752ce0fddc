"""Model a cluster: the time of a sweep on it, and the efficiency of private training.

A cluster is described in five lines of TOML::

    nodes = 16
    gpus_per_node = 8
    price_per_gpu_hour = 2.5    # in any currency
    bandwidth = 12.5e9          # bytes a second of the slowest link of a ring over all GPUs
    latency = 5e-6              # seconds of a message on it

and an optional sixth: ``speed = 3.0``, the speed of a GPU relative to the device of the records (default 1).

**A sweep.** A job takes as long as similar ones have taken, divided by `speed`. A search is a chain: its probes, then
its timed rounds beside each other. The sweep takes as long as its longest job, or as all of its work spread over all
GPUs, whichever is longer; a scheduler that starts the longest jobs first comes close. Every GPU is paid until the end.

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

`tests/execution/test_cluster.py` checks the model of communication against published throughputs on 16 to 128 GPUs.

Functions take:
    gpus: the number of GPUs that take part.
    seconds, size: of computing in a step; bytes of all gradients.
    cluster: see the text above.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbench.errors import UsageError, one_of
from dpbench.records.toml_file import read_toml

_BACKWARD, _BUCKET = 2 / 3, 25 * 2**20
_WHOLE, _MAY_BE_ZERO = ("nodes", "gpus_per_node"), ("price_per_gpu_hour", "latency")
#: Products and ratios of a few numbers up to this are floats.
_MOST = 1e30
_NEEDED = (*_WHOLE, *_MAY_BE_ZERO, "bandwidth")


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
class Job:
    """`gpus` GPUs for `seconds`; `then` are the seconds of each job that may start afterwards."""

    seconds: float
    gpus: int = 1
    then: tuple[float, ...] = ()


def load_cluster(path: Path) -> Cluster:
    """Read a description.

    Args:
        path: of a TOML file.
    """
    found = read_toml(path, "a readable file after --cluster")
    for name, value in found.items():
        one_of(f"a name of a line in {path}", name, (*_NEEDED, "speed"))
        number = type(value) in (int, float) and abs(value) < math.inf
        if name in _WHOLE and not (number and type(value) is int and value >= 1):
            raise UsageError(f"{name} in {path} to be a whole number of at least 1", value)
        if not number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            least = "of at least 0" if name in _MAY_BE_ZERO else "above 0"
            raise UsageError(f"{name} in {path} to be a number {least}", value)
        if value and not 1 / _MOST <= value <= _MOST:
            raise UsageError(f"{name} in {path} to be from {1 / _MOST:g} to {_MOST:g}", value)
    if missing := [name for name in _NEEDED if name not in found]:
        raise UsageError(f"a line {missing[0]} = ... in {path}", ", ".join(found) or "nothing")
    return Cluster(**found, name=path.stem)


def bill(jobs: Sequence[Job], cluster: Cluster) -> dict[str, float]:
    """Predict a sweep, as the module's text says.

    Args:
        jobs: to run.

    Returns:
        `jobs` (their number), `wall_seconds`, `gpu_hours` that compute, `cost` of all GPUs until the end, `least_cost`
        if idle GPUs cost nothing, and `busy`, the share of the time in which GPUs compute.
    """
    if (most := max((job.gpus for job in jobs), default=1)) > cluster.gpus:
        raise UsageError(f"a cluster of at least {most} GPUs, which a trial takes", cluster.gpus)
    work = sum(job.gpus * (job.seconds + sum(job.then)) for job in jobs) / cluster.speed
    longest = max((job.seconds + max(job.then, default=0.0) for job in jobs), default=0.0) / cluster.speed
    wall = max(longest, work / cluster.gpus)
    return {
        "jobs": sum(1 + len(job.then) for job in jobs),
        "wall_seconds": wall,
        "gpu_hours": work / 3600,
        "cost": wall * cluster.gpus / 3600 * cluster.price_per_gpu_hour,
        "least_cost": work / 3600 * cluster.price_per_gpu_hour,
        "busy": work / (wall * cluster.gpus) if wall else 0.0,
    }
