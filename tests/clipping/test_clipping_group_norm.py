"""Group norms within the grid of a CUDA kernel, on tensors without values."""

import pytest
import torch
import torch.nn.functional as F
from fake_graph import Recorder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clipping import Flat, compare, load_backend
from clipping.rules import normalisation


def test_a_group_norm_in_portions_is_the_same(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.GroupNorm(32, 64), nn.Flatten()).double()
    x, found = torch.randn(7, 3, 2, 2, dtype=torch.float64), []
    for most in (2**31, 64):
        monkeypatch.setattr(normalisation, "most_groups", lambda x, most=most: most)
        with load_backend("bk_mixed")(model, lambda outputs, _: outputs.square().sum(1), clip=Flat(0.1)) as backend:
            found.append(backend(x, torch.zeros(7)))
    assert compare(*found).within(1e-14)


def test_portions_of_a_group_norm_are_joined_once_in_the_backward_pass(monkeypatch):
    """A view of each portion would make zeros for the whole batch, as often as there are portions."""
    monkeypatch.setattr(normalisation, "most_groups", lambda x: 64)
    x, scale, shift = torch.randn(7, 64, 2, requires_grad=True), *(torch.randn(64, requires_grad=True) for _ in "ab")
    g = torch.randn(7, 64, 2)
    with Recorder() as recorder:
        found = normalisation.group_norm(lambda p, n: p.repeat(n), x, 32, scale, shift)
        grads = torch.autograd.grad(found, (x, scale, shift), g)
    names = [function.overloadpacket.__name__ for function, *_ in recorder.ran]
    assert names.count("native_group_norm_backward") == 4 and "slice_backward" not in names and "add" not in names
    expected = F.group_norm(x, 32, scale, shift)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, scale, shift), g))


@pytest.mark.parametrize("batch_size", [2047, 2048, 4096])
def test_a_group_norm_of_a_cuda_device_is_cut(batch_size):
    """The device itself decides, not a test's stand-in; forward only, for autograd on CUDA asks for its driver."""
    with FakeTensorMode(), Recorder() as recorder:
        x = torch.empty(batch_size, 64, 2, 2, device="cuda")
        assert normalisation.group_norm(lambda p, n: p.repeat(n), x, 32).shape == x.shape
    group_norm = torch.ops.aten.native_group_norm.default
    groups = [args[3] * args[6] for function, args, *_ in recorder.ran if function is group_norm]
    assert len(groups) == -(-batch_size * 32 // 65_535) and max(groups) <= 65_535
