"""Find parameters that the losses' graph reads without the tape having seen it.

A use's nodes have numbers from `Use.first` to `Use.last`, exclusive. An edge into a parameter, or into a tensor made of
parameters alone, is a read, and must come from such a node. The results of these nodes may leave only through the use's
output: not through a weight that they transposed (as in a second derivative), nor through the base of an output that is
a view. Otherwise the norm would miss a part of the gradient. Every call is checked, as any call may take another path.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from clipping.core.autograd import nodes
from clipping.core.types import Parameters, Problem
from clipping.numerics import kernels
from clipping.tape.record import Tape

_NODES: Any = torch._C._functions
"""Types of autograd's nodes. (With gradients disabled, a node cannot be created to read its type.)"""
_LEAF: Any = _NODES.AccumulateGrad
"""Node type of a leaf."""
_CAST: Any = _NODES.ToCopyBackward0
"""Node type of a parameter's cast, which autocast makes once and caches."""
_ALIAS: Any = _NODES.AliasBackward0
"""Node type of a model's recorded output."""


def unrecorded(losses: Tensor, tape: Tape, parameters: Parameters) -> list[Problem]:
    """Return problems for parameters that the loss's graph reads where the tape saw no use.

    Tells the tape which of its uses are in this graph (the loss depends on them), and so how many gradients must
    arrive. Also tells it the graph's number, which graphs with the same nodes share, and tells activation functions
    whether they own the gradient that they receive.

    Raises:
        RuntimeError: autograd's error for an input that was changed in place since.
    """
    used = [source for use in tape.uses for source, _ in use.rules]  # includes sources changed in place since
    sources = {*tape.sources(), *used}
    inside = set(nodes([source.node for source in sources if source.node is not None]))
    known = {id(p): name for name, p in parameters.items()}
    for source in sources:
        if id(source.tensor) not in known and source.is_parameter:  # it replaced a parameter
            known[id(source.tensor)] = next(iter(source.parameters))
    maker = {number: use for use in tape.uses for number in range(use.first, use.last)}
    unseen: dict[str, Any] = {}  # by name, the node that reads it
    leaves: dict[int, Tensor] = {}
    numbers: set[int] = set()
    kinds: list[Any] = []
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
            # its output is tied to an anchor, so no backward pass runs it: reading what it saved lets autograd check it
            for name in _saved(kinds[-1]):
                getattr(node, name)
        for child, _ in node.next_functions:
            kind: Any = type(child)
            if kind is _LEAF:
                leaf = child.variable
                name = known.get(id(leaf)) or tape.name_of(leaf)
                if not name:
                    leaves[id(child)] = leaf
                elif mine is None:
                    unseen.setdefault(name, node)
                continue
            if child in inside or (kind is _CAST and _is_parameter(child, known)):
                unseen |= dict.fromkeys(_names(child, known, tape) if mine is None else [], node)
                continue
            if kernels.overwriting.is_followed(kind):
                leads.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                stack.append(child)
            below = -1 if child is None else child._sequence_nr()
            use = maker.get(below)
            if use is not mine and use is not None and not {use.node, use.view} & {number, below}:
                unseen |= dict.fromkeys(use.names, node)
    alone = kernels.overwriting.alone(leads) if leads else []
    reached = [use for use in tape.uses if use.node in numbers]
    tape.arrivals.expect(reached, list(leaves.values()), hash(tuple(kinds)), alone)
    return [_unseen(name, node, tape) for name, node in unseen.items()]


def _unseen(name: str, node: Any, tape: Tape) -> Problem:
    """Return the problem of a parameter that a node reads unseen."""
    where, remedy = "by compiled code, by a derivative of a derivative, or through a view changed in place", ""
    is_output = isinstance(node, _ALIAS)  # of the model, which the loss reads
    if is_output or not tape.began <= node._sequence_nr() < tape.ended:
        where = "outside of the model's recorded forward pass"
        remedy = "let forward return p.expand(len(x), ...), not p, or let engine.make_step run the loss; "
    elif isinstance(node, torch.autograd.function.BackwardCFunction):
        function = type(node).__name__.removesuffix("Backward")
        where = f"by the custom function {function}, called beneath another mode or in a captured program"
    reason = f"is read where the tape does not see it: {where}"
    return Problem(name, reason, f"{remedy}freeze it, or use microbatch or vmap")


def read_before(losses: Tensor, number: int, parameters: Parameters) -> list[Problem]:
    """Return problems for parameters that the losses' graph reads in an earlier forward pass, by nodes of lower
    numbers.

    Args:
        number: number of the first node that the recorded pass may have made.
    """
    known = {id(p): name for name, p in parameters.items()}
    stale = [
        known[id(child.variable)]
        for node in nodes([losses.grad_fn])
        if node._sequence_nr() < number and type(node) not in (_LEAF, _CAST)  # autocast caches its casts
        for child, _ in node.next_functions
        if type(child) is _LEAF and id(child.variable) in known
    ]
    return [
        Problem(
            name, "is read by an earlier forward pass than the one that is recorded", "take the losses of the last one"
        )
        for name in dict.fromkeys(stale)
    ]


@functools.cache
def _saved(kind: type) -> list[str]:
    """Names of the saved tensors of a type of nodes; reading one raises if it was changed in place."""
    return [name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"]


def _names(node: Any, known: dict[int, str], tape: Tape) -> list[str]:
    """Return the names of the parameters below a node."""
    leaves = (each.variable for each in nodes([node]) if type(each) is _LEAF)
    found = (known.get(id(leaf)) or tape.name_of(leaf) for leaf in leaves)
    return [name for name in found if name]


def _is_parameter(cast: Any, known: dict[int, str]) -> bool:
    (child, _), *_ = cast.next_functions
    return type(child) is _LEAF and id(child.variable) in known
