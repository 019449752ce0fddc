"""An activation in place costs nothing more than one that is not, and is as exact.

It does where the output of a use is a view of what the tape made: autograd then follows the change by a copy of the
whole gradient (CopySlices), in one norm of a network after the other.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipping import Flat, load_backend

BATCH = 4
BACKENDS: dict[str, dict[str, bool]] = {"bk_mixed": {"timing": False}, "mixed_ghost": {}, "fastgradclip": {}}
USES = {
    "conv": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "transposed conv": lambda: nn.ConvTranspose2d(8, 8, 3, padding=1),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "layer norm": lambda: nn.LayerNorm([8, 6, 6]),
    "linear": lambda: nn.Linear(6, 6),
    "PReLU": lambda: nn.PReLU(8),
}


class Moved(TorchDispatchMode):
    """Elements that are copied from one tensor to another, with all that autograd does to follow a view."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("copy_", "clone", "new_empty_strided", "_to_copy"):
            self.elements += output.numel()
        return output


def network(use: str, in_place: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (USES[use](), nn.ReLU(inplace=in_place))]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *layers, nn.Flatten(), nn.Linear(288, 3)).double()


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use", USES)
def test_in_place_costs_no_copies(use, backend):
    if use == "linear" and nn.Linear(6, 6)(torch.ones(2, 2, 2, 6))._is_view():
        pytest.skip("this torch gives a view itself, in ordinary training too")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.arange(BATCH) % 3
    moved, sums = [], []
    for in_place in (False, True):
        model = network(use, in_place)
        with load_backend(backend)(model, loss_fn, clip=Flat(max_grad_norm=0.1), **BACKENDS[backend]) as clipped:
            clipped(x, y)  # the first step looks at the model
            with Moved() as counted:
                sums.append(clipped(x, y).grads)
        moved.append(counted.elements)
    assert moved[1] <= moved[0]
    for name, g in sums[0].items():
        torch.testing.assert_close(sums[1][name], g, rtol=1e-12, atol=1e-14)
