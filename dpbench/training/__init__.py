"""What a privacy budget buys: trials that train with the engine. This module is for the parent; it imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from dpbench.models.data import validate_data
from dpbench.training.faults import FAULTS
from dpbench.trials import STEP_SOURCES, Trial

__all__ = [
    "FAULTS",
    "FORMS",
    "LEVEL",
    "TESTS",
    "AdamTrial",
    "AuditTrial",
    "CorrelatedTrial",
    "MemorisationTrial",
    "UtilityTrial",
    "cifar10_root",
]


def cifar10_root() -> str | None:
    """The folder that holds cifar-10-batches-py, if the environment variable DPBENCH_CIFAR10 names one."""
    return os.environ.get("DPBENCH_CIFAR10") or None


@dataclass(frozen=True, kw_only=True)
class UtilityTrial(Trial):
    """Train one model to one ε, and test it. The noise is seeded, so that a trial can be repeated: a measurement.

    `target_epsilon` None is ordinary training of the same model on the same batches, with neither clipping nor noise.
    `network` is "linear", "uneven" (linear on pixels of unlike scales) or "cnn"; `data` is "digits" or "synthetic", of
    which a fifth is for testing, or "cifar10:ROOT", which has a test set of its own.
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
    device: str = "cpu"
    threads: int = 1  # models this small are no faster with more, and with one the sums are the same on every machine

    def __post_init__(self) -> None:
        validate_data(self.data)

    @property
    def options(self) -> dict[str, Any]:
        """What the engine is given beside."""
        return {}

    @property
    def descent(self) -> str:
        """The optimizer, as of `dpbench.training.utility.optimizer_of`."""
        return "SGD"

    @property
    def alone(self) -> bool:
        return True  # the seconds are part of it

    def modules(self) -> tuple[str, ...]:
        return ("torch", "torch._dynamo", "numpy", "scipy")  # which the first step of an optimizer imports

    def label(self) -> str:
        budget = "ordinary" if self.target_epsilon is None else f"ε={self.target_epsilon:g} {self.clip} {self.backend}"
        return f"{self.kind} {self.network} {budget} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class CorrelatedTrial(UtilityTrial):
    """The same with the engine's `noise`: accuracy at one ε, and no seconds.

    It is "gaussian" or "banded:N", or with another sampling than the noise's own "gaussian@one_pass", "blt:N@one_pass".
    """

    kind: ClassVar[str] = "correlated"
    noise: str = "gaussian"

    @property
    def options(self) -> dict[str, Any]:
        noise, _, sampling = self.noise.partition("@")
        return {"noise": noise, **({"sampling": sampling} if sampling else {})}

    @property
    def alone(self) -> bool:
        return False

    def label(self) -> str:
        budget = "ordinary" if self.target_epsilon is None else f"ε={self.target_epsilon:g} {self.noise}"
        return f"{self.kind} {self.network} {budget} b={self.batch_size} lr={self.lr:g} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class AdamTrial(UtilityTrial):
    """The same with an `optimizer`: accuracy at one ε, and no seconds.

    It is "SGD" (momentum 0.9), "Adam", "AdamBC", or "AdamBC:0.01" with a floor of 0.01 Φ. Of all but SGD there is also
    the spread of what they divide entries by: the 90 % over the 10 % quantile.
    """

    kind: ClassVar[str] = "adam_bias"
    optimizer: str = "Adam"

    @property
    def descent(self) -> str:
        return self.optimizer

    @property
    def alone(self) -> bool:
        return False

    def label(self) -> str:
        budget = "ordinary" if self.target_epsilon is None else f"ε={self.target_epsilon:g}"
        return f"{self.kind} {self.network} {budget} {self.optimizer} lr={self.lr:g} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class AuditTrial(Trial):
    """One run of the engine on canaries, and all that two adversaries find against what it claims, by `TESTS`.

    `fault` seeds a privacy fault, one of `FAULTS`, which is to be found; "" is none. `form` is how batches come, one of
    `FORMS`.
    """

    kind: ClassVar[str] = "audit"
    body: ClassVar[str] = "dpbench.training.audit:run"
    sources: ClassVar[tuple[str, ...]] = (*UtilityTrial.sources,)
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

    @property
    def alone(self) -> bool:
        return False

    def modules(self) -> tuple[str, ...]:
        return ("torch", "torch._dynamo", "numpy", "scipy")

    def label(self) -> str:
        return f"{self.kind} {self.fault or 'no fault'} {self.backend} {self.form} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class MemorisationTrial(Trial):
    """Fine-tune a language model on text with secrets in it, to one ε, and see what it gives away.

    As in `dpbench.integrations.tutorials.memorisation`. `target_epsilon` None is ordinary fine-tuning. The noise is of
    a cipher, so no two runs of a seed are equal; `seed` chooses text, numbers and the model.
    """

    kind: ClassVar[str] = "memorisation"
    body: ClassVar[str] = "dpbench.integrations.tutorials.memorisation_trial:run"
    sources: ClassVar[tuple[str, ...]] = (
        *UtilityTrial.sources,
        "dpbench/integrations/*.py",
        "dpbench/integrations/tutorials/*.py",
    )
    target_epsilon: float | None
    seed: int
    records: int = 4000
    public_records: int = 6000
    epochs: int = 20
    public_epochs: int = 4
    device: str = "cpu"
    threads: int = 1  # steps this small gain little by more, and trials run side by side
    timeout: float = 1800.0

    @property
    def alone(self) -> bool:
        return False

    def modules(self) -> tuple[str, ...]:
        return ("torch", "torch._dynamo", "numpy", "scipy", "transformers", "peft")

    def label(self) -> str:
        budget = "ordinary" if self.target_epsilon is None else f"ε={self.target_epsilon:g}"
        return f"{self.kind} {budget} seed {self.seed}"


#: How batches come -> in words.
FORMS = {
    "whole": "whole batches",
    "pieces": "batches in pieces",
    "padded": "batches in padded pieces",
    "one_pass": "one pass in order",
    "banded": "banded noise",
    "blt": "BLT noise, one pass in order",
}
#: What may refute a claim -> what is looked at.
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
#: The probability that a sound engine is refuted by any test of a trial.
LEVEL = 1e-4
