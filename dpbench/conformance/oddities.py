"""More small models with traits of real ones. Each once gave a silently wrong sum.

They use parameters outside of layers, or mix samples. Samples are [4], outputs [B, 3], unless a class says otherwise.

Functions take:
    x: [B, n].
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.conformance.modules import Net


def hidden_leaf(frozen: bool = False) -> Net:
    """As in wav2vec2: in training, hidden states are set to require a gradient, whatever is trained below them.

    Args:
        frozen: whether nothing is.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        if net.training:
            x = x.clone()
            x.requires_grad = True
        return net.head(torch.tanh(net.first(x)))

    return Net(forward, first=nn.Linear(4, 4).requires_grad_(not frozen), head=nn.Linear(4, 3))


def in_training() -> Net:
    """A layer used only in training."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.tanh(net.first(x))
        return net.head(torch.tanh(net.extra(x)) if net.training else x)

    return Net(forward, first=nn.Linear(4, 4), extra=nn.Linear(4, 4), head=nn.Linear(4, 3))


def expanded_like() -> Net:
    """Parameters expanded to the shape of the data, as in XLM and FlauBERT."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.layer(x)
        return x * net.scale.expand_as(x) + net.shift.expand_as(x)

    return Net(forward, layer=nn.Linear(4, 3), scale=torch.randn(3), shift=torch.randn(3))


def changed_bias() -> Net:
    """Sets a part of a copy of the bias to zero before its use, as in torchvision's Swin v2."""

    def forward(net: Any, x: Tensor) -> Tensor:
        bias = net.qkv.bias.clone()
        bias[2:4].zero_()
        return F.linear(x, net.qkv.weight, bias)

    return Net(forward, qkv=nn.Linear(4, 6))


def changed_product() -> Net:
    """Changes the result of an einsum of activations and a parameter in place, as in Funnel; [T, 4] to [T, 3]."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.einsum("btnh,nhd->btd", net.layer(x).unflatten(-1, (2, 2)), net.weight)
        x *= 2.0
        x[..., 0] += 1
        return x

    return Net(forward, layer=nn.Linear(4, 4), weight=torch.randn(2, 2, 3))


def spectrum() -> Net:
    """A filter over positions by its Fourier transform (GFNet, Hyena): complex values of real parameters; [T, 4]."""

    def forward(net: Any, x: Tensor) -> Tensor:
        product = torch.fft.rfft(net.layer(x), dim=1) * torch.fft.rfft(net.filter, dim=0)
        return torch.fft.irfft(product, n=5, dim=1)

    return Net(forward, layer=nn.Linear(4, 3), filter=torch.randn(5, 3))


def power_mean() -> Net:
    """Generalised-mean pooling (GeM): the exponent is a parameter; [4, H, W] to [4]."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return (net.conv(x).clamp(min=0.1) ** net.p).mean((2, 3)) ** (1 / net.p)

    return Net(forward, conv=nn.Conv2d(4, 4, 3), p=torch.tensor([3.0]))


class Fused(torch.autograd.Function):
    """x wᵀ with a custom backward pass, as in fused layers: no hook and no mode sees the parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (g,), (x, w) = grads, ctx.saved_tensors
        return g @ w, g.t() @ x


def fused_beside() -> Net:
    """A custom function beside an ordinary use of the same parameter."""
    return Net(lambda net, x: Fused.apply(x, net.layer.weight) + torch.tanh(net.layer(x)), layer=nn.Linear(4, 3))


class FusedLater(nn.Module):
    """A custom function that replaces the layer once `late` is True, as for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.late = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return Fused.apply(x, self.layer.weight) + self.layer.bias if self.late else self.layer(x)


def forces() -> Net:
    """Outputs the derivative of an energy by the input, [4]: the loss's gradient is a second derivative."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)
            energy = net.last(torch.tanh(net.first(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    return Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 1))


class Mixing(nn.Module):
    """Mixes samples by `how`, only in training, once `late` is True."""

    def __init__(self, how: Callable[[Tensor], Tensor], late: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.how, self.late = nn.Linear(4, 4), nn.Linear(4, 3), how, late

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.how(x) if self.training and self.late else x)


def sorting() -> Net:
    """Sorts samples by their first number and undoes it, as for packed sequences: a layer has rows in another order."""

    def forward(net: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(stable=True)
        return net.last(torch.tanh(net.first(x))[order])[order.argsort()]

    return Net(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 3))


def by_statistics(x: Tensor) -> Tensor:
    """Normalise over the batch."""
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1).sqrt()


def by_detached_mean(x: Tensor) -> Tensor:
    """Centre over the batch, without a trace in the gradient."""
    return x - x.detach().mean(0)


def by_rolling(x: Tensor) -> Tensor:
    """Add the row two further on; neither a gradient nor a batch of two reveals it."""
    return x + 0.5 * x.detach().roll(2, 0)
