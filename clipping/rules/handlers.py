"""Tables of handlers: each runs an operation and returns the gradients of its parameters.

A handler takes the operation's own arguments and returns (output, gradients), or raises `Refused`. A composite is a
torch function that runs as its parts, unless its entry returns NotImplemented. Handlers that need a copy of each
parameter for each sample take `Activations.each` (`clipping.tape.uses`) first, which makes and records the copies.
Operations in no table use the fallback, which assumes no formula.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.rules.base import Gradient
from clipping.rules.composite import bilinear, multi_head_attention_forward, scaled_dot_product_attention
from clipping.rules.contraction import einsum
from clipping.rules.convolution import convolution, transposed_convolution
from clipping.rules.elementwise import add, add_, cat, mul, sub
from clipping.rules.embedding import embedding, embedding_bag
from clipping.rules.grouped import grouped_by_transformers, grouped_mm
from clipping.rules.linear import addmm, linear, matmul
from clipping.rules.normalisation import group_norm, instance_norm, layer_norm, rms_norm
from clipping.rules.recurrent import RECURRENT

Handler = Callable[..., tuple[Tensor, Sequence[Gradient]]]

HANDLERS: dict[Any, Handler] = {
    F.linear: linear,
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), addmm),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.mm, torch.Tensor.mm), matmul),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), transposed_convolution),
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    F.layer_norm: layer_norm,
    **dict.fromkeys((F.rms_norm, torch.rms_norm), rms_norm),  # the latter as TorchDynamo writes it
    **dict.fromkeys({getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)} - {None}, grouped_mm),
    torch.einsum: einsum,
    **dict.fromkeys((torch.add, torch.Tensor.add), add),
    torch.Tensor.add_: add_,
    **dict.fromkeys((torch.sub, torch.Tensor.sub), sub),
    **dict.fromkeys((torch.mul, torch.Tensor.mul), mul),
    **dict.fromkeys((torch.cat, torch.concat), cat),
}

OPERATORS: dict[str, Handler] = {"transformers::grouped_mm_fallback": grouped_by_transformers}
"""Custom operators of other libraries, by name."""


def handler_of(func: Any) -> Handler | None:
    """Return the handler of an operation, or None.

    Args:
        func: a function, or an operator of `torch.ops`.
    """
    packet = getattr(func, "overloadpacket", func)
    return HANDLERS.get(func) or OPERATORS.get(getattr(packet, "_qualified_op_name", ""))


COMPOSITES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.bilinear: bilinear,
    **RECURRENT,
}

PER_SAMPLE: dict[Any, Callable[..., Any]] = {
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
}

OF_DATA = {
    F.scaled_dot_product_attention: ("query", "key", "value"),
    F.group_norm: ("input",),
    F.instance_norm: ("input",),
}
"""Composites that require activations as first operands, by name; they do not handle tensors made of parameters."""
