"""The trial of training in several processes. No torch: the parent process imports this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpbench.errors import one_of
from dpbench.trials import STEP_SOURCES, Trial
from dpbench.trials.steps import modules_of_step

#: Way to spread the model over the processes -> in words.
SPREADS = {
    "ddp": "DDP: every process has the whole model",
    "fsdp": "FSDP2: every process has a shard of each parameter",
}
PRECISIONS = ("float32", "mixed")


@dataclass(frozen=True, kw_only=True)
class DistributedTrial(Trial):
    """Whole training steps in `processes` processes, private and ordinary in turns: forward to optimizer, noise too.

    `batch_size` is per process, so that each one's work stays the same. `spread` is one of `SPREADS`. `precision`
    "mixed" computes in bfloat16, with parameters, sums and norms in float32. `backends` are names; include
    `nonprivate`, the wrapper's ordinary training. A process has `threads` threads on a CPU (gloo), or its own GPU on
    CUDA (nccl). The summed clipped gradient is verified against one process.
    """

    kind: ClassVar[str] = "distributed"
    body: ClassVar[str] = "dpbench.training.distributed:run"
    sources: ClassVar[tuple[str, ...]] = (*STEP_SOURCES, "dpbench/training/*.py", "dpbench/engine/*.py")
    model: str
    processes: int
    spread: str
    batch_size: int
    backends: Sequence[str] = ("nonprivate", "bk_mixed")
    precision: str = "float32"
    device: str = "cpu"
    image_size: int | None = 32
    num_classes: int | None = 10
    data: str = "synthetic"
    threads: int = 1
    rounds: int = 5
    max_seconds: float = 10.0
    seed: int = 0
    timeout: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("a spread", self.spread, SPREADS)
        one_of("a precision", self.precision, PRECISIONS)
        if self.processes < 1 or self.batch_size < 1 or self.rounds < 1:
            raise ValueError(
                f"expected processes, batch_size and rounds of at least 1, got {self.processes}, {self.batch_size}, "
                f"{self.rounds}"
            )

    def modules(self) -> tuple[str, ...]:
        library = "torch.distributed.fsdp" if self.spread == "fsdp" else "torch.nn.parallel.distributed"
        return (*modules_of_step(self), library, "torch._dynamo", "numpy", "scipy")

    def label(self) -> str:
        return f"{self.kind} {self.model} {self.spread} {self.precision}, {self.processes} x {self.batch_size}"
