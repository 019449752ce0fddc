"""`State`: the attributes of an engine that its loader, its patch of `step`, its log and adapters use."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from clipping.core.clip_functions import ClipFunction
from dpbench.engine.batch_identity import Tickets
from dpbench.engine.noise import Noise
from dpbench.engine.recorder import Recorder
from dpbench.engine.release import Sums, Unread
from dpbench.engine.sampling import Sampler, Sizes
from dpbench.engine.settings import Settings
from dpbench.engine.spent import Abandoned, PrivacySpent


class State(ABC):
    """Base class of `dpbench.engine.engine.PrivacyEngine`, for modules that `engine` itself imports.

    Methods take:
        loss, delta: the losses [B], with their graph; δ, the engine's if None.
    """

    model: nn.Module
    settings: Settings
    clip: ClipFunction
    noise: Noise
    steps: int
    """Logical batches released."""
    drawn: int
    """Logical batches of the loader that were stepped, or skipped before a stepped one."""
    counted: float = 0.0
    """The count of `adjust.watch_norms` for the last released logical batch: not private."""
    timing: bool
    """Whether backends may be chosen by timing: False if training must repeat bit for bit."""
    _sampler: Sampler
    _tickets: Tickets
    _recorder: Recorder
    _patch: Any
    _sums: Sums
    _unread: Unread
    _sampled: int
    _size: int
    _sizes: Sizes
    _abandoned: Abandoned
    _drawing: int
    """The loader's logical batch whose pieces are in the sum; -1 for none."""
    _ended: int
    """Logical batches at the end of the last iteration of a loader."""

    @abstractmethod
    def privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """ε of the steps so far."""

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

    @abstractmethod
    def _drop_parts(self) -> None:
        """Drop the sums of an unfinished logical batch."""
