"""Problems as data: small models in float64, each with a batch and a loss, to compare backends with the oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from dpbench.conformance import modules as nets

BATCH = 5

Setup = tuple[nn.Module, Any, Any, Callable[[Any, Any], Tensor]]
"""(model, inputs, targets, loss_fn)."""


@dataclass(frozen=True)
class Case:
    """`make()` draws the weights and the batch from torch's generator."""

    name: str
    make: Callable[[], Setup]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample, [B].

    Args:
        outputs: logits [B, K].
        targets: labels [B].
    """
    return F.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    """The mean squared error of each sample, [B].

    Args:
        outputs: [B, ...].
        targets: [B, n], as many numbers a sample.
    """
    return (outputs.flatten(1) - targets).square().mean(1)


def images(*layers: nn.Module, size: tuple[int, ...] = (4, 6, 6), batch: int = BATCH) -> Any:
    """A stack of layers over random images, with squared error to a random target; the output may have any shape.

    Args:
        layers: of the model, in order.
        size: of a sample, such as [C, H, W].
        batch: B.
    """
    model = nn.Sequential(*layers).double()
    x = torch.randn(batch, *size, dtype=torch.float64)
    with torch.no_grad():
        features = model(x).flatten(1).shape[1]
    return model, x, torch.randn(batch, features, dtype=torch.float64), squared_error


def _conv(*args: Any, size: tuple[int, ...] = (4, 6, 6), dims: int = 2, **kwargs: Any) -> Callable[[], Any]:
    """A convolution of so many spatial dimensions over random images, followed by tanh."""
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return lambda: images(layer(*args, **kwargs), nn.Tanh(), size=size)


def _bag(mode: str, padding_idx: int | None = None) -> Any:
    """An embedding bag and a linear layer; one id twice in every sample, and id 3."""
    model = nn.Sequential(nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding_idx), nn.Linear(4, 5)).double()
    ids = torch.randint(0, 7, (BATCH, 6))
    ids[:, 1], ids[:, 2] = ids[:, 0], 3
    return model, ids, torch.randn(BATCH, 5).double(), squared_error


def tokens(model: nn.Module, classes: int) -> Any:
    """A model over ids [B, 6], with one id twice in every sample.

    Args:
        model: from ids to logits [B, 6, classes].
        classes: of a token.
    """
    ids = torch.randint(0, 7, (BATCH, 6))
    ids[:, 1] = ids[:, 0]  # a repeated token in every sample
    ids[:, 2], ids[:, 3] = 3, 6  # and the padding tokens of the cases below
    return (
        model.double(),
        ids,
        torch.randint(0, classes, (BATCH, 6)),
        lambda out, y: F.cross_entropy(out.transpose(1, 2), y, reduction="none").sum(1),
    )


def _two_inputs(as_dict: bool) -> Any:
    """A model that takes two arguments, by keyword or as a tuple."""
    left, right = torch.randn(BATCH, 3).double(), torch.randn(BATCH, 2).double()
    inputs: Any = {"left": left, "right": right} if as_dict else (left, right)
    return nets.two_inputs().double(), inputs, torch.randn(BATCH, 4).double(), squared_error


def _linear(*shape: int, bias: bool = True) -> Callable[[], Any]:
    """A linear layer over random vectors, followed by tanh; `shape` is that of a sample."""
    return lambda: images(nn.Linear(shape[-1], 3, bias=bias), nn.Tanh(), size=shape)


def _frozen(bias_only: bool) -> Any:
    """A small network whose biases alone are trained, or all but the first layer."""
    model, x, y, loss = images(
        nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    )
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias") if bias_only else not name.startswith("0"))
    return model, x, y, loss


def _embedding(padding_idx: int | None) -> Any:
    """An embedding and a linear layer over the same ids as `tokens`."""
    return tokens(nn.Sequential(nn.Embedding(7, 4, padding_idx=padding_idx), nn.Linear(4, 5)), 5)


def _as_many_positions() -> Any:
    """T = B: shapes alone do not tell the two dimensions apart."""
    model, _, _, loss = tokens(nn.Sequential(nets.positions(), nn.Linear(4, 5)), 5)
    return model, torch.randint(0, 7, (BATCH, BATCH)), torch.randint(0, 5, (BATCH, BATCH)), loss


def _one_id() -> Any:
    """An embedding of one id a sample."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5)).double()
    return model, torch.arange(BATCH), torch.randn(BATCH, 5).double(), squared_error


def _bags() -> Any:
    """EmbeddingBag over concatenated ids, with offsets; one bag is empty, and the mean ignores padding."""
    ids = torch.randint(0, 7, (BATCH, 4))
    ids[1, 2:], ids[3] = -1, -1
    return nets.flat_bags().double(), ids, torch.randn(BATCH, 3).double(), squared_error


def _ragged() -> Any:
    """Sequences of different lengths, padded with token 0; the loss ignores padded positions."""
    lengths = torch.tensor([6, 1, 4, 2, 5])
    inside = torch.arange(6) < lengths[:, None]
    model, ids, targets, loss = tokens(nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 5)), 5)
    return model, ids * inside, targets.masked_fill(~inside, -100), loss  # cross_entropy ignores -100


CASES = [
    Case("linear 2-D", _linear(4)),
    Case("linear 3-D", _linear(6, 4)),
    Case("linear 4-D no bias", _linear(3, 2, 4, bias=False)),
    Case("conv1d", _conv(4, 6, 3, size=(4, 9), dims=1)),
    Case("conv1d strided", _conv(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, size=(4, 11), dims=1)),
    Case("conv2d", _conv(4, 6, 3)),
    Case("conv2d stride", _conv(4, 6, 3, stride=2, padding=1)),
    Case("conv2d stride leaves a remainder", _conv(4, 6, 2, stride=3)),
    Case("conv2d dilation", _conv(4, 6, (3, 2), dilation=(2, 1), padding=(2, 0))),
    Case("conv2d groups", _conv(4, 6, 3, groups=2, padding=1)),
    Case("conv2d depthwise", _conv(4, 8, 3, groups=4, padding=1, bias=False)),
    Case("conv2d pointwise", _conv(4, 6, 1)),
    Case("conv2d pointwise stride", _conv(4, 6, 1, stride=2)),
    Case("conv2d same", _conv(4, 6, 3, padding="same")),
    Case("conv2d same even kernel", _conv(4, 6, (2, 4), padding="same", dilation=(3, 1))),
    Case("conv2d valid", _conv(4, 6, 3, padding="valid")),
    Case("conv2d circular", _conv(4, 6, 3, padding=1, padding_mode="circular")),
    Case("conv2d reflect", _conv(4, 6, 3, padding=(2, 1), padding_mode="reflect")),
    Case("conv3d", _conv(2, 4, 2, size=(2, 3, 4, 4), dims=3)),
    Case("conv3d everything", _conv(2, 4, (1, 3, 2), (1, 2, 1), (0, 1, 1), (1, 1, 2), 2, size=(2, 3, 5, 4), dims=3)),
    Case("layer norm", lambda: images(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), size=(4,))),
    Case("layer norm over positions", lambda: images(nn.LayerNorm(4), nn.Linear(4, 3), size=(3, 4))),
    Case("layer norm over two dims", lambda: images(nn.LayerNorm([6, 6]), nn.Conv2d(4, 2, 3), nn.Tanh())),
    Case(
        "layer norm without affine",
        lambda: images(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 3), size=(4,)),
    ),
    Case("group norm", lambda: images(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.GroupNorm(4, 4), nn.Tanh())),
    Case("group norm 2-D", lambda: images(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Tanh(), size=(4,))),
    Case("residual in place", lambda: images(nets.residual(), nets.residual())),
    Case("reused", lambda: images(nets.reused(), size=(4,))),
    Case("embedding", lambda: _embedding(None)),
    Case("bag of words", lambda: _bag("sum")),
    Case("bag of words mean", lambda: _bag("mean")),
    Case("bag of words padding_idx", lambda: _bag("mean", 3)),
    Case("embedding of one id", _one_id),
    Case("embedding padding_idx", lambda: _embedding(3)),
    Case("embedding negative padding_idx", lambda: _embedding(-1)),
    Case("tied head", lambda: tokens(nets.tied(), 7)),
    Case("keyword inputs", lambda: _two_inputs(True)),
    Case("positional inputs", lambda: _two_inputs(False)),
    Case("frozen first layer", lambda: _frozen(False)),
    Case("bias only", lambda: _frozen(True)),
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
    Case("vision transformer's parameters", lambda: images(nets.ParameterZoo())),
    Case("positions added in place", lambda: images(nets.ParameterZoo(in_place=True))),
    Case("positions", lambda: tokens(nn.Sequential(nets.positions(), nn.Linear(4, 5)), 5)),
    Case("types without a batch", lambda: tokens(nn.Sequential(nets.positions(batched=False), nn.Linear(4, 5)), 5)),
    Case("as many positions as samples", _as_many_positions),
    Case("windows", lambda: images(nets.windows(), size=(2, 2, 4))),
    Case("self attention", lambda: images(nets.attention(batch_first=True), nn.Tanh(), size=(3, 4))),
    Case("sequence first attention", lambda: images(nets.attention(), nn.Tanh(), size=(3, 4))),
    Case("cross attention", lambda: images(nets.attention(batch_first=True, kdim=8, vdim=8), nn.Tanh(), size=(3, 4))),
    Case(
        "lstm", lambda: images(nets.recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True), size=(3, 4))
    ),
    Case("gru", lambda: images(nets.recurrent(nn.GRU, batch_first=True, bias=False), size=(3, 4))),
    Case("rnn", lambda: images(nets.recurrent(nn.RNN, batch_first=True), size=(3, 4))),
    Case("shared across depth", lambda: images(nets.shared(), size=(4,))),
    Case("low rank", lambda: images(nets.low_rank(), nn.Tanh(), size=(3, 4))),
    Case("penalised", lambda: images(nets.penalised(), nn.Tanh(), size=(4,))),
    Case("sequence first", lambda: images(nets.sequence_first(), size=(3, 4))),
    Case("as many steps as samples", lambda: images(nets.sequence_first(BATCH), size=(BATCH, 4))),
    Case("encoder, sequence first", lambda: images(nets.encoder(), size=(3, 4))),
    Case("bags of different sizes", _bags),
    Case("head registered first", lambda: images(nets.head_first(), size=(6,))),
    Case("ragged sequences", _ragged),
    Case("hidden state with a gradient", lambda: images(nets.hidden_leaf(), size=(4,))),
    Case("hidden state above a frozen layer", lambda: images(nets.hidden_leaf(frozen=True), size=(4,))),
    Case("a layer of training alone", lambda: images(nets.in_training(), size=(4,))),
    Case("expanded like the data", lambda: images(nets.expanded_like(), nn.Tanh(), size=(4,))),
    Case("expanded like longer data", lambda: images(nets.expanded_like(), nn.Tanh(), size=(3, 4))),
    Case("a bias changed in place", lambda: images(nets.changed_bias(), nn.Tanh(), size=(3, 4))),
    Case("a product changed in place", lambda: images(nets.changed_product(), nn.Tanh(), size=(3, 4))),
    Case("a spectrum of a parameter", lambda: images(nets.spectrum(), nn.Tanh(), size=(5, 4))),
    Case("a power that is a parameter", lambda: images(nets.power_mean())),
]
