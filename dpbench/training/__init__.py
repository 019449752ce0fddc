"""Trials that train with the engine: accuracy, audits, secrets, several processes. No torch: the parent imports this.

Functions take:
    trial, model, optimizer: what is measured; of this process; after a step.
    dtype, name, shape, seed, noise_multiplier: of model and images; the network's; of an image; of the weights; σ.
    x, y: images and labels.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpbench.errors import one_of
from dpbench.models.data import validate_data
from dpbench.training.faults import FAULTS
from dpbench.trials import STEP_SOURCES, Trial
from dpbench.trials.steps import modules_of_step

__all__ = [
    "FAULTS",
    "FORMS",
    "LEVEL",
    "TESTS",
    "AdamTrial",
    "AuditTrial",
    "CorrelatedTrial",
    "DistributedTrial",
    "MemorisationTrial",
    "UtilityTrial",
    "cifar10_root",
]

#: Way to spread the model over the processes -> in words.
SPREADS = {
    "ddp": "DDP: every process has the whole model",
    "fsdp": "FSDP2: every process has a shard of each parameter",
}
PRECISIONS = ("float32", "mixed")


def cifar10_root() -> str | None:
    """The folder with cifar-10-batches-py, from the environment variable DPBENCH_CIFAR10; None if unset."""
    return os.environ.get("DPBENCH_CIFAR10") or None


@dataclass(frozen=True, kw_only=True)
class UtilityTrial(Trial):
    """Train one model to one ε, and test it. The noise is seeded, so that the measurement is repeatable.

    `target_epsilon` None is ordinary training of the same model on the same batches, without clipping or noise.
    `network` is "linear", "uneven" (linear on pixels of different scales) or "cnn". `data` is "digits" or "synthetic",
    with a fifth for testing, or "cifar10:ROOT", with its own test set.

    `noise` is "gaussian" or "banded:N", or names another sampling: "gaussian@one_pass", "blt:N@one_pass".

    `optimizer` is "SGD" (momentum 0.9), "Adam", "AdamBC", or "AdamBC:0.01" with a floor of 0.01 Φ. For all but SGD the
    result has the spread of Adam's divisors: their 90 % quantile over their 10 % quantile.
    """

    kind: ClassVar[str] = "utility"
    body: ClassVar[str] = "dpbench.training.utility:run"
    sources: ClassVar[tuple[str, ...]] = (
        *STEP_SOURCES,
        "dpbench/training/*.py",
        "dpbench/engine/*.py",
        "accounting/*.py",
    )
    network: str
    target_epsilon: float | None
    seed: int
    backend: str = "bk_mixed"
    clip: str = "flat"
    data: str = "digits"
    delta: float = 1e-5
    batch_size: int = 512
    epochs: int = 40
    lr: float = 1.0
    max_grad_norm: float = 1.0
    noise: str = "gaussian"
    optimizer: str = "SGD"
    device: str = "cpu"
    threads: int = 1  # more are no faster for small models; with one, sums are equal on all machines

    def __post_init__(self) -> None:
        validate_data(self.data)

    def modules(self) -> tuple[str, ...]:
        # an optimizer's first step imports torch._dynamo
        return ("torch", "torch._dynamo", "numpy", "scipy", *(("sklearn.datasets",) if self.data == "digits" else ()))

    def label(self) -> str:
        budget = "ordinary" if self.target_epsilon is None else f"ε={self.target_epsilon:g} {self.clip} {self.backend}"
        how = f"{self.noise} {self.optimizer} b={self.batch_size} lr={self.lr:g}"
        return f"{self.kind} {self.network} {budget} {how} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class CorrelatedTrial(UtilityTrial):
    """A point in a comparison of kinds of `noise`."""

    kind: ClassVar[str] = "correlated"
    alone: ClassVar[bool] = False  # its seconds do not count


@dataclass(frozen=True, kw_only=True)
class AdamTrial(UtilityTrial):
    """A point in a comparison of optimizers."""

    kind: ClassVar[str] = "adam_bias"
    alone: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class AuditTrial(Trial):
    """One run of the engine on canaries: two adversaries test its claims by `TESTS`.

    `fault` seeds one of `FAULTS`, which the audit must find; "" seeds none. `form` is one of `FORMS`.
    """

    kind: ClassVar[str] = "audit"
    body: ClassVar[str] = "dpbench.training.audit:run"
    sources: ClassVar[tuple[str, ...]] = UtilityTrial.sources
    alone: ClassVar[bool] = False
    fault: str = ""
    form: str = "whole"
    canaries: int = 4000
    target_epsilon: float = 1.0
    sample_rate: float = 0.02
    steps: int = 50
    max_grad_norm: float = 20.0
    backend: str = "bk_mixed"
    seed: int = 0
    device: str = "cpu"

    def modules(self) -> tuple[str, ...]:
        return ("torch", "torch._dynamo", "numpy", "scipy")

    def label(self) -> str:
        return f"{self.kind} {self.fault or 'no fault'} {self.backend} {self.form} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class MemorisationTrial(Trial):
    """Fine-tune a language model to one ε on text with secrets, and measure what it reveals.

    See `dpbench.integrations.tutorials.memorisation`. `target_epsilon` None is ordinary fine-tuning. `seed` chooses
    text, numbers and model; the noise comes from a cipher, so that runs of one seed differ.
    """

    kind: ClassVar[str] = "memorisation"
    body: ClassVar[str] = "dpbench.integrations.tutorials.memorisation_trial:run"
    sources: ClassVar[tuple[str, ...]] = (
        *UtilityTrial.sources,
        "dpbench/integrations/*.py",
        "dpbench/integrations/tutorials/*.py",
    )
    alone: ClassVar[bool] = False
    target_epsilon: float | None
    seed: int
    records: int = 4000
    public_records: int = 6000
    epochs: int = 20
    public_epochs: int = 4
    device: str = "cpu"
    threads: int = 1  # more gain little for small steps, and trials run side by side
    timeout: float = 1800.0

    def modules(self) -> tuple[str, ...]:
        return ("torch", "torch._dynamo", "numpy", "scipy", "transformers", "peft")

    def label(self) -> str:
        budget = "ordinary" if self.target_epsilon is None else f"ε={self.target_epsilon:g}"
        return f"{self.kind} {budget} seed {self.seed}"


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


#: Form of the batches -> in words.
FORMS = {
    "whole": "whole batches",
    "pieces": "batches in pieces",
    "padded": "batches in padded pieces",
    "one_pass": "one pass in order",
    "banded": "banded noise",
    "blt": "BLT noise, one pass in order",
}
#: Test that may refute a claim -> its evidence.
TESTS = {
    "one_run": "the guesses of one run",
    "mu": "the errors of a test of each release",
    "scale": "the size of the noise",
    "shape": "the distribution of the noise",
    "steps": "the noise of two steps",
    "parameters": "the noise of two parameters",
    "shards": "the noise of two shards",
    "sensitivity": "a record's part of a sum",
    "sampling": "the batches drawn",
}
#: Probability that any test of a trial refutes a sound engine.
LEVEL = 1e-4
