"""Activation checkpointing: what is computed once more is what the forward pass computed, in every backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping import Flat, load_backend
from dpbench.measure.memory import measured_peak

BATCH = 4
#: A part of a network, [B, 8, 6, 6] -> the same.
PARTS = {
    "group norm": lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
    "in place": lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)),
    "instance norm": lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8, affine=True), nn.Tanh()),
    "a norm at the end": lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)), nn.PReLU()),
    "linear": lambda: nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 6)),
    "attention": lambda: Attended(nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)),
}


class Attended(nn.Module):
    """Over the 48 rows of an image."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1, 2)).view_as(x)


class Network(nn.Module):
    """A first part on the image itself, which needs no gradient, and `depth` more; checkpointed or not."""

    def __init__(self, part: str, checkpointed: bool, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Conv2d(3, 8, 1), *(PARTS[part]() for _ in range(depth))])
        self.head, self.checkpointed = nn.Linear(8, 3), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return self.head(x.mean((2, 3)))


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("backend", ["ghost", "mixed_ghost", "fastgradclip", "bk_ghost", "bk_mixed"])
@pytest.mark.parametrize("part", PARTS)
def test_as_without(part, backend):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.arange(BATCH) % 3
    found = []
    for name, checkpointed in (("microbatch", False), (backend, True)):
        model = Network(part, checkpointed).double()
        with load_backend(name)(model, loss_fn, clip=Flat(max_grad_norm=0.1)) as clipped:
            for _ in range(2):  # of which the second looks at the batch no more
                result = clipped(x, y)
            found.append(result)
    torch.testing.assert_close(found[1].norms, found[0].norms, rtol=1e-10, atol=0.0)
    for name, g in found[0].grads.items():
        torch.testing.assert_close(found[1].grads[name], g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["mixed_ghost", "fastgradclip", "bk_mixed"])
def test_memory_is_saved(backend):
    """Two passes let go of what is computed once more, as ordinary training does; book-keeping keeps it for the sum."""
    peaks = []
    for name in ("nonprivate", backend):
        for checkpointed in (False, True):
            model = Network("group norm", checkpointed, depth=8)
            with load_backend(name)(model, loss_fn) as clipped:
                x, y = torch.randn(64, 3, 24, 24), torch.zeros(64, dtype=torch.long)
                for _ in range(3):
                    clipped(x, y)
                peaks.append(measured_peak(lambda c=clipped, x=x, y=y: c(x, y), [], torch.device("cpu")).peak_bytes)
    saved = [peaks[1] / peaks[0], peaks[3] / peaks[2]]
    assert saved[0] < 0.8
    assert saved[1] < (1.0 if backend == "bk_mixed" else saved[0] + 0.1)
