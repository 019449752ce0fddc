"""Rewrite operations on data and tensors made of parameters as operations that have rules.

    reads only the shape and type of its second operand      with the shape: `p.expand_as(x)` as `p.expand(x.shape)`
    a matrix on the left of the data, W x                    (xᵀ Wᵀ)ᵀ
    combines its operands row by row                         on a copy of the parameters for each row
    changes a tensor in place                                on a copy of the parameters for each row

A copy for each row is an activation: operations on it need no rule, and its gradient is the per-sample gradient of the
copied tensor. The backward pass requests that gradient directly, so later changes in place do not matter.

Functions take:
    rows: copies tensors made of parameters (`clipping.tape.uses.Activations`).
    target, index, value: of `target[index] = value`, or of an in-place operation on the whole target.
    entry: one entry of an index: an integer, a slice, None, a list or a tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.provenance.derived_parameters import (
    Source,
    depends_on_data,
    is_marked,
    mark_data,
    methods,
    samples_of,
)
from clipping.rules.base import Refused
from clipping.rules.contraction import parsed
from clipping.tape.uses import Activations

Instead = Callable[[], Any] | None
Rewriting = Callable[..., Instead]
"""(rows, operation, arguments) -> a function to run instead under the tape; None to run the call unchanged."""

FREEZE = "freeze it, or use microbatch or vmap"
INTO_PARAMETERS = "writes data into a tensor made of parameters", "join them by torch.cat or torch.where"


def broadcast_in_place(rows: Activations, func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Instead:
    """target += D and similar operations; the other operands are broadcast to the target's shape.

    Raises:
        Refused: the target is made of parameters.
    """
    if rows.source(target) is not None:
        raise Refused(*INTO_PARAMETERS)
    if func is torch.Tensor.add_ and not target._is_view():
        return None  # its rule needs no copies

    def broadcast(x: Any) -> Any:
        source = rows.source(x)
        return x if source is None else _for_each_row(rows, source, target.shape)

    args, kwargs = tuple(map(broadcast, args)), {key: broadcast(x) for key, x in kwargs.items()}
    return lambda: func(target, *args, **kwargs)


def assigned(rows: Activations, func: Any, target: Tensor, index: Any, value: Any) -> Instead:
    """target[index] = value. The index must select all samples in order, or use indices or masks.

    Raises:
        Refused: the target is made of parameters, samples are not in the first dimension, or a slice selects only some
            of them.
    """
    entries = entries_of(index)
    whole = takes_all(index) and len(entries) <= target.dim()
    source = rows.source(value)
    if rows.source(target) is not None:
        raise Refused(*INTO_PARAMETERS)
    if source is None:
        return None
    places = [samples_of(x) for x in (target, *entries) if isinstance(x, Tensor)]
    if any(isinstance(place, int) and place for place in places):
        raise Refused("sets rows to a parameter where samples are not in the first dimension", "use torch.where")
    if not whole and not all(isinstance(entry, (int, Tensor)) for entry in entries):
        raise Refused("sets some rows of the batch to a parameter", "use torch.where with a mask, or microbatch")
    if whole:
        value = _for_each_row(rows, source, target.detach()[index].shape)
        return lambda: func(target, index, value)
    copies = _beside(rows, source, entries, target.shape)
    return lambda: func(target, index, copies.expand(target.shape)[index])


def entries_of(index: Any) -> tuple[Any, ...]:
    """Return the entries of an index, with tensors in place of lists and of numpy's arrays."""
    entries = index if isinstance(index, tuple) else (index,)
    return tuple(torch.as_tensor(x) if isinstance(x, list) or hasattr(x, "__array_interface__") else x for x in entries)


def width(entry: Any) -> int:
    """Return the number of dimensions that an entry of an index reads."""
    if entry is None or isinstance(entry, bool):
        return 0
    return entry.dim() if _is_mask(entry) else 1


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype == torch.bool


def takes_all(index: Any) -> bool:
    """True if an index selects all rows in order."""
    first = index[0] if isinstance(index, tuple) and index else index
    return first is Ellipsis or (isinstance(first, slice) and first == slice(None))


def _for_each_row(rows: Activations, source: Source, shape: torch.Size) -> Tensor:
    """Return the source as an activation broadcast to `shape`, with rows in the first dimension."""
    x = source.tensor
    if shape and x.dim() == len(shape) and shape[0] == len(x):
        return rows.own(source)
    if x.dim() > len(shape) or (x.dim() == len(shape) and len(x) != 1) or not shape:
        raise Refused(f"no exact rule for a parameter of shape {list(x.shape)} in one of {list(shape)}", FREEZE)
    return _spread(rows.copies(source, shape[0]), x.shape[1:] if x.dim() == len(shape) else x.shape, len(shape))


def _beside(rows: Activations, source: Source, index: tuple[Any, ...], shape: torch.Size) -> Tensor:
    """Copy a source for each row of a target; the target's index applies to it."""
    entry = shape[sum(map(width, index)) :]
    source = source if source.row is None else source.row
    x = source.tensor
    inner = x.shape[1:] if x.dim() == len(entry) + 1 and len(x) == 1 else x.shape
    if len(inner) > len(entry):
        raise Refused("sets rows of the batch to a parameter that has one for each", FREEZE)
    return _spread(rows.copies(source, shape[0]), inner, len(shape))


def _spread(copies: Tensor, inner: Sequence[int], dims: int) -> Tensor:
    """Reshape copies [rows, *] to [rows, 1, ..., 1, *inner] of `dims` dimensions."""
    found = copies.reshape(copies.shape[0], *[1] * (dims - 1 - len(inner)), *inner)
    return mark_data(found, samples_of(copies)) if is_marked(copies) else found


def _like(rows: Activations, func: Any, x: Tensor, other: Any, *args: Any, **kwargs: Any) -> Instead:
    if not isinstance(other, Tensor):
        return None
    if func is torch.Tensor.expand_as:
        return lambda: x.expand(other.shape)
    if func is torch.Tensor.view_as:
        return lambda: x.view(other.shape)
    if func is torch.Tensor.reshape_as:
        return lambda: x.reshape(other.shape)
    return lambda: x.to(other.device, other.dtype, *args, **kwargs)


def _broadcast_tensors(rows: Activations, func: Any, *tensors: Any) -> Instead:
    flat = tensors[0] if len(tensors) == 1 else tensors
    shape = torch.broadcast_shapes(*(x.shape for x in flat))
    return lambda: tuple(x.expand(shape) for x in flat)


def _to(rows: Activations, func: Any, x: Tensor, *args: Any, tensor: Tensor | None = None, **kwargs: Any) -> Instead:
    return _like(rows, func, x, *(args if tensor is None else (tensor, *args)), **kwargs)


def _matmul(rows: Activations, func: Any, input: Tensor, other: Tensor) -> Instead:
    """W x with W [p, d] and x [*, d, n]; a vector instead of a matrix; or a stack of one matrix for each row."""
    if rows.source(input) is not None and rows.source(other) is None and input.dim() == 2 and other.dim() > 1:
        return lambda: torch.matmul(other.transpose(-1, -2), input.t()).transpose(-1, -2)
    if rows.source(other) is not None and other.dim() == 1 < input.dim():
        return lambda: torch.matmul(input, other[:, None]).squeeze(-1)
    if rows.source(input) is not None and input.dim() == 1 < other.dim():
        return lambda: torch.matmul(input[None], other).squeeze(-2)
    paired = _paired(rows, func, input, other) if min(input.dim(), other.dim()) > 2 else None
    return paired or _stacked(rows, input, other)


def _bmm(rows: Activations, func: Any, input: Tensor, mat2: Tensor, **kwargs: Any) -> Instead:
    return _paired(rows, func, input, mat2, **kwargs) or (None if kwargs else _stacked(rows, input, mat2))


def _baddbmm(
    rows: Activations, func: Any, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Instead:
    return None if (beta, alpha) != (1, 1) else lambda: torch.add(input, torch.bmm(batch1, batch2))


def _stacked(rows: Activations, input: Tensor, other: Tensor) -> Instead:
    """A product with a stack of matrices shared by all rows, or on the left of the data."""
    dims = max(input.dim(), other.dim())
    plain = rows.source(other) is not None and other.dim() == 2 and input.dim() > 1
    if plain or min(input.dim(), other.dim()) < 2 or dims > 10 or rows.source(input) is rows.source(other):
        return None
    stack = "abcdefgh"[: dims - 2]
    shape = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])

    def letters(x: Tensor) -> tuple[Tensor, str]:
        """Drop the broadcast dimensions."""
        mine = stack[len(stack) - x.dim() + 2 :]
        kept = [i for i, c in enumerate(mine) if x.shape[i] == shape[stack.index(c)]]
        x = x.squeeze([i for i in range(len(mine)) if i not in kept]) if len(kept) < len(mine) else x
        return x, "".join(mine[i] for i in kept)

    def instead() -> Tensor:
        (x, a), (y, b) = letters(input), letters(other)
        return torch.einsum(f"{a}xy,{b}yz->{stack}xz", x, y)

    return instead


def _einsum(rows: Activations, func: Any, equation: Any, *operands: Any) -> Instead:
    """Move the samples to the first dimension of data and output; treat a weight with a row a sample as activations."""
    flat = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in flat):
        return None
    terms, result = parsed(equation, flat)
    if len(flat) > 2:
        return lambda: _of_two_each(terms, result, flat)
    data = [(x, term) for x, term in zip(flat, terms, strict=True) if rows.source(x) is None]
    places = [(term, samples_of(x)) for x, term in data if depends_on_data(x)]
    if not places:
        return None
    term, place = places[0]
    at = place if isinstance(place, int) else place.simplest
    if not isinstance(at, int):
        at = 0
    letter = term[at : at + 1]
    if not letter or letter not in result:
        return None
    paired = [i for i, (x, term) in enumerate(zip(flat, terms, strict=True)) if rows.source(x) and letter in term]
    if paired:  # a row for each sample, in the first dimension
        firsts = {i: terms[i].index(letter) for i in paired}
        named = [letter + t.replace(letter, "") if i in paired else t for i, t in enumerate(terms)]
        if any(firsts.values()):
            moved = f"{','.join(named)}->{result}"
            return lambda: torch.einsum(moved, *(x.movedim(firsts.get(i, 0), 0) for i, x in enumerate(flat)))
        own = {i: rows.own(source) for i in paired if (source := rows.source(flat[i])) is not None}
        return lambda: torch.einsum(equation, *(own.get(i, x) for i, x in enumerate(flat)))
    if at == 0 and result[0] == letter and all(t[0] == letter for t, _ in places):
        return None

    def instead() -> Tensor:
        moved = [x.movedim(t.index(letter), 0) if letter in t else x for x, t in zip(flat, terms, strict=True)]
        named = [letter + t.replace(letter, "") if letter in t else t for t in terms]
        made = torch.einsum(f"{','.join(named)}->{letter}{result.replace(letter, '')}", *moved)
        return made.movedim(0, result.index(letter)).contiguous()

    return instead


def _of_two_each(terms: Sequence[str], result: str, operands: Sequence[Tensor]) -> Tensor:
    """einsum of several operands, by einsums of two, from the left."""
    x, term = operands[0], terms[0]
    for i, (other, letters) in enumerate(zip(operands[1:], terms[1:], strict=True), 2):
        later = set(result).union(*terms[i:])
        made = "".join(c for c in dict.fromkeys(term + letters) if c in later) if i < len(terms) else result
        x, term = torch.einsum(f"{term},{letters}->{made}", x, other), made
    return x


def _paired(rows: Activations, func: Any, *args: Any, **kwargs: Any) -> Instead:
    """Treat tensors made of parameters with as many rows as the data as activations."""
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()]
    data = [x for x in operands if rows.source(x) is None]
    if any(isinstance(place := samples_of(x), int) and place for x in data):
        return None  # the samples are not in the first dimension
    dims, count = max((x.dim() for x in data), default=0), max((x.shape[0] for x in data), default=0)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) if func in ALONG else 1
    if not isinstance(dim, int) or dim in (0, -dims):
        return None  # rows are not paired
    found = {}
    for x in operands:
        source = rows.source(x)
        if source is None or x.dim() != dims:
            continue
        if x.shape[0] == count:
            found[id(x)] = rows.own(source)
        elif func in ALONG:
            raise Refused(f"pairs {count} rows of the batch with {x.shape[0]} of a parameter", FREEZE)
    if not found:
        return None
    args = tuple(found.get(id(x), x) for x in args)
    kwargs = {key: found.get(id(x), x) for key, x in kwargs.items()}
    return lambda: func(*args, **kwargs)


def _joined(rows: Activations, func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Instead:
    """cat or stack along another dimension than the rows'."""
    dim = next(iter((*args, *kwargs.values())), 0)
    dims, count = max(x.dim() for x in tensors), tensors[0].shape[:1]
    if dim in (0, -dims - (func is torch.stack)) or dims < 2 or any(x.shape[:1] != count for x in tensors):
        return None
    sources = [(x, rows.source(x)) for x in tensors]
    activations = [x if source is None else rows.own(source) for x, source in sources]
    return lambda: func(activations, *args, **kwargs)


def _masked_scatter(rows: Activations, func: Any, input: Tensor, mask: Tensor, source: Tensor) -> Instead:
    if rows.source(source) is not None:
        raise Refused("hands the entries of a parameter to samples in turn", "use torch.where with a mask")
    return None


def _batch_norm(rows: Activations, func: Any, *args: Any, **kwargs: Any) -> Instead:
    """Refuse batch norm over several rows of data."""
    input = kwargs["input"] if "input" in kwargs else args[0]
    training = kwargs["training"] if "training" in kwargs else any(args[5:6])
    if training and rows.source(input) is None and input.shape[0] > 1:
        raise Refused(
            "normalises over the samples of a batch, so there is no per-sample gradient",
            "use F.group_norm or F.instance_norm, or training=False with frozen parameters",
        )
    return None


def _read(rows: Activations, func: Any, x: Tensor, index: Any) -> Instead:
    """x[index] with an index that depends on data: a part of x, or a table row for each row of the index."""
    entries = entries_of(index)
    if rows.source(x) is None or not entries:
        return None
    if not any(isinstance(entry, Tensor) and entry.dim() for entry in entries):  # integers
        index = tuple(int(e) if isinstance(e, Tensor) and e.dtype != torch.bool else e for e in entries)
        return lambda: x[index]
    first, others = entries[0], entries[1:]
    if not isinstance(first, Tensor) or first.is_floating_point() or first.dtype in (torch.bool, torch.uint8):
        return None
    if others or not first.dim() or not x.dim():
        return None
    ids, count = first.long(), len(x)

    def looked_up() -> Tensor:
        found = F.embedding(ids.remainder(count), x.flatten(1) if x.dim() > 1 else x.unsqueeze(1))  # ids from the end
        return found.unflatten(-1, x.shape[1:]) if x.dim() > 2 else found if x.dim() == 2 else found.squeeze(-1)

    return looked_up


LIKE = methods("expand_as", "view_as", "reshape_as", "type_as", "to")
"""Operations that read only the shape and type of their second operand; `to` may be one."""
BROADCAST_IN_PLACE = methods("add_", "sub_", "mul_", "div_", "copy_")
ALONG = methods("scatter", "scatter_add", "scatter_reduce", "gather", "index_add")
"""Operations that move entries along the dimension in their second argument."""
PAIRED = methods("where", "complex", "lerp", "addcmul", "pow", "div", "true_divide", "maximum", "minimum")
PAIRED |= {F.scaled_dot_product_attention, F.grid_sample} | ALONG
JOINED = {torch.stack, torch.concatenate}

MIXING = {F.batch_norm, torch.batch_norm, torch.native_batch_norm}
"""Operations that are refused for mixing samples, with or without parameters."""

REWRITTEN: dict[Any, Rewriting] = {
    **dict.fromkeys(LIKE, _like),
    torch.Tensor.to: _to,
    torch.broadcast_tensors: _broadcast_tensors,
    **dict.fromkeys(methods("matmul", "mm", "mv"), _matmul),
    **dict.fromkeys(PAIRED, _paired),
    **dict.fromkeys(methods("bmm"), _bmm),
    **dict.fromkeys(methods("baddbmm"), _baddbmm),
    torch.einsum: _einsum,
    **dict.fromkeys(JOINED, _joined),
    **dict.fromkeys(methods("masked_scatter"), _masked_scatter),
    **dict.fromkeys(MIXING, _batch_norm),
    **dict.fromkeys(BROADCAST_IN_PLACE, broadcast_in_place),
    torch.Tensor.__setitem__: assigned,
    torch.Tensor.__getitem__: _read,
}
"""Rewrites, called for each operation that reads data and tensors made of parameters."""

CHANGES = {getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name[-1] == "_" != name[-2]}
CHANGES |= {torch.Tensor.__setitem__}
"""Operations that write into their first operand, which then depends on all operands."""
