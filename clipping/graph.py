"""The graph that autograd recorded of the losses: its nodes, and what it reads that the tape did not see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from clipping.interface import Parameters, Problem
from clipping.tape import Tape


def unrecorded(losses: Tensor, tape: Tape, parameters: Parameters) -> list[Problem]:
    """Parameters that the loss's graph reads and the tape did not see used at all, or less often than the graph does.

    An edge of the graph into a parameter's gradient accumulator is one read. Reads on the way to a source are the
    source's own; each other one must be a recorded use, or its share would be missing from the norm. A use that is not
    in this graph (of a forward pass that came to nothing) stands for no read in it.
    """
    names = {id(s.tensor): name for s in tape.sources() if s.is_parameter for name in s.parameters}
    names |= {id(p): name for name, p in parameters.items()}
    made = [source.tensor.grad_fn for source in tape.sources() if not source.is_parameter]
    inside = set(nodes(made))
    edges: Counter[str] = Counter()
    there = set()
    for node in nodes([losses.grad_fn]):
        there.add(node._sequence_nr())
        if node not in inside:
            leaves = [getattr(child, "variable", None) for child, _ in node.next_functions]
            edges.update(names.get(id(leaf), "") or tape.name_of(leaf) for leaf in leaves)
    edges.pop("", None)
    uses = [use for use in tape.uses if use.node in there]
    counted = Counter(
        name for use in uses for source, rule in use.rules if not rule.is_fallback for name in source.parameters
    )
    loose = {name for use in uses for source, rule in use.rules if rule.is_fallback for name in source.parameters}
    return [
        Problem(
            name,
            f"is read {count} times, of which the tape saw {counted[name]}: a custom function or compiled code",
            "take the parameter out of it, freeze it, or use microbatch or vmap",
        )
        for name, count in edges.items()
        if count > counted[name] and name not in loose
    ]


def nodes(roots: list[Any]) -> Iterator[Any]:
    """The nodes of the graph below some roots, each once."""
    stack, seen = list(roots), set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(child for child, _ in node.next_functions)
