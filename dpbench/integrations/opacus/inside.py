"""A loss that the model computes itself, from labels among its inputs: cut off where the loss begins, not at the end.

As transformers' models do: ``model(**batch).loss.backward()``. The logits that `F.cross_entropy` reads inside of the
model are outputs in the sense of `dpbench.integrations.opacus.outputs`, if the mean that it takes is one over samples:
if each sample has as many labels that are not ignored as every other. Then what is returned depends on the parameters
by way of these logits alone, which is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MANY = 256
"""Nodes of a loss that are gone through."""


class LossInside(TorchFunctionMode):
    """Watches a forward pass for `F.cross_entropy` of a mean.

    Args:
        batch_size: B.
        take: of logits [B·k, classes], gives the same numbers to compute the loss of.
        reduction: "mean" or "sum", of the caller's.
    """

    def __init__(self, batch_size: int, take: Callable[[Tensor], Tensor], reduction: str) -> None:
        super().__init__()
        self._batch_size, self._take, self._reduction = batch_size, take, reduction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            given = (
                dict(zip(("input", "target", "weight", "size_average", "ignore_index"), args, strict=False)) | kwargs
            )
            if self._of_samples(given):
                rest = {name: x for name, x in given.items() if name not in ("input", "size_average", "reduce")}
                return func(self._take(given["input"]), **rest)
        return func(*args, **kwargs)

    def _of_samples(self, given: dict[str, Any]) -> bool:
        logits, labels = given["input"], given["target"]
        if not logits.requires_grad or logits.dim() != 2 or labels.shape != logits.shape[:1] or not self._batch_size:
            return False
        if given.get("reduction", "mean") != self._reduction or len(labels) % self._batch_size:
            return False
        if self._reduction == "sum":
            return True
        count = (labels != given.get("ignore_index", -100)).view(self._batch_size, -1).sum(1)
        return given.get("weight") is None and bool((count == count[0]).all())


def depends_on(x: Tensor, anchors: set[int]) -> bool:
    """Does a gradient of `x` end at these tensors, by their identities, and nowhere else?

    Args:
        x: with a graph, or without.
        anchors: identities of tensors without a graph of their own.
    """
    found, to_go = {x.grad_fn}, [x.grad_fn]
    while to_go:
        node = to_go.pop()
        variable = getattr(node, "variable", None)
        if len(found) > MANY or (variable is not None and id(variable) not in anchors):
            return False
        for after, _ in node.next_functions:  # type: ignore[union-attr]
            if after is not None and after not in found:
                found.add(after)
                to_go.append(after)
    return True
