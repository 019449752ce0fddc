"""Track how operations move the rows of activations, and the owners of these rows with them.

An operation that only moves entries is applied to the owners as well. While rows are in order, only the operations of
`GATHERS` are tracked; once rows have left that order, all operations of `MOVES` are. `clipping.tape.writes` has
operations that write rows into a tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clipping.provenance.derived_parameters import EXPANSIONS, is_marked, methods, samples_of
from clipping.provenance.row_owners import NOBODY, Rows
from clipping.provenance.static_values import holds, numbers_of
from clipping.tape.batch_dimension import OF_PARTS, PERMUTATIONS, REDUCTIONS
from clipping.tape.mover import Moved, Mover, Place
from clipping.tape.rewritten import entries_of, width
from clipping.tape.writes import WRITES


def _read(it: Mover) -> Moved:
    """x[index]."""
    x, index = it.args[0], it.args[1]
    entries = entries_of(index)
    new = next((i for i, entry in enumerate(entries) if entry is not None), len(entries))
    first = entries[new] if new < len(entries) else Ellipsis
    place = samples_of(x)
    if place == 0 and (first is Ellipsis or (isinstance(first, slice) and first == slice(None))):
        return new or None
    single = isinstance(first, int) or (isinstance(first, Tensor) and not first.dim() and first.dtype != torch.bool)
    if place == 0 and single and (x.shape[0] != it.batch_size or _is_stack(x)):
        return None
    if not isinstance(place, Rows) and place and not any(isinstance(entry, Tensor) for entry in entries):
        return _left(entries, place, x.dim())
    if any(entry is Ellipsis for entry in entries):
        return None
    if place == 0 and not any(isinstance(entry, Tensor) for entry in entries):
        entries = entries[: new + 1]  # the others read positions of these samples
    dims = sum(width(entry) for entry in entries)
    owners = it.owners(x, dims)
    if owners is None:
        return it.unknown() if isinstance(place, Rows) else None
    return it.rows(owners[_with_numbers(entries, owners)])


def _with_numbers(entries: Sequence[Any], owners: Tensor) -> tuple[Any, ...]:
    """Return an index into `owners`. A dimension whose owners are all equal is indexed by 0 if values are unknown."""
    found: list[Any] = []
    dim = 0
    for entry in entries:
        if isinstance(entry, Tensor):
            known = numbers_of(entry)
            if known is None and entry.dtype != torch.bool and owners.numel() and _same_along(owners, dim):
                known = torch.zeros(entry.shape, dtype=torch.long, device=owners.device)
            found.append((entry if known is None else known).to(owners.device))
        else:
            found.append(entry)
        dim += width(entry)
    return tuple(found)


def _same_along(owners: Tensor, dim: int) -> bool:
    return holds((owners.amin(dim) == owners.amax(dim)).all())


def _left(entries: Sequence[Any], place: int, dims: int) -> int | None:
    """Find dimension `place` after an index of integers and slices; None if the index reads only part of it."""
    dim, after = 0, place
    for entry in entries:
        if entry is None:
            after += dim <= place
        elif entry is Ellipsis:
            dim += dims - sum(other is not None for other in entries) + 1
        else:
            if dim == place and entry != slice(None):
                return None
            after -= isinstance(entry, int) and dim < place
            dim += 1
    return after


def _is_stack(x: Tensor) -> bool:
    """True for a stack of tensors with one row a sample, or of layer states: dimension 0 does not hold samples.

    False if the samples were followed into dimension 0.
    """
    name = "" if is_marked(x) else type(x.grad_fn).__name__
    return name.startswith(("Stack", "Unsqueeze")) or (x.output_nr > 0 and ("Rnn" in name or "RNN" in name))


def _along(position: int, default: int | None = 0) -> Callable[[Mover], Moved]:
    """Make a move along the dimension that an argument names."""

    def moved(it: Mover) -> Moved:
        x, dim = it.args[0], it.option(position, "dim", default)
        place = samples_of(x)
        if not isinstance(dim, int):
            return it.unknown() if isinstance(place, Rows) else None
        dim %= max(1, x.dim())
        if dim == place and it.func in SINGLE and (place or x.shape[0] != it.batch_size or _is_stack(x)):
            return None
        args, kwargs = list(it.args[1:]), it.kwargs
        if len(args) < position:
            kwargs = {**kwargs, "dim": dim}
        else:
            args[position - 1] = dim
        return _of_dimensions(it, [dim], lambda owners: it.func(owners, *args, **kwargs))

    return moved


def _of_dimensions(it: Mover, dims: Sequence[int], func: Callable[[Tensor], Any]) -> Moved:
    """Move the owners of x, too, if `func` moves entries along a dimension that holds rows."""
    x, place = it.args[0], samples_of(it.args[0])
    known = range(place.owners.dim()) if isinstance(place, Rows) else (place,)
    if not any(dim in known for dim in dims):
        return place if isinstance(place, Rows) else None
    owners = it.owners(x, max(dims) + 1)
    return None if owners is None else _all(it, func(owners))


def _turned(it: Mover) -> Moved:
    """flip and roll, along some dimensions; roll moves all entries if it names none."""
    x = it.args[0]
    given = it.kwargs.get("dims", it.args[1:] if it.func in FLIPS else it.args[2:])
    flat = given if isinstance(given, (tuple, list)) else (given,)
    dims = [d % max(1, x.dim()) for each in flat for d in (each if isinstance(each, (tuple, list)) else (each,))]
    if it.func in FLIPS:
        return _of_dimensions(it, dims, lambda owners: owners.flip(dims))
    return _of_dimensions(it, dims or range(x.dim()), lambda owners: owners.roll(it.option(1, "shifts"), dims))


def _gathered(it: Mover) -> Moved:
    """x.gather(0, index) and take_along_dim: each entry comes from its own row."""
    x, *others = it.args
    place, dim = samples_of(x), it.option(2 if it.func in TAKEN else 1, "dim")
    if not isinstance(dim, int) or (dim % max(1, x.dim()) != place and not isinstance(place, Rows)):
        return None
    owners = it.owners(x, x.dim())
    return it.unknown() if owners is None else it.rows(it.func(owners, *others, **it.kwargs))


def _all(it: Mover, owners: Any) -> Moved:
    if isinstance(owners, Tensor):
        return it.rows(owners)
    return [it.rows(each) for each in owners]


def _joined(it: Mover) -> Moved:
    """cat and stack."""
    tensors: Sequence[Tensor] = it.option(0, "tensors")
    dim = it.option(1, "dim", 0)
    stacked = it.func is torch.stack
    dims = max(x.dim() for x in tensors) + stacked
    dim %= max(1, dims)
    if not stacked:
        tensors = [x for x in tensors if x.dim() == dims]  # an empty tensor of one dimension adds nothing to cat
    places = [samples_of(x) for x in tensors]
    irregular = any(isinstance(place, Rows) for place in places)
    if not irregular:
        at = max(places)
        if stacked and (it.batch_size == 1 or dims == 1):
            return None  # with one sample every row is its own; scalars have no rows
        if stacked:
            return at + 1 if dim <= at else at
        if dim != at:
            return None
    known = max([dim + 1 - stacked, *(place.owners.dim() for place in places if isinstance(place, Rows))])
    beside = None if irregular else dim
    owners = [it.owners(x, known, beside) for x in tensors]
    if any(each is None for each in owners):
        return it.unknown() if irregular else None
    most = max(each.dim() for each in owners if each is not None)
    owners = [it.owners(x, most, beside) for x in tensors]
    return it.rows(it.func(owners, dim))


def _repeated(it: Mover) -> Moved:
    """repeat, tile, expand and broadcast_to."""
    x, place = it.args[0], samples_of(it.args[0])
    given = it.args[1:] or tuple(it.kwargs.values())
    sizes = tuple(given[0]) if isinstance(given[0], (tuple, list)) else given
    new = it.output.dim() - x.dim()
    copies = it.func in REPEATS
    if copies:
        sizes = (*[1] * (it.output.dim() - len(sizes)), *sizes)
    if not isinstance(place, Rows) and (not copies or x.dim() <= place or sizes[new + place] == 1):
        return new + place if new and x.dim() > place else None
    owners = it.owners(x, 1 if isinstance(place, Rows) else place + 1)
    if owners is None:
        return place if isinstance(place, Rows) else None
    rest = x.dim() - owners.dim()
    whole = owners.view(*owners.shape, *[1] * rest)
    found = whole.repeat(sizes) if copies else whole.expand(sizes)
    return it.rows(found.flatten(found.dim() - rest)[..., 0] if rest else found)


def _viewed(it: Mover) -> Moved:
    """view and similar operations: the same entries in the same order."""
    x = it.args[0]
    place = samples_of(x)
    if not isinstance(place, Rows) or place.unknown or not isinstance(it.output, Tensor):
        return place if isinstance(place, Rows) else None
    return _in_other_dimensions(it, place.owners)


def of_later_dimension(it: Mover) -> Place:
    """Place of a view of an activation with samples after positions; the view may merge both dimensions.

    Args:
        it: the view and its operand.
    """
    owners = it.owners(it.args[0], 0) if isinstance(it.output, Tensor) else None
    return 0 if owners is None else _in_other_dimensions(it, owners).simplest


def _in_other_dimensions(it: Mover, owners: Tensor) -> Rows:
    x, shape = it.args[0], it.output.shape
    if shape[: owners.dim()] == owners.shape:
        return it.rows(owners)
    each = x.shape[owners.dim() :].numel()
    for dims in range(len(shape) + 1):
        rest = shape[dims:].numel()
        if rest and each % rest == 0 and owners.numel() * each == shape.numel():
            more = owners.reshape(-1, 1).expand(-1, each // rest)
            return it.rows(more.reshape(shape[:dims]))
    return it.unknown() if shape.numel() else it.rows(owners.new_zeros(shape))


def _permuted(it: Mover) -> Moved:
    x = it.args[0]
    place = samples_of(x)
    if not isinstance(place, Rows) or place.unknown:
        return place if isinstance(place, Rows) else None
    if not place.owners.dim():  # one sample has all rows: a new first dimension is a batch of one
        first = it.func in UNSQUEEZES and it.option(1, "dim") in (0, -1 - x.dim())
        return it.rows(place.owners[None]) if first else place
    owners = it.owners(x, x.dim())
    assert owners is not None
    return _all(it, it.func(owners, *it.args[1:], **it.kwargs))


def _reduced(it: Mover) -> Moved:
    """Reductions such as sum and mean, over some or all dimensions."""
    x, dims = it.args[0], it.option(1, "dim")
    place = samples_of(x)
    if not isinstance(place, Rows) or place.unknown:
        return place if isinstance(place, Rows) else None
    over = range(x.dim()) if dims is None else dims if isinstance(dims, (tuple, list)) else (dims,)
    inside = [d % max(1, x.dim()) for d in over if d % max(1, x.dim()) < place.owners.dim()]
    if not inside:
        return place
    if not place.owners.numel():  # no rows
        sums = place.owners.sum(inside, keepdim=bool(it.kwargs.get("keepdim", False)))
        return it.rows(torch.full_like(sums, NOBODY))
    highest, lowest = place.owners.amax(inside, keepdim=True), place.owners
    if not holds(((lowest == highest) | (lowest == NOBODY)).all()):
        return it.unknown()
    return it.rows(highest if it.kwargs.get("keepdim", False) else highest.amax(inside))


def _positions(it: Mover) -> Moved:
    """where and nonzero of a mask: indices of positions."""
    mask = it.args[0]
    if len(it.args) > 1 or it.kwargs:
        return None
    owners = it.owners(mask, mask.dim())
    if owners is None:
        return it.unknown()
    found = it.rows(owners[mask != 0])
    return found if isinstance(it.output, Tensor) else [found] * len(it.output)


def _ordered(it: Mover) -> Moved:
    """sort, argsort and topk of one value a row."""
    x = it.args[0]
    if x.dim() != 1:
        return samples_of(x) or None
    order = it.output if isinstance(it.output, Tensor) else it.output[1]
    owners = it.owners(x, 1)
    if owners is None:
        return None
    moved = it.rows(owners[order])
    return moved if isinstance(it.output, Tensor) else [moved, moved]


def _recurrent(it: Mover) -> Moved:
    """Recurrent layers: sequences, packed or not, and last states [layers, B, H]."""
    x, states = it.args[0], len(it.output) - 1
    place, packed = samples_of(x), not it.args[1][0].is_floating_point()
    if is_marked(it.output[0]):  # its parameters are trainable, and its parts were tracked
        at = samples_of(it.output[0])
        return [samples_of(y) for y in it.output] if packed or isinstance(place, Rows) else [at, *[1] * states]
    if not isinstance(place, Rows):
        return [place, *[1] * states]
    dims = 1 if packed else 2  # and one for the features, if any
    owners = it.owners(x, dims)
    if owners is None:
        return it.unknown()
    owners = owners.reshape(*owners.shape[:dims], -1)[..., 0]
    first = owners[: int(it.args[1][0])] if packed else owners[:, 0] if it.args[8] else owners[0]
    return [it.rows(owners), *[it.rows(first.expand(y.shape[:2])) for y in it.output[1:]]]


def _of_parts(it: Mover) -> Moved:
    """Composites, whose parts were tracked if they have trainable parameters."""
    made = [it.output] if isinstance(it.output, Tensor) else [x for x in it.output if x is not None]
    return [samples_of(x) for x in made] if is_marked(made[0]) else None


def _padded_up(it: Mover) -> Moved:
    """pad_sequence of one sequence a sample."""
    owners = [found for x in it.args[0] if (found := it.owners(x, 1)) is not None]
    if len(owners) < len(it.args[0]):
        return it.unknown()
    return it.rows(torch.nn.utils.rnn.pad_sequence(owners, it.option(1, "batch_first", False), NOBODY))


def _packed(it: Mover) -> Moved:
    """pack_padded_sequence: sequences of different lengths step by step, and the batch size of each step."""
    x, lengths, batch_first = it.args
    owners = it.owners(x, 2)
    if owners is None:
        return it.unknown()
    owners = owners.reshape(*owners.shape[:2], -1)[..., :1]
    rows, _ = torch._pack_padded_sequence(owners, lengths, batch_first)
    return [it.rows(rows[:, 0]), it.unknown()]


def _padded(it: Mover) -> Moved:
    """pad_packed_sequence: padded sequences and their lengths."""
    x, sizes, batch_first, _, steps = it.args
    owners = it.owners(x, 1)
    if owners is None:
        return it.unknown()
    owners = owners.reshape(len(owners), -1)[:, :1]
    rows, _ = torch._pad_packed_sequence(owners, sizes, batch_first, NOBODY, steps)
    return [it.rows(rows[..., 0]), it.unknown()]


UNSQUEEZES = methods("unsqueeze")
SINGLE = methods("select", "unbind")
TAKEN = methods("take_along_dim")
FLIPS = methods("flip")
REPEATS = methods("repeat", "tile")
VIEWS = methods("view", "reshape", "flatten", "unflatten", "squeeze", "contiguous", "clone", "detach", "ravel")
GATHERS: dict[Any, Callable[[Mover], Moved]] = {
    torch.Tensor.__getitem__: _read,
    **dict.fromkeys(methods("index_select", "narrow"), _along(1, None)),
    **dict.fromkeys(SINGLE, _along(1)),
    **dict.fromkeys(methods("chunk", "split", "tensor_split"), _along(2)),
    **dict.fromkeys(FLIPS | methods("roll"), _turned),
    **dict.fromkeys(methods("gather", "take_along_dim"), _gathered),
    **dict.fromkeys(methods("cat", "concat", "concatenate", "stack"), _joined),
    **dict.fromkeys(EXPANSIONS | REPEATS, _repeated),
    **dict.fromkeys(methods("sort", "argsort"), _ordered),
    **WRITES,
    **dict.fromkeys({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}, _recurrent),
    torch._C._nn.pad_sequence: _padded_up,
    torch._pack_padded_sequence: _packed,
    torch._pad_packed_sequence: _padded,
}
"""Operations that may reorder rows that are in order."""

MOVES: dict[Any, Callable[[Mover], Moved]] = {
    **dict.fromkeys(PERMUTATIONS, _permuted),
    **GATHERS,
    **dict.fromkeys(VIEWS, _viewed),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(methods("repeat_interleave"), _along(2, None)),
    **dict.fromkeys(methods("nonzero", "where"), _positions),
    **dict.fromkeys(OF_PARTS, _of_parts),
}
"""Operations that move rows that are out of order."""
