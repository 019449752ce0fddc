"""What an engine holds, for its parts that read and change it: checkpoint, loader, patch of `step`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from clipping.core.clip_functions import ClipFunction
from dpbench.engine.batch_identity import Tickets
from dpbench.engine.finite import Unread
from dpbench.engine.noise import Noise
from dpbench.engine.poisson_check import Sizes
from dpbench.engine.recorder import Recorder
from dpbench.engine.rolled_back_steps import Abandoned
from dpbench.engine.sampling import Sampler
from dpbench.engine.settings import Settings
from dpbench.engine.spent import PrivacySpent
from dpbench.engine.sums import Sums


class State(ABC):
    """`dpbench.engine.engine.PrivacyEngine` without what it does with them."""

    model: nn.Module
    settings: Settings
    clip: ClipFunction
    noise: Noise
    steps: int
    """Logical batches released."""
    drawn: int
    """Logical batches of the loader that were stepped, or left out before one that was."""
    counted: float = 0.0
    """What `adjust.watch_norms` has counted of the last logical batch that was released: not private."""
    timing: bool
    """May what is fastest be taken? Not where training is to be repeated bit for bit."""
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
    def _attached(self) -> Any:
        """The patch of the optimizer; raises Misuse where there is none."""

    @abstractmethod
    def privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """ε of the steps so far.

        Args:
            delta: δ; the engine's if None.
        """

    @abstractmethod
    def step(self, loss: Any) -> None:
        """The end of a logical batch.

        Args:
            loss: [B], with its graph.
        """

    @abstractmethod
    def virtual_step(self, loss: Any) -> None:
        """Part of a logical batch.

        Args:
            loss: [B], with its graph.
        """

    @abstractmethod
    def _begin_drawing(self) -> None:
        """A loader starts: what an abandoned iteration left of a logical batch is dropped."""

    @abstractmethod
    def _drop_parts(self) -> None:
        """Forget what of a logical batch is in the sum."""
