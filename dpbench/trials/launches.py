"""The trial that counts a step's GPU launches, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpbench.trials.base import Trial
from dpbench.trials.steps import STEP_SOURCES, modules_of_step


@dataclass(frozen=True, kw_only=True)
class LaunchesTrial(Trial):
    """Launches, bytes and operations of one step of each backend, counted on tensors without values.

    `image_size` and `num_classes` may be None for a model that reads text.
    """

    kind: ClassVar[str] = "launches"
    body: ClassVar[str] = "dpbench.measure.launches:run"
    sources: ClassVar[tuple[str, ...]] = STEP_SOURCES
    alone: ClassVar[bool] = False
    model: str
    backends: Sequence[str]
    batch_size: int
    image_size: int | None = 32
    num_classes: int | None = 10
    dtype: str = "float32"
    timeout: float = 300.0

    def modules(self) -> tuple[str, ...]:
        return ("torch._dynamo", *modules_of_step(self))
