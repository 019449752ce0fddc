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


class HiddenLeaf(nn.Module):
    """As in wav2vec2: in training, hidden states are set to require a gradient, whatever is trained below them."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x.clone()
            x.requires_grad = True
        return self.head(torch.tanh(self.first(x)))


class InTraining(nn.Module):
    """A layer used only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.extra(x)) if self.training else x)


class ExpandedLike(nn.Module):
    """Parameters expanded to the shape of the data, as in XLM and FlauBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale, self.shift = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.scale.expand_as(x) + self.shift.expand_as(x)


class ChangedBias(nn.Module):
    """Sets a part of a copy of the bias to zero before its use, as in torchvision's Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.qkv.bias.clone()
        bias[2:4].zero_()
        return F.linear(x, self.qkv.weight, bias)


class ChangedProduct(nn.Module):
    """Changes the result of an einsum of activations and a parameter in place, as in Funnel; [T, 4] to [T, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(2, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("btnh,nhd->btd", self.layer(x).unflatten(-1, (2, 2)), self.weight)
        x *= 2.0
        x[..., 0] += 1
        return x


class Spectrum(nn.Module):
    """A filter over positions by its Fourier transform (GFNet, Hyena): complex values of real parameters; [T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.filter = nn.Linear(4, 3), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.layer(x), dim=1) * torch.fft.rfft(self.filter, dim=0)
        return torch.fft.irfft(spectrum, n=5, dim=1)


class PowerMean(nn.Module):
    """Generalised-mean pooling (GeM): the exponent is a parameter; [4, H, W] to [4]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.p = nn.Conv2d(4, 4, 3), nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x).clamp(min=0.1) ** self.p).mean((2, 3)) ** (1 / self.p)


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


class FusedBeside(nn.Module):
    """A custom function beside an ordinary use of the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Fused.apply(x, self.layer.weight) + torch.tanh(self.layer(x))


class FusedLater(nn.Module):
    """A custom function that replaces the layer once `late` is True, as for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.late = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return Fused.apply(x, self.layer.weight) + self.layer.bias if self.late else self.layer(x)


class Forces(nn.Module):
    """Outputs the derivative of an energy by the input, [4]: the loss's gradient is a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)
            energy = self.last(torch.tanh(self.first(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Mixing(nn.Module):
    """Mixes samples by `how`, only in training, once `late` is True."""

    def __init__(self, how: Callable[[Tensor], Tensor], late: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.how, self.late = nn.Linear(4, 4), nn.Linear(4, 3), how, late

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.how(x) if self.training and self.late else x)


class Sorting(nn.Module):
    """Sorts samples by their first number and undoes it, as for packed sequences: a layer has rows in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(stable=True)
        return self.last(torch.tanh(self.first(x))[order])[order.argsort()]


def by_statistics(x: Tensor) -> Tensor:
    """Normalise over the batch."""
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1).sqrt()


def by_detached_mean(x: Tensor) -> Tensor:
    """Centre over the batch, without a trace in the gradient."""
    return x - x.detach().mean(0)


def by_rolling(x: Tensor) -> Tensor:
    """Add the row two further on; neither a gradient nor a batch of two reveals it."""
    return x + 0.5 * x.detach().roll(2, 0)
