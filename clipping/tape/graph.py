"""The graph that autograd recorded of the losses: does it read anything of the parameters that the tape did not see?

The nodes that a use made have the numbers from `Use.first` up to `Use.last`. An edge into a parameter, or into a tensor
made of parameters alone, is a read, and must come from such a node; and what such nodes give must be taken from the
use's output alone (not from a weight that they transposed, as a derivative of a derivative does; nor from what the
output is a view of). Else a share would be missing from the norm. This is looked for in every call, since any call may
take another path than the last one did: a step takes hundreds of times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clipping.core.types import Parameters, Problem
from clipping.numerics import kernels
from clipping.tape.record import Tape

_NODES: Any = torch._C._functions
"""The types of autograd's nodes. They are not read off a node: none can be made while gradients are disabled."""
_LEAF: Any = _NODES.AccumulateGrad
"""Of a leaf."""
_CAST: Any = _NODES.ToCopyBackward0
"""Of one parameter: autocast makes it once, and keeps it for later calls."""


def unrecorded(losses: Tensor, tape: Tape, parameters: Parameters) -> list[Problem]:
    """Parameters that the loss's graph reads where the tape saw no use of them.

    The tape is told which of its uses are in this graph: so many gradients must arrive. (A use of a forward pass that
    came to nothing is not.) And it is told the number of the graph, which is that of other graphs of the same nodes.
    Activation functions are told whether the gradient that they are handed is theirs alone.

    Args:
        losses: ℓ [B], with their graph.
        tape: of the forward pass.
        parameters: name -> trainable parameter.

    Raises:
        RuntimeError: autograd's own, of an input that was changed in place since.
    """
    used = [source for use in tape.uses for source, _ in use.rules]  # some were changed in place since
    sources = {*tape.sources(), *used}
    inside = set(nodes([source.node for source in sources if source.node is not None]))
    known = {id(p): name for name, p in parameters.items()}
    for source in sources:
        if id(source.tensor) not in known and source.is_parameter:  # it stood in for one
            known[id(source.tensor)] = next(iter(source.parameters))
    maker = {number: use for use in tape.uses for number in range(use.first, use.last)}
    unseen: list[str] = []
    leaves: dict[int, Tensor] = {}
    numbers: set[int] = set()
    kinds: list[type] = []
    leads: dict[Any, list[Any]] = {}
    seen = {losses.grad_fn, None} | inside
    stack = [losses.grad_fn] if losses.grad_fn is not None else []
    while stack:
        node: Any = stack.pop()
        number = node._sequence_nr()
        numbers.add(number)
        kinds.append(type(node))
        mine = maker.get(number)
        if mine is not None and mine.node >= mine.last and not tape.hooked:
            _require_unchanged(node)
        for child, _ in node.next_functions:
            kind: Any = type(child)
            if kernels.overwriting.is_followed(kind):
                leads.setdefault(child, []).append(node)
            if kind is _LEAF:
                leaf = child.variable
                name = known.get(id(leaf)) or tape.name_of(leaf)
                if not name:
                    leaves[id(child)] = leaf
                elif mine is None:
                    unseen.append(name)
                continue
            if child in inside or (kind is _CAST and _is_parameter(child, known)):
                unseen += _names(child, known, tape) if mine is None else []
                continue
            if child not in seen:
                seen.add(child)
                stack.append(child)
            below = -1 if child is None else child._sequence_nr()
            use = maker.get(below)
            if use is not mine and use is not None and not {use.node, use.view} & {number, below}:
                unseen += [name for source, _ in use.rules for name in source.parameters]
    kernels.overwriting.note_alone(leads)
    reached = [use for use in tape.uses if use.node in numbers]
    tape.arrivals.expect(reached, list(leaves.values()), hash(tuple(kinds)))
    return [
        Problem(
            name,
            "is read where the tape does not see it: by a custom function, by compiled code, by a derivative of a "
            "derivative, or through a view that was changed in place",
            "take the parameter out of it, freeze it, or use microbatch or vmap",
        )
        for name in dict.fromkeys(unseen)
    ]


def read_before(losses: Tensor, number: int, parameters: Parameters) -> list[Problem]:
    """Parameters that the losses' graph reads by nodes of an earlier number: in a forward pass that went before.

    Args:
        losses: [B], with their graph.
        number: of the first node that the recorded pass can have made.
        parameters: the trainable ones, by name.
    """
    known = {id(p): name for name, p in parameters.items()}
    stale = [
        known[id(child.variable)]
        for node in nodes([losses.grad_fn])
        if node._sequence_nr() < number and type(node) not in (_LEAF, _CAST)  # autocast keeps its casts
        for child, _ in node.next_functions
        if type(child) is _LEAF and id(child.variable) in known
    ]
    return [
        Problem(
            name, "is read by an earlier forward pass than the one that is recorded", "take the losses of the last one"
        )
        for name in dict.fromkeys(stale)
    ]


def _require_unchanged(node: Any) -> None:
    """Of a node that no backward pass runs here, since an anchor is tied to what it gives: ask for what it has saved.

    autograd looks then whether that was changed in place since, as it would in a backward pass.
    """
    kind: Any = type(node)
    for name in _saved(kind):
        getattr(node, name)


@functools.cache
def _saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"]


def _names(node: Any, known: dict[int, str], tape: Tape) -> list[str]:
    """Of the parameters below a node."""
    leaves = (each.variable for each in nodes([node]) if type(each) is _LEAF)
    found = (known.get(id(leaf)) or tape.name_of(leaf) for leaf in leaves)
    return [name for name in found if name]


def _is_parameter(cast: Any, known: dict[int, str]) -> bool:
    (child, _), *_ = cast.next_functions
    return type(child) is _LEAF and id(child.variable) in known


def nodes(roots: list[Any]) -> Iterator[Any]:
    """The nodes of the graph below some roots, each once.

    Args:
        roots: nodes of autograd's, or None.
    """
    seen: set[Any] = {None}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [child for child, _ in node.next_functions]
