"""Operation -> handler: runs the operation and says what gradient each of its parameters will get.

A handler takes the operation's own arguments and returns (output, rules), or raises `Refused`. An operation that is not
here and reads a trainable parameter makes the model unsupported: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from clipping.rules.base import Refused, Rule
from clipping.rules.convolution import convolution
from clipping.rules.embedding import embedding
from clipping.rules.linear import linear
from clipping.rules.norm import group_norm, layer_norm

__all__ = ["HANDLERS", "Handler", "Refused", "Rule"]

Handler = Callable[..., tuple[Tensor, list[Rule]]]

HANDLERS: dict[Any, Handler] = {
    F.linear: linear,
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
}
