"""Run an operation once for operands whose rows are copies of one row made of parameters.

An attention's position score is the same for every sample, and a model may expand it to the batch before use (ConViT).
Each of the B rows is then the same function f of the parameters, and the gradient of sample i is J_fᵀ applied to row
i's gradient, for one row. The graph of all B rows gives the same result at B times the cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_NAMES = (
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "pow", "maximum", "minimum"),
    *("neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "abs", "sin", "cos", "tanh"),
    *("sigmoid", "relu", "erf", "clamp", "clip", "where", "lerp", "float", "double", "half", "bfloat16", "to"),
    *("matmul", "permute", "transpose", "swapaxes", "movedim", "unsqueeze", "softmax", "log_softmax"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__"),
    *("__pow__", "__rpow__", "__matmul__"),
)
ROWWISE = {getattr(where, name, None) for where in (torch, torch.Tensor) for name in _NAMES} - {None}
ROWWISE |= {F.linear, F.layer_norm, F.rms_norm, torch.rms_norm, F.softmax, F.log_softmax}
ROWWISE |= {F.gelu, F.silu, F.softplus, F.relu, F.leaky_relu, F.elu}
"""Operations that treat each row independently, if their result for one row has the shape of an output row."""
ALONG = {torch.softmax, torch.Tensor.softmax, torch.log_softmax, torch.Tensor.log_softmax, F.softmax, F.log_softmax}
"""Those with a dimension as second argument; they are rowwise unless it is the rows' own dimension."""


def done_once(func: Any, args: Any, kwargs: Any, output: Tensor, rows: Mapping[int, Tensor]) -> Tensor | None:
    """Return `func` of one row, [1, ...], if the rows of its output [B, ...] are copies of it; else None.

    Args:
        rows: id of an operand made of parameters -> the row that its rows are copies of.
    """
    count = len(output) if output.dim() > 1 else 1
    in_place = any(output is x for x in (*args, *kwargs.values()))
    if count == 1 or func not in ROWWISE or in_place:
        return None
    if func in ALONG and _along(args, kwargs) % output.dim() == 0:
        return None
    found = False

    def one(x: Any) -> Any:
        nonlocal found
        if not isinstance(x, Tensor) or not x.dim() or len(x) != count:
            return x
        row = rows.get(id(x))
        if row is None and (x.requires_grad or x.stride(0)):
            return x
        found = True
        return x[:1] if row is None else row.expand(1, *x.shape[1:])

    replaced, named = [one(x) for x in args], {key: one(x) for key, x in kwargs.items()}
    if not found:
        return None
    made = None
    with suppress(RuntimeError, TypeError, IndexError), saved_tensors_hooks(torch.Tensor.detach, _same):
        made = func(*replaced, **named)  # saves no tensor that a checkpoint would count
    return made if isinstance(made, Tensor) and made.shape == (1, *output.shape[1:]) else None


def _along(args: Any, kwargs: Any) -> int:
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else 0
    return dim if isinstance(dim, int) else 0


def _same(x: Tensor) -> Tensor:
    return x
