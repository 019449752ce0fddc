"""Track which dimension of an activation holds the samples, for models that use sequences first, [T, B, d].

The batch starts as the first dimension. A transposition moves it; an operation that keeps its size keeps its position.
After any other operation the first dimension is assumed, which the first batch's verification tests.

Rules need the rows in the first dimension. A use whose activations have rows in several dimensions, or one sample
without a batch dimension, therefore runs on reshaped activations (`as_rows`).
"""

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.provenance.derived_parameters import TRANSPOSITIONS, methods, samples_of
from clipping.provenance.row_owners import NOBODY, Rows
from clipping.provenance.static_values import holds, require_numbers
from clipping.rules.base import Refused
from clipping.rules.contraction import parsed
from clipping.tape.rewritten import LIKE, takes_all

PERMUTATIONS = TRANSPOSITIONS | methods("unbind", "adjoint") | {torch.ops.aten.matrix_H, torch.ops.aten.mH}
PERMUTATIONS |= {torch.Tensor.H.__get__, torch.Tensor.mH.__get__}  # type: ignore[attr-defined]
"""Operations that only permute dimensions, as their arguments say."""

REDUCTIONS = methods("sum", "mean", "amax", "amin", "logsumexp", "prod", "norm", "var", "std")
"""Operations that remove dimensions, or make them 1, as their arguments say."""

VIEWS = methods("view", "reshape", "flatten", "unflatten")
"""Operations that keep the order of entries and change the dimensions."""

BROADCAST = methods("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where", "lerp", "addcmul")
"""Elementwise operations."""
CATENATIONS = methods("cat", "concat", "concatenate")
POSITIONWISE = {F.linear, F.embedding, F.layer_norm, F.rms_norm, *methods("rms_norm", "matmul")}
MOVABLE = BROADCAST | CATENATIONS | POSITIONWISE
"""Operations that do not depend on which leading dimension holds the samples."""


def dimension_after(func: Any, args: Any, kwargs: Any, data: list[Tensor], output: Tensor, batch_size: int) -> int:
    """Return the dimension of the samples in the output of an operation on `data`."""
    if func in PERMUTATIONS or (func in REDUCTIONS and samples_of(data[0])):
        permutation = func, samples_of(data[0]), data[0].dim(), args[1:], tuple(kwargs.items())
        try:
            return _permuted(*permutation)
        except TypeError:  # an argument is a list, which is not hashable
            return _permuted.__wrapped__(*permutation)
    if func in VIEWS:
        x = data[0]
        if (at := samples_of(x)) or output.shape[:1] == (1,) != x.shape[:1]:
            return _viewed(x.shape, output.shape, at, batch_size)
    if func is torch.einsum:
        return _named(args, data)
    for x in data:
        at = samples_of(x)
        if not at or not isinstance(at, int):  # `Rows` describe the operand, not the output
            continue
        if output.dim() == x.dim() and output.shape[at] % batch_size == 0:  # heads may be folded in
            return at
        if output.shape[: at + 1] == x.shape[: at + 1]:
            return at
    return 0


def _named(args: Any, data: list[Tensor]) -> int:
    """Find the samples in the output of an einsum by their letter in an operand; 0 if the output does not have it."""
    equation, *operands = args
    flat = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    with suppress(Refused):  # takes a diagonal
        terms, result = parsed(equation, flat) if isinstance(equation, str) else ([], "")
        for x, term in zip(flat, terms, strict=False):
            at = samples_of(x) if any(x is operand for operand in data) else None
            if isinstance(at, int) and term[at : at + 1] in set(result):
                return result.index(term[at])
    return 0


def _viewed(before: torch.Size, after: torch.Size, at: int, batch_size: int) -> int:
    """Find dimension `at` in a view: the one preceded by as many entries; dimensions of size 1 do not matter."""
    if batch_size == 1:
        return 0  # one sample has all rows, and a dimension of size 1 cannot be tracked
    count, entries = 1, before[:at].numel()
    for dim, size in enumerate(after):
        if count == entries and size % batch_size == 0:
            return dim
        count *= size
    return 0


@functools.cache
def _permuted(func: Any, before: int, dims: int, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> int:
    """Return the new index of dimension `before` after a permutation; 0 if it is no longer one dimension."""
    probe = torch.empty([2 + i for i in range(dims)], device="meta")  # each dimension has its own size
    found = func(probe, *args, **dict(kwargs))
    sizes = list((found if isinstance(found, Tensor) else found[0]).shape)
    return sizes.index(2 + before) if 2 + before in sizes else 0


def samples_first(func: Any, args: Any, kwargs: Any, at: int, data: list[Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a movable operation with dimension `at` of its activations moved to the front.

    Args:
        at: dimension of the samples.
    """
    activations, dims = {id(x) for x in data}, max(x.dim() for x in data)

    def moved(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and func in CATENATIONS:
            return [moved(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) in activations and (value.dim() == dims or func not in BROADCAST):
            return value.transpose(0, at)
        if func in POSITIONWISE or value.dim() < dims - at:
            return value  # a weight, or the same for all samples
        return value.reshape((1,) * (dims - value.dim()) + tuple(value.shape)).transpose(0, at)

    args, kwargs = tuple(moved(value) for value in args), {key: moved(value) for key, value in kwargs.items()}
    if func in CATENATIONS:
        dim = (kwargs.pop("dim") if "dim" in kwargs else args[1] if len(args) > 1 else 0) % dims
        return (args[0], {0: at, at: 0}.get(dim, dim)), kwargs
    return args, kwargs


def new_dimensions(args: Any, kwargs: Any, data: list[Tensor]) -> tuple[None, ...]:
    """Return an index that gives activations as many dimensions as a parameter that they are broadcast with.

    Empty if they have them, or if they have different numbers of dimensions.
    """
    dims = {x.dim() for x in data}
    most = max(x.dim() for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    return (None,) * (most - dims.pop()) if len(dims) == 1 and dims != {0} else ()


OF_ROWS = {F.linear, F.embedding, F.layer_norm, F.rms_norm, torch.rms_norm, torch.matmul, torch.Tensor.matmul}
"""Operations on the last one or two dimensions."""
OF_FEATURES = OF_ROWS - {F.embedding}
ALONG_FEATURES = {F.linear, F.layer_norm, F.rms_norm, torch.rms_norm}
"""Operations that read the whole last dimension of an activation."""
OF_WHOLE = OF_ROWS | {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
"""Operations that also work without a batch dimension."""
OF_PARTS = {F.multi_head_attention_forward, F.bilinear}
"""Composites of row by row operations, and of some along later dimensions."""
OTHERWISE = LIKE | OF_PARTS | {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
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
            if func is F.embedding_bag and x.dim() == 1:  # bags are in the order of their ids
                if place.unknown or not _ascend(place.owners):
                    raise Refused("its ids are not in the order of the samples", "use ids [B, L], or microbatch")
                continue
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


def _ascend(owners: Tensor) -> bool:
    require_numbers(owners)
    return holds(((owners >= owners.cummax(0).values) | (owners == NOBODY)).all())


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
