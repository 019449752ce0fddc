"""Autograd's view of a tensor: how often it was written to, and the nodes of its graph.

Functions take:
    tensors: any, or by name.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was written to, by autograd's count; -1 for an inference tensor, which has none."""
    return [-1 if x.is_inference() else x._version for x in tensors]


def named_versions(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return identity and version of each tensor by name, which stay if it is neither replaced nor written to."""
    return dict(zip(tensors, zip(map(id, tensors.values()), versions_of(tensors.values()), strict=True), strict=True))


def hooks_of(parameters: Iterable[Tensor]) -> int:
    """Count the hooks of parameters, which may change their gradients or read them.

    Args:
        parameters: leaves.
    """
    hooks = [hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]
    return sum(map(len, hooks))


def nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the graph below some roots, each once.

    Args:
        roots: autograd nodes, or None.
    """
    seen: set[Any] = {None}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [child for child, _ in node.next_functions]
