"""An activation in place costs nothing more than one that is not, and is as exact.

It does where the output of a use is a view of what the tape made: autograd then follows the change by a copy of the
whole gradient (CopySlices), in one norm of a network after the other.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipping import Flat, compare, load_backend
from clipping.core.reference import definition

BATCH = 4
BACKENDS: dict[str, dict[str, bool]] = {"bk_mixed": {"timing": False}, "mixed_ghost": {}}  # one pass, and two
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


class Part(nn.Module):
    """Changes a part of its input in place, and then all of it as another view."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 1:] += x[:, :-1].clone()
        x.view(len(x), -1).sigmoid_()
        return x


@pytest.mark.parametrize("activation", [nn.ReLU(True), nn.SiLU(True), Part()], ids=["ReLU", "SiLU", "a part"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_on_the_view_that_a_layer_over_positions_gives(backend, activation):
    """With a bias torch gives a view of the product of all positions, and follows its change by another node."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), activation, nn.Flatten(), nn.Linear(32, 3))
    model.double()
    x, y = torch.randn(BATCH, 4, 6, dtype=torch.float64), torch.arange(BATCH) % 3
    wanted = definition(model, loss_fn, x, y, clip=Flat(0.1))
    for verify in (False, True):
        with load_backend(backend)(model, loss_fn, clip=Flat(0.1), verify=verify, **BACKENDS[backend]) as clipped:
            assert compare(clipped(x, y), wanted).within(1e-9)
