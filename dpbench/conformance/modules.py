"""Small models for the conformance cases, each with a trait of real models that breaks clipping libraries."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """In-place ReLU and in-place residual addition, as in real models."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.b(F.relu(self.norm(self.a(x)), inplace=True))
        out += x
        return F.relu_(out)


class Reused(nn.Module):
    """One layer applied twice: its two gradients add up before the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """A small language model with tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


class TwoInputs(nn.Module):
    """Keyword inputs, and a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(5, 5)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        self.unused(left.new_ones(left.shape[0], 5))
        return self.left(left) * self.right(right)


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


class Positions(nn.Module):
    """Positions from an embedding table by ids without a batch dimension; token types by ids with one."""

    def __init__(self, batched: bool = True) -> None:
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Embedding(2, 4)
        self.norm, self.batched = nn.LayerNorm(4), batched

    def forward(self, ids: Tensor) -> Tensor:
        types = ids.new_zeros(ids.shape if self.batched else (1, ids.shape[1]))
        x = self.words(ids) + self.types(types)
        return self.norm(x + self.positions(torch.arange(ids.shape[1], device=ids.device)))


class Windows(nn.Module):
    """Windows folded into the batch and back, as in Swin; tokens folded into rows, as in GPT-2's Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inside, self.bias = nn.LayerNorm(4), nn.Linear(4, 4), nn.Parameter(torch.randn(2, 4))
        self.weight, self.shift = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.view(-1, 2, 4)
        windows = self.norm(torch.tanh(self.inside(windows)) + self.bias)
        x = self.conv(windows).view(x.shape)
        return torch.addmm(self.shift, x.view(-1, 4), self.weight).view(*x.shape[:-1], 3)


class Attention(nn.Module):
    """`nn.MultiheadAttention` as self-attention or cross-attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.cross = options.get("kdim") is not None

    def forward(self, x: Tensor) -> Tensor:
        other = torch.cat((x, x), -1)[:, :2] if self.cross else x
        mask = torch.ones(x.shape[1], other.shape[1], dtype=torch.bool, device=x.device).triu(1)
        if not self.attention.batch_first:
            return self.attention(x.transpose(0, 1), other.transpose(0, 1), other.transpose(0, 1))[0].transpose(0, 1)
        padding = torch.zeros(other.shape[:2], dtype=torch.bool, device=x.device)
        padding[:, -1] = True
        need = not self.cross
        return self.attention(
            x, other, other, attn_mask=None if self.cross else mask, key_padding_mask=padding, need_weights=need
        )[0]


class Recurrent(nn.Module):
    """A recurrent layer of torch with a head."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(x)
        return out if isinstance(last, tuple) else out + last[-1:].transpose(0, 1)[..., :1]


class Shared(nn.Module):
    """One layer across depth, with its weight read directly, transposed, and by a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.weight))
        x = torch.tanh(x @ self.weight)
        return F.linear(x, self.weight[:2]) + torch.einsum("bd,pd->bp", x, self.weight[2:])


class LowRank(nn.Module):
    """LoRA: a frozen layer and a trained product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Penalised(nn.Module):
    """Adds a term that depends on parameters alone to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.weight.square().sum()


class HeadFirst(nn.Module):
    """Registered in another order than it runs: a backend must not stop at the first registered layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Skipping(nn.Module):
    """Skips a layer while `all_of_it` is False, as layer dropping and early exits do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.all_of_it = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.sometimes(x)) if self.all_of_it else x)


class SequenceFirst(nn.Module):
    """Time first inside: layers, positions, a token at the end, all on [T, B, d]."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.inside, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.positions, self.token = nn.Parameter(torch.randn(steps, 1, 4)), nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = torch.cat([x, self.token.repeat(1, x.shape[1], 1)])[1:]
        x = torch.relu(self.inside(x)) + self.positions
        return self.head(self.norm(x) * self.positions - self.token).transpose(0, 1)


class Encoder(nn.Module):
    """torch's own transformer encoder with its default layout, [T, B, d]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        self.embed, self.encoder = nn.Linear(4, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.embed(x.transpose(0, 1))).mean(0)


class FlatBags(nn.Module):
    """An embedding bag with all ids in one row, with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 4, padding_idx=2), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids >= 0).sum(1)
        return self.head(self.bag(ids[ids >= 0], lengths.cumsum(0) - lengths))
