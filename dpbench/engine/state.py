"""`State`: the part of an engine that its loader, its patch of `step` and its whole steps use."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from dpbench.engine.batch_identity import Tickets
from dpbench.engine.recorder import Recorder
from dpbench.engine.release import Unread
from dpbench.engine.sampling import Sampler
from dpbench.engine.settings import Settings
from dpbench.engine.spent import Abandoned


class State(ABC):
    """Base class of `dpbench.engine.engine.PrivacyEngine`, for modules that `engine` itself imports.

    Methods take:
        loss: the losses [B], with their graph.
    """

    model: nn.Module
    settings: Settings
    steps: int
    """Logical batches released."""
    drawn: int
    """Logical batches of the loader that were stepped, or skipped before a stepped one."""
    timing: bool
    """Whether backends may be chosen by timing: False if training must repeat bit for bit."""
    _sampler: Sampler
    _tickets: Tickets
    _recorder: Recorder
    _patch: Any
    _unread: Unread
    _abandoned: Abandoned
    _ended: int
    """Logical batches at the end of the last iteration of a loader."""

    @abstractmethod
    def step(self, loss: Any) -> None:
        """End a logical batch."""

    @abstractmethod
    def virtual_step(self, loss: Any) -> None:
        """Add part of a logical batch."""

    @abstractmethod
    def _attached(self) -> Any:
        """The optimizer's patch."""

    @abstractmethod
    def _begin_drawing(self) -> None:
        """Start an iteration of the loader, which draws an unfinished logical batch again."""
