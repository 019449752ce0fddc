"""What a step may write to, and is restored after one that runs again (`clipping.checks.moving`)."""

import torch
from torch import Tensor, nn

from clipping.checks import moving
from clipping.checks.moving import Moving
from clipping.numerics.rng_replay import Draws


class Counted:
    """A loss that counts its calls in a number, in a list and in a tensor, and can reach its data."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.calls, self.seen, self.total = data, 0, list[int](), torch.zeros(2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(outputs))
        self.total += 1
        return outputs


def test_what_a_loss_holds_is_restored_but_no_dataset_is_copied(monkeypatch):
    monkeypatch.setattr(moving, "LARGEST", 100)
    counted = Counted(torch.zeros(26))
    state = Moving(nn.BatchNorm1d(100), counted.loss)
    kept = [x.shape for x, *_ in state.state().kept]
    assert (2,) in kept and (100,) in kept and (26,) not in kept
    with state.repeated(Draws()):
        counted.loss(torch.ones(3), torch.ones(3))
    assert state.has_moved and (counted.calls, counted.seen, counted.total.tolist()) == (0, [], [0.0, 0.0])
