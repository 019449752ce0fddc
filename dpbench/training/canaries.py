"""The target of an audit: the engine, training on canaries, and every movement of the model that it releases.

Each record is a canary: its gradient is the same in each of the model's parameters, along a coordinate of its own, and
above the clipping norm. The canaries are orthogonal: a release shows each one's part, with noise, at its own
coordinate, and noise alone at the coordinates of canaries outside the batch. The loss of a canary outside the data is
multiplied by 0: it may be in a batch, but not in its sum.
"""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dpbench.engine import PrivacyEngine
from dpbench.engine.noise import At

PARAMETERS = 16
PIECE = 32
"""Samples in a physical batch, for batches in pieces."""
NORMS = 1e4, 1e6
"""Slopes of the losses: of most canaries, and of every eighth, whose squared norm overflows half precision."""

Array = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Canaries(nn.Module):
    """Record j, a row of the identity, has the gradient e_j in every parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(count, 1, bias=False) for _ in range(PARAMETERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part(x)[:, 0] for part in self.parts), torch.zeros(len(x)))


class Release(NamedTuple):
    """A movement of the model.

    Attributes:
        step: the number of its logical batch.
        drawn: [m], whether the canary is in the batch.
        moved: [PARAMETERS, m], in units of C: the sum of the clipped gradients, and the noise.
    """

    step: int
    drawn: Flags
    moved: Array


class Target:
    """An engine with its model and optimizer, used through its data loader.

    Args:
        model: the canaries.
        optimizer: plain gradient descent with learning rate 1, attached to the engine.
        engine: of one process.
        form: of the batches; "pieces" and "padded" come in physical batches of `PIECE` samples.

    Methods take:
        coins: [m], whether the canary is in the data.
    """

    def __init__(self, model: Canaries, optimizer: torch.optim.SGD, engine: PrivacyEngine, form: str) -> None:
        self._model, self._optimizer, self.engine = model, optimizer, engine
        self._piece, self._pad = PIECE if form in ("pieces", "padded") else None, form == "padded"

    def releases(self, coins: Flags, steps: int) -> list[Release]:
        """Train, and record every movement of the model.

        Args:
            steps: logical batches.
        """
        engine, count = self.engine, len(coins)
        slopes = torch.where(torch.arange(count) % 8 == 0, NORMS[1], NORMS[0]) * torch.from_numpy(coins)

        def collate(records: list[int]) -> tuple[torch.Tensor, ...]:
            index = torch.tensor(records)
            return nn.functional.one_hot(index, count).float(), slopes[index], index

        unit = engine.settings.batch_size / engine.clip.sensitivity
        found: list[Release] = []
        drawn, last = np.zeros(count, dtype=bool), engine.steps + steps
        while engine.steps < last:
            loader = engine.data_loader(
                range(count), max_physical_batch_size=self._piece, pad=self._pad, collate_fn=collate
            )
            for x, slope, index in loader:
                drawn[index[: int(engine.mask.sum())].numpy()] = True
                for p in self._model.parameters():
                    p.data.zero_()  # movements from zero are exact
                step = engine.steps
                self._optimizer.step(loss=slope * self._model(x))  # type: ignore[call-arg]
                moved = -unit * torch.cat([p.detach() for p in self._model.parameters()]).double().numpy()
                if engine.stepped or moved.any():
                    found.append(Release(step, drawn.copy(), moved))
                    drawn[:] = False
                if engine.steps == last:
                    break
        return found

    def released(self, coins: Flags) -> Release:
        """The movement of the next logical batch."""
        steps, drawn, moved = zip(*self.releases(coins, 1), strict=True)
        return Release(steps[0], np.logical_or.reduce(drawn), np.sum(moved, axis=0))

    def save(self) -> Any:
        """Return a checkpoint."""
        return self.engine.state_dict(), copy.deepcopy(self._optimizer.state_dict())

    def go_on(self, checkpoint: Any, *, replay: bool = False) -> None:
        """Resume from a checkpoint, with fresh noise or a replay.

        Args:
            checkpoint: of another target.
            replay: draw the checkpoint's noise again.
        """
        self._optimizer.load_state_dict(checkpoint[1])
        self.engine.load_state_dict(checkpoint[0], replay=replay)

    def of_shards(self, processes: int) -> Array:
        """[processes, PARAMETERS * m], the noise that processes with one key add to shards of the model, over σC.

        Args:
            processes: how many.
        """
        engine, step = self.engine, self.engine.steps + 1
        deviation = engine.noise_multiplier * engine.clip.sensitivity
        empty = torch.zeros(1, engine.settings.sample_size)
        found = [
            torch.cat([engine.noise.added(empty, deviation, At(step, rank, i)) for i in range(PARAMETERS)])
            for rank in range(processes)
        ]
        return torch.stack(found).flatten(1).double().numpy() / deviation
