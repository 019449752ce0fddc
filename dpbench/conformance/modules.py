"""Small models for the conformance cases, each with a trait of real models that breaks clipping libraries.

From `hidden_leaf` on each once gave a silently wrong sum: they use parameters outside of layers, or mix samples. Their
samples are [4] and outputs [B, 3], unless a docstring says otherwise.

Functions take:
    x: [B, n].
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Named parts, and a forward pass over them.

    Args:
        forward: (this module, *inputs) -> outputs.
        parts: name -> a layer, or the values of a parameter.
    """

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


def residual() -> Net:
    """In-place ReLU and in-place residual addition, as in real models."""

    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.b(F.relu(net.norm(net.a(x)), inplace=True))
        out += x
        return F.relu_(out)

    a, b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    return Net(forward, a=a, b=b, norm=nn.GroupNorm(2, 4))


def reused() -> Net:
    """One layer applied twice: its two gradients add up before the norm."""
    return Net(lambda net, x: net.layer(torch.tanh(net.layer(x))), layer=nn.Linear(4, 4))


def tied() -> Net:
    """A small language model with tied embedding and head."""
    embedding, norm, head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    return Net(lambda net, ids: net.head(net.norm(net.embedding(ids))), embedding=embedding, norm=norm, head=head)


def two_inputs() -> Net:
    """Keyword inputs, and a parameter that the loss does not depend on."""

    def forward(net: Any, left: Tensor, right: Tensor) -> Tensor:
        net.unused(left.new_ones(left.shape[0], 5))
        return net.left(left) * net.right(right)

    return Net(forward, left=nn.Linear(3, 4), right=nn.Linear(2, 4), unused=nn.Linear(5, 5))


class ParameterZoo(nn.Module):
    """Bare parameters as in vision transformers: class token, positions, LayerScale, a table of biases."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 6, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, 5, 6))
        self.scale = nn.Parameter(torch.randn(6))
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.k_bias: Tensor
        self.register_buffer("k_bias", torch.zeros(6))
        self.qkv = nn.Linear(6, 18, bias=False)
        self.table = nn.Parameter(torch.randn(9, 2))
        index = torch.arange(5)
        self.index: Tensor
        self.register_buffer("index", (index[:, None] - index[None]) % 9)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1)
        if self.in_place:
            x += self.positions
        else:
            x = x + self.positions
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        q, k, v = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * self.temperature.exp()
        scores = scores + self.table[self.index.flatten()].view(*self.index.shape, 2).permute(2, 0, 1)[None]
        x = x + self.scale * (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x - self.token / (1 + self.scale.square().sum())


def positions(batched: bool = True) -> Net:
    """Positions from an embedding table by ids without a batch dimension; token types by ids with one.

    Args:
        batched: whether the ids of token types have a batch dimension.
    """

    def forward(net: Any, ids: Tensor) -> Tensor:
        types = ids.new_zeros(ids.shape if batched else (1, ids.shape[1]))
        x = net.words(ids) + net.types(types)
        return net.norm(x + net.positions(torch.arange(ids.shape[1], device=ids.device)))

    words, places, types = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Embedding(2, 4)
    return Net(forward, words=words, positions=places, types=types, norm=nn.LayerNorm(4))


def windows() -> Net:
    """Windows folded into the batch and back, as in Swin; tokens folded into rows, as in GPT-2's Conv1D."""

    def forward(net: Any, x: Tensor) -> Tensor:
        folded = net.norm(torch.tanh(net.inside(x.view(-1, 2, 4))) + net.bias)
        x = net.conv(folded).view(x.shape)
        return torch.addmm(net.shift, x.view(-1, 4), net.weight).view(*x.shape[:-1], 3)

    inside = {"norm": nn.LayerNorm(4), "inside": nn.Linear(4, 4), "bias": torch.randn(2, 4)}
    rows = {"weight": torch.randn(4, 3), "shift": torch.randn(3)}
    return Net(forward, **inside, **rows, conv=nn.Conv1d(2, 2, 3, padding=1))


def attention(**options: Any) -> Net:
    """`nn.MultiheadAttention` as self-attention or cross-attention.

    Args:
        options: of the layer; with `kdim` it is cross-attention.
    """
    cross = options.get("kdim") is not None

    def forward(net: Any, x: Tensor) -> Tensor:
        other = torch.cat((x, x), -1)[:, :2] if cross else x
        if not net.attention.batch_first:
            return net.attention(x.transpose(0, 1), other.transpose(0, 1), other.transpose(0, 1))[0].transpose(0, 1)
        padding = torch.zeros(other.shape[:2], dtype=torch.bool, device=x.device)
        padding[:, -1] = True
        mask = None if cross else torch.ones(x.shape[1], other.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return net.attention(x, other, other, attn_mask=mask, key_padding_mask=padding, need_weights=not cross)[0]

    return Net(forward, attention=nn.MultiheadAttention(4, 2, **options))


def recurrent(kind: Any, **options: Any) -> Net:
    """A recurrent layer of torch with a head.

    Args:
        kind: of the layer.
        options: of the layer.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        out, last = net.rnn(x)
        return out if isinstance(last, tuple) else out + last[-1:].transpose(0, 1)[..., :1]

    return Net(forward, rnn=kind(4, 3, **options))


def shared() -> Net:
    """One layer across depth, with its weight read directly, transposed, and by a slice."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, net.weight))
        x = torch.tanh(x @ net.weight)
        return F.linear(x, net.weight[:2]) + torch.einsum("bd,pd->bp", x, net.weight[2:])

    return Net(forward, weight=torch.randn(4, 4))


def low_rank() -> Net:
    """LoRA: a frozen layer and a trained product of two thin ones."""
    base = nn.Linear(4, 4).requires_grad_(False)
    thin = {"down": nn.Linear(4, 2, bias=False), "up": nn.Linear(2, 4, bias=False)}
    return Net(lambda net, x: net.base(x) + net.up(net.down(x)), base=base, **thin)


def penalised() -> Net:
    """Adds a term that depends on parameters alone to the output."""
    return Net(lambda net, x: net.layer(x) + net.layer.weight.square().sum(), layer=nn.Linear(4, 3))


def head_first() -> Net:
    """Registered in another order than it runs: a backend must not stop at the first registered layer."""
    return Net(lambda net, x: net.head(torch.tanh(net.body(x))), head=nn.Linear(4, 3), body=nn.Linear(6, 4))


class Skipping(nn.Module):
    """Skips a layer while `all_of_it` is False, as layer dropping and early exits do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.all_of_it = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.sometimes(x)) if self.all_of_it else x)


def sequence_first(steps: int = 3) -> Net:
    """Time first inside: layers, positions, a token at the end, all on [T, B, d].

    Args:
        steps: T.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = torch.cat([x, net.token.repeat(1, x.shape[1], 1)])[1:]
        x = torch.relu(net.inside(x)) + net.positions
        return net.head(net.norm(x) * net.positions - net.token).transpose(0, 1)

    layers = {"inside": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 3)}
    return Net(forward, **layers, positions=torch.randn(steps, 1, 4), token=torch.randn(1, 1, 4))


def encoder() -> Net:
    """torch's own transformer encoder with its default layout, [T, B, d]."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    embed, layers = nn.Linear(4, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Net(lambda net, x: net.encoder(net.embed(x.transpose(0, 1))).mean(0), embed=embed, encoder=layers)


def flat_bags() -> Net:
    """An embedding bag with all ids in one row, with offsets."""

    def forward(net: Any, ids: Tensor) -> Tensor:
        lengths = (ids >= 0).sum(1)
        return net.head(net.bag(ids[ids >= 0], lengths.cumsum(0) - lengths))

    return Net(forward, bag=nn.EmbeddingBag(7, 4, padding_idx=2), head=nn.Linear(4, 3))


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
    """x wᵀ with a custom backward pass, as in fused layers: no hook sees the parameter."""

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
    """Add the row two further on; neither a gradient nor a batch of two reveals it, nor the owners of rows."""
    rolled = torch.eye(len(x), dtype=x.dtype, device=x.device).roll(2, 0)
    return x + 0.5 * torch.tensordot(rolled, x.detach(), 1)
