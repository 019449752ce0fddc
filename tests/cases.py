"""Problems as data: small models in float64, a batch and a loss each, on which every backend is held to the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

BATCH = 5


@dataclass(frozen=True)
class Case:
    """`make()` gives (model, inputs, targets, loss_fn)."""

    name: str
    make: Callable[[], tuple[nn.Module, Any, Any, Callable[[Any, Any], Tensor]]]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) - targets).square().mean(1)


def images(*layers: nn.Module, size: tuple[int, ...] = (4, 6, 6), batch: int = BATCH) -> Any:
    """A stack of layers over random images, squared error to a random target: any output shape will do."""
    model = nn.Sequential(*layers).double()
    x = torch.randn(batch, *size, dtype=torch.float64)
    with torch.no_grad():
        features = model(x).flatten(1).shape[1]
    return model, x, torch.randn(batch, features, dtype=torch.float64), squared_error


def conv(*args: Any, size: tuple[int, ...] = (4, 6, 6), dims: int = 2, **kwargs: Any) -> Callable[[], Any]:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return lambda: images(layer(*args, **kwargs), nn.Tanh(), size=size)


class Residual(nn.Module):
    """In-place ReLU and in-place residual addition, as real models have them."""

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
    """A language model in miniature whose head is its embedding."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=padding_idx)
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
        self.unused(torch.ones(left.shape[0], 5, dtype=left.dtype))
        return self.left(left) * self.right(right)


class ParameterZoo(nn.Module):
    """Bare parameters as vision transformers use them: class token, positions, LayerScale, a table of biases."""

    def __init__(self, positions: int = 5, in_place: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 6, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, positions, 6))
        self.scale = nn.Parameter(torch.randn(6))
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.register_buffer("k_bias", torch.zeros(6))
        self.qkv = nn.Linear(6, 18, bias=False)
        self.table = nn.Parameter(torch.randn(9, 2))
        index = torch.arange(positions)
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
    """Positions from an embedding table at ids without a batch dimension, token types with one."""

    def __init__(self, batched: bool = True) -> None:
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Embedding(2, 4)
        self.norm, self.batched = nn.LayerNorm(4), batched

    def forward(self, ids: Tensor) -> Tensor:
        types = torch.zeros(ids.shape if self.batched else (1, ids.shape[1]), dtype=torch.long)
        x = self.words(ids) + self.types(types)
        return self.norm(x + self.positions(torch.arange(ids.shape[1])))


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
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.cross = options.get("kdim") is not None

    def forward(self, x: Tensor) -> Tensor:
        other = torch.cat((x, x), -1)[:, :2] if self.cross else x
        mask = torch.ones(x.shape[1], other.shape[1], dtype=torch.bool).triu(1)
        if not self.attention.batch_first:
            return self.attention(x.transpose(0, 1), other.transpose(0, 1), other.transpose(0, 1))[0].transpose(0, 1)
        padding = torch.zeros(other.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        need = not self.cross
        return self.attention(
            x, other, other, attn_mask=None if self.cross else mask, key_padding_mask=padding, need_weights=need
        )[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(x)
        return out if isinstance(last, tuple) else out + last[-1:].transpose(0, 1)[..., :1]


class Shared(nn.Module):
    """One layer across depth, its weight read as it is, transposed, and by a slice."""

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
    """The output carries a term of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.weight.square().sum()


def bag(mode: str, padding_idx: int | None = None) -> Any:
    model = nn.Sequential(nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding_idx), nn.Linear(4, 5)).double()
    ids = torch.randint(0, 7, (BATCH, 6))
    ids[:, 1], ids[:, 2] = ids[:, 0], 3
    return model, ids, torch.randn(BATCH, 5).double(), squared_error


def tokens(model: nn.Module, classes: int) -> Any:
    ids = torch.randint(0, 7, (BATCH, 6))
    ids[:, 1] = ids[:, 0]  # a repeated token in every sample
    ids[:, 2], ids[:, 3] = 3, 6  # and the padding tokens of the cases below
    return (
        model.double(),
        ids,
        torch.randint(0, classes, (BATCH, 6)),
        lambda out, y: F.cross_entropy(out.transpose(1, 2), y, reduction="none").sum(1),
    )


def two_inputs(as_dict: bool) -> Any:
    left, right = torch.randn(BATCH, 3).double(), torch.randn(BATCH, 2).double()
    inputs: Any = {"left": left, "right": right} if as_dict else (left, right)
    return TwoInputs().double(), inputs, torch.randn(BATCH, 4).double(), squared_error


def linear(*shape: int, bias: bool = True) -> Callable[[], Any]:
    return lambda: images(nn.Linear(shape[-1], 3, bias=bias), nn.Tanh(), size=shape)


def frozen(bias_only: bool) -> Any:
    model, x, y, loss = images(
        nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    )
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias") if bias_only else not name.startswith("0"))
    return model, x, y, loss


def embedding_bag_of_words(padding_idx: int | None) -> Any:
    return tokens(nn.Sequential(nn.Embedding(7, 4, padding_idx=padding_idx), nn.Linear(4, 5)), 5)


def as_many_positions() -> Any:
    """T = B: shapes alone do not say which of the two a dimension is."""
    model, _, _, loss = tokens(nn.Sequential(Positions(), nn.Linear(4, 5)), 5)
    return model, torch.randint(0, 7, (BATCH, BATCH)), torch.randint(0, 5, (BATCH, BATCH)), loss


def one_id() -> Any:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5)).double()
    return model, torch.arange(BATCH), torch.randn(BATCH, 5).double(), squared_error


NOT_FOR = {
    "opacus_hooks": {
        "conv2d circular",
        "conv2d reflect",
        "residual in place",
        "embedding padding_idx",
        "embedding negative padding_idx",
        "bag of words",
        "bag of words mean",
        "bag of words padding_idx",
        "layer norm without bias",
        "batch norm in eval mode",
        "vision transformer's parameters",
        "positions added in place",
        "positions",
        "types without a batch",
        "as many positions as samples",
        "self attention",
        "sequence first attention",
        "cross attention",
        "penalised",
        "lstm",
        "gru",
        "rnn",
    },
    "vmap": {"lstm", "gru", "rnn"},
}
"""Cases that a backend refuses, or gets wrong and is found out: strict, so that a mended one is noticed."""

CASES = [
    Case("linear 2-D", linear(4)),
    Case("linear 3-D", linear(6, 4)),
    Case("linear 4-D no bias", linear(3, 2, 4, bias=False)),
    Case("conv1d", conv(4, 6, 3, size=(4, 9), dims=1)),
    Case("conv1d strided", conv(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, size=(4, 11), dims=1)),
    Case("conv2d", conv(4, 6, 3)),
    Case("conv2d stride", conv(4, 6, 3, stride=2, padding=1)),
    Case("conv2d stride leaves a remainder", conv(4, 6, 2, stride=3)),
    Case("conv2d dilation", conv(4, 6, (3, 2), dilation=(2, 1), padding=(2, 0))),
    Case("conv2d groups", conv(4, 6, 3, groups=2, padding=1)),
    Case("conv2d depthwise", conv(4, 8, 3, groups=4, padding=1, bias=False)),
    Case("conv2d pointwise", conv(4, 6, 1)),
    Case("conv2d pointwise stride", conv(4, 6, 1, stride=2)),
    Case("conv2d same", conv(4, 6, 3, padding="same")),
    Case("conv2d same even kernel", conv(4, 6, (2, 4), padding="same", dilation=(3, 1))),
    Case("conv2d valid", conv(4, 6, 3, padding="valid")),
    Case("conv2d circular", conv(4, 6, 3, padding=1, padding_mode="circular")),
    Case("conv2d reflect", conv(4, 6, 3, padding=(2, 1), padding_mode="reflect")),
    Case("conv3d", conv(2, 4, 2, size=(2, 3, 4, 4), dims=3)),
    Case("conv3d everything", conv(2, 4, (1, 3, 2), (1, 2, 1), (0, 1, 1), (1, 1, 2), 2, size=(2, 3, 5, 4), dims=3)),
    Case("layer norm", lambda: images(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), size=(4,))),
    Case("layer norm over positions", lambda: images(nn.LayerNorm(4), nn.Linear(4, 3), size=(3, 4))),
    Case("layer norm over two dims", lambda: images(nn.LayerNorm([6, 6]), nn.Conv2d(4, 2, 3), nn.Tanh())),
    Case(
        "layer norm without affine",
        lambda: images(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 3), size=(4,)),
    ),
    Case("group norm", lambda: images(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.GroupNorm(4, 4), nn.Tanh())),
    Case("group norm 2-D", lambda: images(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Tanh(), size=(4,))),
    Case("residual in place", lambda: images(Residual(), Residual())),
    Case("reused", lambda: images(Reused(), size=(4,))),
    Case("embedding", lambda: embedding_bag_of_words(None)),
    Case("bag of words", lambda: bag("sum")),
    Case("bag of words mean", lambda: bag("mean")),
    Case("bag of words padding_idx", lambda: bag("mean", 3)),
    Case("embedding of one id", lambda: one_id()),
    Case("embedding padding_idx", lambda: embedding_bag_of_words(3)),
    Case("embedding negative padding_idx", lambda: embedding_bag_of_words(-1)),
    Case("tied head", lambda: tokens(Tied(), 7)),
    Case("keyword inputs", lambda: two_inputs(True)),
    Case("positional inputs", lambda: two_inputs(False)),
    Case("frozen first layer", lambda: frozen(False)),
    Case("bias only", lambda: frozen(True)),
    Case("conv_transpose1d", lambda: images(nn.ConvTranspose1d(4, 6, 3, stride=2), nn.Tanh(), size=(4, 5))),
    Case(
        "conv_transpose2d",
        lambda: images(nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), 2, dilation=(2, 1)), nn.Tanh()),
    ),
    Case("conv_transpose3d", lambda: images(nn.ConvTranspose3d(2, 3, 2), nn.Tanh(), size=(2, 2, 3, 3))),
    Case("instance norm", lambda: images(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 3), nn.Tanh())),
    Case("rms norm", lambda: images(nn.RMSNorm(4), nn.Linear(4, 3), nn.Tanh(), size=(3, 4))),
    Case("layer norm without bias", lambda: images(nn.LayerNorm(4, bias=False), nn.Linear(4, 3), size=(3, 4))),
    Case("prelu by the fallback", lambda: images(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 2), size=(4,))),
    Case("batch norm in eval mode", lambda: images(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).eval(), nn.Tanh())),
    Case("weight norm", lambda: images(weight_norm(nn.Linear(4, 3)), nn.Tanh(), size=(4,))),
    Case("vision transformer's parameters", lambda: images(ParameterZoo())),
    Case("positions added in place", lambda: images(ParameterZoo(in_place=True))),
    Case("positions", lambda: tokens(nn.Sequential(Positions(), nn.Linear(4, 5)), 5)),
    Case("types without a batch", lambda: tokens(nn.Sequential(Positions(batched=False), nn.Linear(4, 5)), 5)),
    Case("as many positions as samples", lambda: as_many_positions()),
    Case("windows", lambda: images(Windows(), size=(2, 2, 4))),
    Case("self attention", lambda: images(Attention(batch_first=True), nn.Tanh(), size=(3, 4))),
    Case("sequence first attention", lambda: images(Attention(), nn.Tanh(), size=(3, 4))),
    Case("cross attention", lambda: images(Attention(batch_first=True, kdim=8, vdim=8), nn.Tanh(), size=(3, 4))),
    Case("lstm", lambda: images(Recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True), size=(3, 4))),
    Case("gru", lambda: images(Recurrent(nn.GRU, batch_first=True, bias=False), size=(3, 4))),
    Case("rnn", lambda: images(Recurrent(nn.RNN, batch_first=True), size=(3, 4))),
    Case("shared across depth", lambda: images(Shared(), size=(4,))),
    Case("low rank", lambda: images(LowRank(), nn.Tanh(), size=(3, 4))),
    Case("penalised", lambda: images(Penalised(), nn.Tanh(), size=(4,))),
]
