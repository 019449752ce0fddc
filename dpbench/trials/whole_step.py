"""The trial of whole training steps: an engine around an optimizer."""

from dataclasses import dataclass
from typing import ClassVar

from dpbench.errors import one_of
from dpbench.trials.steps import STEP_SOURCES, OverheadTrial

OPTIMIZERS = ("SGD", "AdamW")
#: An engine in another framework, so no backend: it has no step on a model in torch.
JAX_PRIVACY = "jax_privacy"


@dataclass(frozen=True, kw_only=True)
class TrainingStepTrial(OverheadTrial):
    """The cost of private over ordinary training, forward to optimizer: many engines in one process.

    `backends` names the engines by how they clip: `nonprivate` is the plain step of the same optimizer; our backends
    run in `PrivacyEngine`; `opacus_hooks`, `opacus_ghost`, `private_cnn` and `fastdp` are the steps of those libraries.
    Each has its own copy of the model and optimizer. `jax_privacy` runs the same model in jax, in a process that
    imports no torch, beside jax's own plain step (`dpbench.measure.jax_peer`). `optimizer` is SGD (with momentum 0.9)
    or AdamW. All else is as in `OverheadTrial`.
    """

    kind: ClassVar[str] = "training_step"
    body: ClassVar[str] = "dpbench.measure.training_step:run"
    sources: ClassVar[tuple[str, ...]] = (*STEP_SOURCES, "dpbench/engine/**/*.py")
    optimizer: str = "SGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("an optimizer", self.optimizer, OPTIMIZERS)

    def label(self) -> str:
        return f"{super().label()}, {self.optimizer}"
