"""Uses by activations that have rows in several dimensions, or one sample without a batch dimension.

They run on the same values with the rows in the first dimension, for which there are rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.provenance.derived_parameters import methods, samples_of
from clipping.provenance.row_owners import Rows
from clipping.rules.base import Refused
from clipping.rules.rewritten import LIKE, takes_all
from clipping.tape.batch_dimension import ELEMENTWISE

OF_ROWS = {F.linear, F.embedding, F.layer_norm, F.rms_norm, torch.rms_norm, torch.matmul, torch.Tensor.matmul}
"""Operations on the last one or two dimensions."""
OF_FEATURES = OF_ROWS - {F.embedding}
ALONG_FEATURES = {F.linear, F.layer_norm, F.rms_norm, torch.rms_norm}
"""Operations that read the whole last dimension of an activation."""
OF_WHOLE = OF_ROWS | {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
"""Operations that also work without a batch dimension."""
BROADCAST = ELEMENTWISE | methods("div", "true_divide", "pow", "maximum", "minimum", "where", "lerp", "addcmul")
"""Elementwise operations."""
OTHERWISE = LIKE | {F.embedding_bag, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
"""Operations whose output has other rows, or that run as their parts."""
GATHER = "gather and scatter rows by x[index], index_add_ or cat, or use microbatch"
REMEDY = "apply it to a batch, as x[i : i + 1], or use microbatch"


def whose(func: Any, args: Any, data: Sequence[Tensor], batch_size: int) -> tuple[int, Rows | None]:
    """Return the dimension of a use's activations that holds the samples, or else their rows.

    Raises:
        Refused: the owners of the rows are unknown.
    """
    at = 0
    rows: list[Rows] = []
    for x in data:
        if func is torch.Tensor.__setitem__ and x is not args[0] and not takes_all(args[1]):
            continue  # writes some rows; the target's other rows may have other owners
        place = samples_of(x)
        if isinstance(place, Rows):
            numbers = not (x.is_floating_point() or x.is_complex())
            if func in OTHERWISE or (numbers and (not x.dim() or any(y.is_floating_point() for y in data))):
                continue  # belongs to no sample: an expert's index, or where its rows end
            place = place.simplest
            if isinstance(place, Rows):
                if place.unknown:
                    raise Refused(f"it is not known which samples its rows belong to after {place.unknown}", GATHER)
                rows.append(place)
                continue
        if func in ALONG_FEATURES and 0 < place == x.dim() - 1:
            raise Refused("numbers of several samples stand in one row", GATHER)
        at = max(at, place)
    if not rows:
        vectors = batch_size == 1 and func in OF_FEATURES and all(x.dim() == 1 for x in data)
        return (0, Rows(torch.zeros((), dtype=torch.long, device="cpu"), 1)) if vectors else (at, None)
    order = max(rows, key=lambda each: each.owners.dim())
    dims = order.owners.dim()
    if dims and func in OF_FEATURES and any(x.dim() <= dims for x in data):
        raise Refused("numbers of several samples stand in one row", GATHER)
    return 0, order


def as_rows(func: Any, args: Any, kwargs: Any, rows: Rows, data: Sequence[Tensor]) -> Any:
    """Run a use whose activations have rows in several dimensions, or in none.

    Raises:
        Refused: the operation may not treat rows independently.
    """
    dims = rows.owners.dim()
    ours = {id(x) for x in data if dims == 0 or x.shape[:dims] == rows.owners.shape}
    others = [x.dim() for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and id(x) not in ours]
    least = min((x.dim() for x in data if id(x) in ours), default=0)
    elementwise = func in BROADCAST and all(other <= least - dims for other in others)
    inner = func in (OF_ROWS if dims else OF_WHOLE) and (func not in _PRODUCTS or least > dims > 0 or least > 1)
    if not (elementwise or inner) or len(ours) != len(data):
        what = "one sample without a batch" if dims == 0 else f"rows in {dims} dimensions"
        raise Refused(f"no exact rule for {what}", REMEDY)

    def flat(x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) not in ours:
            return x
        return x.flatten(0, dims - 1) if dims else x.unsqueeze(0)

    output = func(*map(flat, args), **{key: flat(x) for key, x in kwargs.items()})
    return output.unflatten(0, rows.owners.shape) if dims else output.squeeze(0)


_PRODUCTS = {torch.matmul, torch.Tensor.matmul}
