"""What a convolution allocates inside, by formula and by the profiler; and input gradients in pieces of the batch."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from clipping import compare, load_backend
from clipping.accel import chunked_conv as pieces
from clipping.accel.chunked_conv import Pieces
from clipping.numerics.convolution_memory import Convolution
from clipping.rules import base
from clipping.tape.record import Tape
from dpbench.measure.memory import measured_peak

CPU = torch.device("cpu")
#: B, channels in, side, channels out, kernel, stride, groups
GEOMETRIES = {
    "3x3": (8, 32, 16, 32, 3, 1, 1),
    "strided": (8, 32, 16, 64, 3, 2, 1),
    "1x1": (8, 32, 16, 64, 1, 1, 1),
    "first": (8, 3, 32, 32, 3, 1, 1),
    "many channels": (4, 256, 4, 256, 3, 1, 1),
    "one sample": (1, 16, 16, 32, 3, 1, 1),
    "large weights": (8, 64, 8, 64, 3, 1, 1),
    "groups": (8, 64, 16, 64, 3, 1, 8),
    "groups of a block, strided": (8, 64, 16, 64, 3, 2, 4),
    "groups of two blocks, strided": (8, 64, 16, 64, 3, 2, 2),
    "batch in the groups": (1, 512, 16, 512, 3, 1, 16),
    "depthwise": (8, 32, 16, 32, 3, 1, 32),
}


def measured(geometry: tuple[int, ...], *wanted: bool) -> tuple[Convolution, int, int]:
    """Of one of `GEOMETRIES` what is foreseen, and the measured bytes of the forward pass and of gradients."""
    batch, inputs, side, outputs, kernel, stride, groups = geometry
    x, weight = torch.randn(batch, inputs, side, side), torch.randn(outputs, inputs // groups, kernel, kernel)
    given = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups
    g = torch.randn_like(torch.convolution(x, weight, None, *given))
    forward = measured_peak(lambda: torch.convolution(x, weight, None, *given), [], CPU).peak_bytes
    backward = torch.ops.aten.convolution_backward
    taken = measured_peak(lambda: backward(g, x, weight, None, *given, [*wanted, False]), [], CPU).peak_bytes
    return Convolution(x.shape, weight.shape, g.shape, [stride] * 2, groups, x.dtype), forward, taken


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the formulas are oneDNN's")
def test_temporaries_are_the_measured_ones():
    """Found: within 2 %, 5 % for the weight gradient on several threads; blocks of 8 and of 16 channels."""
    for name in GEOMETRIES:
        sizes, forward, of_input = measured(GEOMETRIES[name], True, False)
        assert sizes.forward() == pytest.approx(forward, rel=0.1)
        assert sizes.input_gradient() == pytest.approx(of_input, rel=0.1)
        assert sizes.weight_gradient() == pytest.approx(measured(GEOMETRIES[name], False, True)[2], rel=0.15)
        assert sizes.gradients(True, True) == pytest.approx(measured(GEOMETRIES[name], True, True)[2], rel=0.1)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().sum(1)


@pytest.mark.parametrize("backend", ["bk_mixed", "mixed_ghost"])
def test_pieces_give_the_same_gradients(monkeypatch, backend):
    monkeypatch.setattr(pieces, "PIECE", 256)
    counted: list[int] = []
    real = pieces._in_pieces
    monkeypatch.setattr(pieces, "_in_pieces", lambda *a: (counted.append(a[-1]), real(*a))[1])
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    last = nn.Conv2d(8, 4, 3, stride=2, dilation=2, bias=False)
    model = nn.Sequential(first, nn.Tanh(), second, nn.ReLU(inplace=True), last, nn.Flatten()).double()
    x, y = torch.randn(9, 3, 12, 12, dtype=torch.float64), torch.zeros(9)
    oracle = load_backend("microbatch")(model, total, verify=False)
    with load_backend(backend)(model, total, verify=False) as opened, oracle:
        for _ in range(2):
            assert compare(opened(x, y), oracle(x, y)).within(1e-9)
    assert counted == [4, 4] * 2  # both convolutions behind the first; in pairs of samples


def test_any_other_backward_pass_is_autograd_s_own():
    """With gradients of the weights, and once more differentiable."""
    x = torch.randn(4, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True), torch.randn(3).double()
    bias.requires_grad_()

    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return Pieces.apply(pieces.Share(), x, weight, bias, [1, 1], [1, 1], [1, 1], 1)

    assert torch.autograd.gradcheck(convolved, (x, weight, bias))
    assert torch.autograd.gradgradcheck(convolved, (x[:2].detach().requires_grad_(), weight, bias))


SUMS = {
    "3x3": (nn.Conv2d(32, 32, 3, padding=1), (64, 32, 16, 16)),
    "strided, the output smaller": (nn.Conv2d(32, 64, 3, stride=2, padding=1), (64, 32, 16, 16)),
    "the input smaller": (nn.Conv2d(32, 64, 3, padding=1), (64, 32, 16, 16)),
    "transposed": (nn.ConvTranspose2d(32, 32, 2, stride=2), (64, 32, 8, 8)),
    "linear": (nn.Linear(64, 48), (64, 100, 64)),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_formed_in_portions_as_it_is_at_once_and_takes_less(monkeypatch, name):
    layer, shape = SUMS[name]
    x = torch.randn(shape)
    tape = Tape({"weight": layer.weight}, (x,), len(x))
    with tape:
        output = layer(x)
    ((_, rule),) = tape.uses[0].rules
    g, factors = torch.randn_like(output), torch.rand(len(x))
    found, taken = {}, {}
    for room in (2**30, 2**18):  # without care, and with it
        monkeypatch.setitem(base.WORKSPACE, "cpu", room)
        with torch.no_grad():
            found[room] = rule.weighted(g, factors)
            taken[room] = measured_peak(lambda: rule.weighted(g, factors), [], CPU).peak_bytes
    torch.testing.assert_close(found[2**30], found[2**18], rtol=1e-4, atol=1e-3)
    assert taken[2**18] < 0.5 * taken[2**30]
    expected = torch.autograd.grad((layer(x) * g * factors.view(-1, *[1] * (g.dim() - 1))).sum(), layer.weight)[0]
    torch.testing.assert_close(found[2**18], expected, rtol=1e-4, atol=1e-3)


def test_portions_in_half_precision_add_up_in_single(monkeypatch):
    layer, x = nn.Linear(8, 8, dtype=torch.bfloat16), torch.ones(512, 4, 8, dtype=torch.bfloat16)
    tape = Tape({"weight": layer.weight}, (x,), len(x))
    with tape:
        output = layer(x)
    ((_, rule),) = tape.uses[0].rules
    g, factors = torch.full_like(output, 33 / 32), torch.ones(len(x))
    with torch.no_grad():
        at_once = rule.weighted(g, factors)
        monkeypatch.setitem(base.WORKSPACE, "cpu", 1)
        gradient = Mock(side_effect=rule.gradient)
        monkeypatch.setattr(rule, "gradient", gradient)
        torch.testing.assert_close(rule.weighted(g, factors), at_once, rtol=0, atol=0)
        assert gradient.call_count == 32  # sums of 16 samples, which bfloat16 would add up 2 % off


def test_an_input_s_gradient_takes_little_more_than_itself():
    x = torch.randn(64, 32, 32, 32, requires_grad=True)
    share = pieces.Share()
    share.input_only = True
    output = Pieces.apply(share, x, torch.randn(32, 32, 3, 3), None, [1, 1], [1, 1], [1, 1], 1)
    g = torch.randn_like(output)
    found = measured_peak(lambda: torch.autograd.grad(output, x, g), [], CPU).peak_bytes
    assert found < 1.6 * x.nbytes  # 2 at once, and more
